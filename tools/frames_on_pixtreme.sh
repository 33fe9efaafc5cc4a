#!/usr/bin/env bash
# Run the frame tests on each supported generation of pixtreme, in throw-away environments.
set -euo pipefail
cd "$(dirname "$0")/.."
for version in 1.3.0 1.8.0 2.0.0; do
  folder=$(mktemp -d)
  uv venv --quiet --python 3.12 "$folder"
  VIRTUAL_ENV="$folder" uv pip install --quiet "pixtreme==$version" . pytest pytest-timeout anyio blockbuster
  echo "== pixtreme $version"
  CUDA_VISIBLE_DEVICES='' "$folder/bin/python" -m pytest -q tests/test_frames_and_errors.py -o addopts=
  rm -rf "$folder"
done
