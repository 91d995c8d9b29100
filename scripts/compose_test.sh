#!/usr/bin/env bash
# Builds the images on a base image bootstrapped from Debian's packages, and runs tests/compose with a real engine.
#
#   scripts/compose_test.sh [--install] [pytest's arguments]
#
# No image is pulled. An engine that answers (DOCKER_HOST, or the default socket) is used as it is; otherwise root gets one
# of its own, whose data stay in $CACHE for the next run. --install takes missing programs from Debian's packages.
# Where no engine can be had, this says so and ends with code 0; with REQUIRE_ENGINE=1 with code 1.
set -euo pipefail
cd "$(dirname "$0")/.."

CACHE=${CACHE:-/var/tmp/moerelay-compose}
PYTHON=${PYTHON:-.venv/bin/python}
DEBIAN_MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
export BASE_IMAGE=moerelay-base:bookworm BUILD_IMAGE=moerelay-build:bookworm

not_run() {
    local line
    printf '%s\n' "" "################################################################################"
    for line in "COMPOSE TESTS NOT RUN: $1" "The images and deploy/compose.yaml are UNTESTED in this run."; do
        printf '## %s\n' "$line"
    done
    printf '%s\n' "################################################################################" ""
    exit "${REQUIRE_ENGINE:-0}"
}

step() {
    printf '== %s (after %d s)\n' "$1" "$SECONDS"
}

install_programs() {
    local packages="" program
    for program in dockerd:docker.io docker-compose:docker-compose debootstrap:debootstrap iptables:iptables; do
        command -v "${program%%:*}" > /dev/null || packages="$packages ${program##*:}"
    done
    test -n "$packages" || return 0
    step "installing$packages"
    # shellcheck disable=SC2086  # a list
    (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages) > "$CACHE/apt.log" 2>&1 \
        || { tail -n 20 "$CACHE/apt.log"; not_run "these packages cannot be installed:$packages"; }
}

# A private engine: its own socket, state and data, ended by its id when this script ends.
start_engine() {
    local runtime
    runtime=$(mktemp -d /tmp/moerelay-engine.XXXXXX)
    dockerd --data-root "$CACHE/engine" --exec-root "$runtime/exec" --pidfile "$runtime/pid" \
        --host "unix://$runtime/socket" > "$CACHE/engine.log" 2>&1 &
    ENGINE=$!
    trap 'kill "$ENGINE" 2> /dev/null; wait "$ENGINE" || true; rm -rf "'"$runtime"'"' EXIT
    export DOCKER_HOST=unix://$runtime/socket
    for _ in $(seq 150); do
        docker version > /dev/null 2>&1 && return 0
        kill -0 "$ENGINE" 2> /dev/null || break
        sleep 0.2
    done
    tail -n 20 "$CACHE/engine.log"
    not_run "dockerd does not start here (see above)"
}

# Python alone, as python:slim has it, and the same with what compiles.
bootstrap() {
    local root="$CACHE/root"
    rm -rf "$root"
    step "bootstrapping Debian"
    debootstrap --variant=minbase --include=ca-certificates,python3 bookworm "$root" "$DEBIAN_MIRROR" > "$CACHE/debootstrap.log" 2>&1 \
        || { tail -n 20 "$CACHE/debootstrap.log"; not_run "debootstrap failed (see above)"; }
    rm -f "$root"/var/cache/apt/archives/*.deb
    tar -C "$root" -c . | docker import - "$BASE_IMAGE"
    chroot "$root" apt-get install -y --no-install-recommends g++ python3-dev python3-venv >> "$CACHE/debootstrap.log" 2>&1 \
        || { tail -n 20 "$CACHE/debootstrap.log"; not_run "the compiler could not be installed (see above)"; }
    rm -f "$root"/var/cache/apt/archives/*.deb
    tar -C "$root" -c . | docker import - "$BUILD_IMAGE"
    rm -rf "$root"
}

# Everything that the images install, so that the build itself needs no network.
gather_wheels() {
    local wanted stamp
    wanted=$("$PYTHON" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
print("\n".join(project["project"]["dependencies"] + extras["worker"] + project["build-system"]["requires"]))')
    stamp=$(printf '%s' "$wanted" | cat - constraints.txt | sha256sum)
    if [ "$(cat "$CACHE/wheels/stamp" 2> /dev/null)" != "$stamp" ]; then
        step "gathering wheels"
        mkdir -p "$CACHE/wheels"
        rm -f "$CACHE"/wheels/*.whl
        printf '%s\n' "$wanted" > "$CACHE/requirements.txt"
        "$PYTHON" -m pip download -qq --disable-pip-version-check --only-binary :all: --python-version 3.11 \
            ${PIP_ARGS:-} -d "$CACHE/wheels" -c constraints.txt -r "$CACHE/requirements.txt"
        printf '%s' "$stamp" > "$CACHE/wheels/stamp"
    fi
    mkdir -p wheels
    cp -lfu "$CACHE"/wheels/*.whl wheels/ 2> /dev/null || cp -fu "$CACHE"/wheels/*.whl wheels/
}

mkdir -p "$CACHE"
if [ "${1:-}" = --install ]; then
    shift
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then install_programs; fi
fi
command -v docker > /dev/null || not_run "there is no docker client"
command -v docker-compose > /dev/null || not_run "there is no docker-compose"
if ! docker version > /dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || not_run "no Docker engine answers, and only root can start one"
    command -v dockerd > /dev/null || not_run "no Docker engine answers, and there is no dockerd to start"
    start_engine
fi
if ! docker image inspect "$BASE_IMAGE" "$BUILD_IMAGE" > /dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || not_run "there is no base image, and only root can bootstrap one"
    command -v debootstrap > /dev/null || not_run "there is no base image, and no debootstrap to make one"
    bootstrap
fi
gather_wheels
step "building the images"
# By the classic builder, which every engine has.
PIP_NO_INDEX=1 COMPOSE_DOCKER_CLI_BUILD=0 docker-compose -f deploy/compose.yaml build router model > "$CACHE/build.log" 2>&1 \
    || { tail -n 60 "$CACHE/build.log"; exit 1; }
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep '^moerelay-'
step "running the tests"
COMPOSE_TEST=1 "$PYTHON" -m pytest -n 0 -m compose tests/compose "$@"
step "done"
