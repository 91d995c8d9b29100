#!/usr/bin/env bash
# Puts Debian's promtool into FOLDER (default: .venv/bin), where the tests of the alert rules look for it. Needs no root,
# and starts no Prometheus: only the one program is taken out of the package.
set -euo pipefail
folder=$(realpath "${1:-$(dirname "$0")/../.venv/bin}")
command -v promtool > /dev/null || [ -x "$folder/promtool" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -qq prometheus
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
install -m 755 usr/bin/promtool "$folder/promtool"
