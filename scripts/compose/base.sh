#!/usr/bin/env bash
# Makes $CACHE/base.tar, which has Python alone as python:slim has it, and $CACHE/build.tar, the same with what compiles.
# Does nothing where they are there, or the engine has images of them. Part of scripts/compose_test.sh.
set -euo pipefail

NUM_ATTEMPTS=2
ATTEMPT_TIMEOUT_S=900

if [ -e "$CACHE/base.tar" ] && [ -e "$CACHE/build.tar" ]; then exit 0; fi
if timeout 30 docker image inspect "$BASE_IMAGE" "$BUILD_IMAGE" > /dev/null 2>&1; then exit 0; fi
[ "$(id -u)" = 0 ] || { echo "only root can bootstrap them"; exit "$NOT_RUN"; }
command -v debootstrap > /dev/null || { echo "there is no debootstrap to make them"; exit "$NOT_RUN"; }

# Under another name until it is whole.
archive() {
    rm -f "$root"/var/cache/apt/archives/*.deb
    tar -C "$root" -cf "$CACHE/$1.tar.new" . && mv "$CACHE/$1.tar.new" "$CACHE/$1.tar"
}

# In namespaces of its own: mounts and processes end with it, and it with this script, however that ends.
isolated() {
    setpriv --pdeathsig KILL timeout -k 10 "$ATTEMPT_TIMEOUT_S" \
        setpriv --pdeathsig KILL unshare --mount --pid --fork --mount-proc --kill-child=KILL "$@" >> "$CACHE/debootstrap.log" 2>&1 < /dev/null
}

root="$CACHE/root"
bootstrap() {
    rm -rf --one-file-system "$root" "$CACHE"/*.tar "$CACHE"/*.tar.new \
        && isolated debootstrap --variant=minbase --include=ca-certificates,python3 bookworm "$root" "$DEBIAN_MIRROR" \
        && archive base \
        && isolated chroot "$root" apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
        && archive build
}

echo "bootstrapping Debian"
: > "$CACHE/debootstrap.log"
for _ in $(seq "$NUM_ATTEMPTS"); do
    if bootstrap; then
        rm -rf --one-file-system "$root"
        exit 0
    fi
done
tail -n 20 "$CACHE/debootstrap.log"
exit "$NOT_RUN"
