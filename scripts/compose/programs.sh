#!/usr/bin/env bash
# Installs the Debian packages of programs that are missing. Part of scripts/compose_test.sh.
set -euo pipefail

NUM_ATTEMPTS=3
# Another apt may be at work.
LOCK_TIMEOUT_S=120
ATTEMPT_TIMEOUT_S=600

missing=()
for program in dockerd:docker.io docker-compose:docker-compose debootstrap:debootstrap iptables:iptables ip:iproute2; do
    command -v "${program%%:*}" > /dev/null || missing+=("${program##*:}")
done
[ ${#missing[@]} != 0 ] || exit 0
printf 'installing %s\n' "${missing[*]}"
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "only root can, on Debian or alike"
    exit "$NOT_RUN"
fi

export DEBIAN_FRONTEND=noninteractive
install() {
    # An index that cannot be fetched need not be one that is wanted.
    apt-get update || true
    timeout -k 10 "$ATTEMPT_TIMEOUT_S" apt-get -o "DPkg::Lock::Timeout=$LOCK_TIMEOUT_S" install -y --no-install-recommends "${missing[@]}"
}
for attempt in $(seq "$NUM_ATTEMPTS"); do
    if install > "$CACHE/apt.log" 2>&1 < /dev/null; then exit 0; fi
    [ "$attempt" != "$NUM_ATTEMPTS" ] || break
    sleep 10
    # What a killed apt left half installed.
    dpkg --configure -a > /dev/null 2>&1 < /dev/null || true
done
tail -n 20 "$CACHE/apt.log"
exit "$NOT_RUN"
