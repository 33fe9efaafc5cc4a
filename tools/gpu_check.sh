#!/usr/bin/env bash
# On a machine with a card: every test marked cuda or gpu, then the benchmark; JSON and the log under $OUT.
#
#   OUT=benchmarks/results/2026-12-31-h200 tools/gpu_check.sh
#
# Needs CuPy for the card's CUDA, pixtreme, anyio, pytest and trio. Wheels in $WHEELS (a folder) are installed first,
# without their dependencies, for a machine that cannot fetch any.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/latest}
mkdir -p "$OUT"
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
fi
export PYTHONPATH=src CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
status=0
"$PYTHON" -m pytest -m "cuda or gpu" tests/cuda tests/gpu --junitxml "$OUT/tests.xml" 2>&1 | tee "$OUT/tests.log" || status=$?
"$PYTHON" benchmarks/on_card.py --json "$OUT/on_card.json" || status=$?
exit "$status"
