"""What only a card can tell. Skipped on an emulated device, whose figures mean nothing."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pixtreme.infer.streams import available_devices

ROOT = Path(__file__).parents[2]


def is_emulated() -> bool:
    try:
        return hasattr(ctypes.CDLL("libcudart.so.12"), "emu_block")
    except OSError:
        return False


def figures(tmp_path: Path, *options: str) -> Any:
    target = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "on_card.py"), *options, "--json", str(target)],
        check=True,
        capture_output=True,
        timeout=55,
    )
    return json.loads(target.read_text("utf-8"))


def check(found: Any, sizes: set[str]) -> None:
    assert {"device", "cupy", *sizes} == found.keys()
    for size in sizes:
        assert found[size]["overlap"]["one stream / two streams"] > 0
        for stage in ("copy-in", "replay", "copy-out", "submit to resumed"):
            assert 0 <= found[size][stage]["median"] <= found[size][stage]["p90"]


@pytest.mark.cuda
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """The script the card is measured with runs, at a tiny size, on any device."""
    if "cuda:0" not in available_devices():
        pytest.skip("no CUDA device")
    check(figures(tmp_path, "--quick"), {"64x36"})


@pytest.mark.gpu
@pytest.mark.performance
def test_video_sizes(tmp_path: Path) -> None:
    """Latency of copy-in, replay, copy-out and await at HD and UHD; no threshold."""
    if "cuda:0" not in available_devices() or is_emulated():
        pytest.skip("needs a real card")
    check(figures(tmp_path), {"1920x1080", "3840x2160"})
