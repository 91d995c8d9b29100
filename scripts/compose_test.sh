#!/usr/bin/env bash
# Builds the images on a base image bootstrapped from Debian's packages, and runs tests/compose with a real engine.
#
#   scripts/compose_test.sh [--install] [pytest's arguments]
#
# No image is pulled. An engine that answers (DOCKER_HOST, or the default socket) is used as it is; otherwise root gets one
# of its own. What was fetched and built stays in $CACHE for the next run. --install takes missing programs from Debian's
# packages. Where no engine can be had, or a mirror does not answer, this says so and ends with code 0; with
# REQUIRE_ENGINE=1 with code 1. An image that cannot be built, and a test that fails, end it with another code than 0.
set -euo pipefail
cd "$(dirname "$0")/.."

export CACHE=${CACHE:-/var/tmp/moerelay-compose}
export PYTHON=${PYTHON:-.venv/bin/python}
export DEBIAN_MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
export BASE_IMAGE=moerelay-base:bookworm BUILD_IMAGE=moerelay-build:bookworm
# What scripts/compose/*.sh end with where it is not for moerelay that they fail.
export NOT_RUN=75
# Another run may use $CACHE so long.
LOCK_TIMEOUT_S=900

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
    printf '== %(%T)T %s\n' -1 "$1"
}

{ mkdir -p "$CACHE" && test -w "$CACHE"; } 2> /dev/null || not_run "$CACHE cannot be written to"
exec 9> "$CACHE/lock"
flock -w "$LOCK_TIMEOUT_S" 9 || not_run "another run has used $CACHE for $LOCK_TIMEOUT_S s"

if [ "${1:-}" = --install ]; then
    shift
    step "looking for programs"
    # Whatever a package starts must not hold the lock.
    scripts/compose/programs.sh 9>&- || not_run "programs are missing (see above)"
fi
command -v docker > /dev/null || not_run "there is no docker client"
command -v docker-compose > /dev/null || not_run "there is no docker-compose"
with_engine=()
if ! timeout 30 docker version > /dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || not_run "no Docker engine answers, and only root can start one"
    command -v dockerd > /dev/null || not_run "no Docker engine answers, and there is no dockerd to start"
    with_engine=(scripts/compose/engine.sh "$CACHE/engine")
fi
step "looking for base images"
scripts/compose/base.sh || not_run "there are no base images (see above)"
step "looking for wheels"
scripts/compose/wheels.sh || not_run "wheels could not be gathered (see above)"
step "starting"
code=0
"${with_engine[@]}" scripts/compose/test.sh "$@" || code=$?
[ "$code" != "$NOT_RUN" ] || not_run "no engine runs containers here (see above)"
step "done"
exit "$code"
