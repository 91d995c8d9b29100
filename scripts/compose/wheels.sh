#!/usr/bin/env bash
# Gathers in wheels/ all that the images install, so that their build needs no network. Part of scripts/compose_test.sh.
set -euo pipefail

TIMEOUT_S=1200

wanted=$("$PYTHON" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
print("\n".join(project["project"]["dependencies"] + extras["worker"] + extras["load"] + project["build-system"]["requires"]))')
key=$(printf '%s' "$wanted" | cat - constraints.txt | sha256sum | cut -c 1-16)
# Under its name when it is whole.
folder="$CACHE/wheels-$key"
if [ ! -d "$folder" ]; then
    echo "gathering wheels"
    rm -rf "$CACHE"/wheels*
    mkdir "$CACHE/wheels.new"
    printf '%s\n' "$wanted" > "$CACHE/requirements.txt"
    # shellcheck disable=SC2086  # a list
    setpriv --pdeathsig KILL timeout -k 10 "$TIMEOUT_S" setpriv --pdeathsig KILL \
        "$PYTHON" -m pip download -qq --disable-pip-version-check --only-binary :all: --python-version 3.11 ${PIP_ARGS:-} \
        -d "$CACHE/wheels.new" -c constraints.txt -r "$CACHE/requirements.txt" < /dev/null || exit "$NOT_RUN"
    mv "$CACHE/wheels.new" "$folder"
fi
mkdir -p wheels
# As links where that is possible, because they are large.
cp -lf "$folder"/*.whl wheels/ 2> /dev/null || cp -f "$folder"/*.whl wheels/
