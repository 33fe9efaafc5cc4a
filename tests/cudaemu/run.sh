#!/usr/bin/env bash
# Run the tests marked `cuda` on an emulated device: real CuPy, built against a CUDA runtime that executes on the CPU.
#
#   tests/cudaemu/run.sh [pytest arguments]
#
# The first run builds for about three minutes (g++ is needed) and keeps the result in the user's cache; a change to the
# emulator or its recipe builds anew. Needs the project's .venv (uv sync): its CUDA 12 wheels hold headers.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PINS=(cupy==14.2.0 nvidia-cuda-nvcc-cu12==12.9.86 nvidia-nvtx-cu12==12.9.79 nvidia-cuda-profiler-api-cu12==12.9.79)
MODULES=(pixtreme==1.8.0 pixtreme-infer-span==0.12.1 pixtreme-infer-cda-vsr==0.10.4)
TOOLS=(anyio blockbuster hypothesis "numpy>=2,<2.6" onnx pydantic pytest pytest-timeout safetensors trio typing-extensions uvloop
  av pillow rich scikit-learn starlette uvicorn)  # the second line is what the examples need
DIGEST=$( (echo "${PINS[@]}"; cat "$HERE"/{build.sh,cudart_emu.cpp,emu_shim.h,mkstub.py}) | sha256sum | cut -c1-16)
WORK=${CUDAEMU_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pixtreme-infer/cudaemu-$DIGEST}
VP=$WORK/venv/bin/python

pip() { "$VP" -m pip --quiet --disable-pip-version-check "$@"; }

if [ ! -e "$WORK/built" ]; then
  rm -rf "$WORK" && mkdir -p "$WORK/dl" "$WORK/wheels" "$WORK/include"
  "$ROOT/.venv/bin/python" -m venv "$WORK/venv"
  (cd "$WORK/dl" && CUPY_INSTALL_USE_STUB=1 pip download --no-deps --no-binary cupy "${PINS[0]}")
  pip install --no-deps --target "$WORK/wheels" "${PINS[@]:1}"
  for folder in "$WORK"/wheels/nvidia/*/include; do ln -sf "$folder"/* "$WORK/include/"; done
  "$HERE/build.sh" "$WORK" "$WORK/dl/"cupy-*.tar.gz "$VP" "$WORK/include" \
    "$ROOT"/.venv/lib/python3.12/site-packages/nvidia >"$WORK/build.log" 2>&1 || { tail -50 "$WORK/build.log"; exit 1; }
  touch "$WORK/built"
fi
if [ "$(cat "$WORK/installed" 2>/dev/null)" != "${TOOLS[*]} ${MODULES[*]}" ]; then
  pip install "${TOOLS[@]}"
  pip install --no-deps "${MODULES[@]}"
  echo "${TOOLS[*]} ${MODULES[*]}" >"$WORK/installed"
fi
cd "$ROOT"
PYTHONPATH=src exec "$VP" -m pytest -q -m cuda tests/cuda tests/gpu "$@"
