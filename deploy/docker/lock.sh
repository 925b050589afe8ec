#!/usr/bin/env bash
# Writes the lists of hashes that the images are made from, after a change in constraints.txt.
# Needs uv. Usage: deploy/docker/lock.sh
set -euo pipefail
cd "$(dirname "$0")"

lock() {
  uv pip compile --quiet --generate-hashes --no-header --no-annotate --no-emit-index-url \
    --python-version 3.11 --python-platform x86_64-manylinux_2_31 -c ../../constraints.txt \
    "$1" -o "$2"
}

lock build.in build.lock
lock router.in router.lock
lock ../../pyproject.toml engine.lock
lock tpu.in tpu.lock
