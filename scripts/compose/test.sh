#!/usr/bin/env bash
# Builds the images on the engine that answers, and runs tests/compose with them. Part of scripts/compose_test.sh.
set -euo pipefail

# The base image, all layers, and what the containers write.
NEEDED_GIB=8
BUILD_TIMEOUT_S=2400

step() {
    printf '== %(%T)T %s\n' -1 "$1"
}

lacking() {
    printf '%s\n' "$1"
    exit "$NOT_RUN"
}

import_base() {
    docker image inspect "$2" > /dev/null 2>&1 || docker import "$CACHE/$1.tar" "$2" > /dev/null || lacking "$1.tar cannot be imported"
}

# Whatever the stack needs of the engine, with nothing of moerelay's in it.
probe() {
    docker network rm moerelay-probe > /dev/null 2>&1 || true
    docker network create --internal moerelay-probe > /dev/null \
        && docker run --rm --network moerelay-probe "$BASE_IMAGE" true \
        && docker network rm moerelay-probe > /dev/null \
        && docker run --rm --init --read-only --tmpfs /tmp --cap-drop ALL -p 127.0.0.1::8000 "$BASE_IMAGE" python3 -c ""
}

free_gib=$(df --output=avail -B 1G "$CACHE" | tail -n 1)
[ "$free_gib" -ge "$NEEDED_GIB" ] || lacking "$CACHE has $free_gib GiB of room, and $NEEDED_GIB are needed"
import_base base "$BASE_IMAGE"
import_base build "$BUILD_IMAGE"
probe < /dev/null || lacking "the engine runs no container"
step "building the images"
# By the classic builder, which every engine has.
PIP_NO_INDEX=1 COMPOSE_DOCKER_CLI_BUILD=0 timeout -k 10 "$BUILD_TIMEOUT_S" \
    docker-compose -f deploy/compose.yaml build router model locust-worker > "$CACHE/build.log" 2>&1 < /dev/null \
    || { tail -n 60 "$CACHE/build.log"; exit 1; }
# The monitoring is tested with Debian's program.
prometheus=$(command -v prometheus || command -v "$(dirname "$PYTHON")/prometheus" || true)
if [ -n "$prometheus" ]; then
    export PROMETHEUS_IMAGE=moerelay-prometheus
    tar -c -C "$(dirname "$prometheus")" prometheus -C "$PWD/tests/compose" prometheus.Dockerfile \
        | DOCKER_BUILDKIT=0 docker build -q -f prometheus.Dockerfile --build-arg BASE_IMAGE="$BASE_IMAGE" -t "$PROMETHEUS_IMAGE" - \
            >> "$CACHE/build.log" 2>&1 || { tail -n 20 "$CACHE/build.log"; exit 1; }
fi
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep '^moerelay-'
step "running the tests"
COMPOSE_TEST=1 "$PYTHON" -m pytest -n 0 -m compose tests/compose "$@"
