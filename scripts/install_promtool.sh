#!/usr/bin/env bash
# Puts Debian's promtool and prometheus into FOLDER (default: .venv/bin), where the tests of the alert rules and of the stack
# in containers look for them. Needs no root, and starts nothing: only the two programs are taken out of the package.
set -euo pipefail
folder=$(realpath "${1:-$(dirname "$0")/../.venv/bin}")
programs=()
for program in promtool prometheus; do
    command -v "$program" > /dev/null || [ -x "$folder/$program" ] || programs+=("$program")
done
[ ${#programs[@]} != 0 ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# What the index has may be gone from the mirror, and there may be no index yet; only root can fetch it.
apt-get download -qq prometheus || { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq prometheus; }
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x "${programs[@]/#/./usr/bin/}"
for program in "${programs[@]}"; do
    install -m 755 "usr/bin/$program" "$folder/$program"
done
