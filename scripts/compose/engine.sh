#!/usr/bin/env bash
# Runs a command with a Docker engine of its own: engine.sh DATA COMMAND [ARGUMENT...]. Part of scripts/compose_test.sh.
#
# Engine, containers, mounts, bridges and filter rules live in namespaces that end with this script however it ends, so
# none of them is left behind. There is no network but the engine's own. DATA stays for the next run, unless this one is killed:
# what an engine was writing then is not trusted.
set -euo pipefail

START_TIMEOUT_S=60
STOP_TIMEOUT_S=60
data=$1

if [ "${2:-}" != --inside ]; then
    shift
    namespaces=(unshare --mount --net --pid --fork --mount-proc --kill-child=KILL)
    "${namespaces[@]}" true || { echo "namespaces cannot be made here"; exit "$NOT_RUN"; }
    exec setpriv --pdeathsig KILL "${namespaces[@]}" "$0" "$data" --inside "$@"
fi
shift 2

empty() {
    [ ! -e "$data" ] || mv "$data" "$(mktemp -u "$data.old.XXXXXX")"
    mkdir -p "$data"
}

answers() {
    timeout 10 docker version > /dev/null 2>&1
}

# Sets $engine. Fails if it does not answer in time.
start() {
    dockerd --data-root "$data" --host unix:///run/docker.sock --log-level warn > "$data.log" 2>&1 < /dev/null 9>&- &
    engine=$!
    local end=$((SECONDS + START_TIMEOUT_S))
    until answers; do
        if ! kill -0 "$engine" 2> /dev/null || [ "$SECONDS" -gt "$end" ]; then
            kill -KILL "$engine" 2> /dev/null || true
            wait "$engine" || true
            return 1
        fi
        sleep 0.2
    done
}

# Sockets and ids of processes lie here: those of other engines must not be met, nor be met by others.
{ mount -t tmpfs -o mode=755 tmpfs /run && ip link set lo up; } || exit "$NOT_RUN"
export DOCKER_HOST=unix:///run/docker.sock
# The client that came with the engine, which may be older than another one here.
PATH=$(dirname "$(command -v dockerd)"):$PATH

{ [ -e "$data/whole" ] || empty; } && rm -f "$data/whole" || exit "$NOT_RUN"
start || { empty && start; } || { tail -n 20 "$data.log"; echo "dockerd does not start here"; exit "$NOT_RUN"; }
# Many files, which nobody waits for; what is left of them at the end is the next run's.
rm -rf --one-file-system "$data".old.* &
code=0
"$@" || code=$?
if [ "$code" != 0 ] && ! answers; then
    tail -n 20 "$data.log"
    echo "the engine has ended"
    exit "$NOT_RUN"
fi
kill "$engine"
(sleep "$STOP_TIMEOUT_S" && kill -KILL "$engine") &
if wait "$engine"; then touch "$data/whole"; fi
exit "$code"
