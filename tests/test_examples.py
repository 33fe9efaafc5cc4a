"""The examples, run as a user runs them, and the main job held to its promises."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import multi_stream
import numpy as np
import onnxruntime
import pytest
import realesr
import sync_call
import upscale_photo
from PIL import Image
from rich.progress import Progress
from tiles import Grid

from pixtreme.infer.onnx_module import OnnxArtifact


@pytest.mark.network
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_tiles_on_streams_equal_one_run(network: Path, streams: int) -> None:
    """The blended tiles equal the network run on the whole image by plain ONNX Runtime, seams included."""
    image = upscale_photo.load(None)[120:260, 200:400]
    grid = Grid.over(image.shape[:2], tile=96, margin=realesr.RADIUS)
    assert len(grid.corners) >= 6
    with Progress(disable=True) as progress:
        result, _ = asyncio.run(
            upscale_photo.upscale(image, OnnxArtifact(network), grid, device="cpu", streams=streams, progress=progress)
        )
    session = onnxruntime.InferenceSession(str(network), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"input": image[None]})
    assert np.abs(result - expected[0]).max() <= 1e-5


@pytest.mark.network
def test_main_writes_a_sharper_picture(tmp_path: Path) -> None:
    """The command line writes a PNG four times as large, with steeper edges than an interpolation, from any folder."""
    small = Image.fromarray((upscale_photo.load(None)[150:250, 260:400] * 255).astype(np.uint8))
    small.save(tmp_path / "photo.png")
    script = Path(upscale_photo.__file__)
    done = subprocess.run(
        [sys.executable, script, "photo.png", "--streams", "2", "--tile", "96", "--output", "out.png"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    assert "speed-up of 2 streams over one" in done.stdout
    assert "frames (tiles) per second" in done.stdout
    picture = Image.open(tmp_path / "out.png")
    assert picture.size == (560, 400)
    assert _steepness(picture) > 1.3 * _steepness(small.resize(picture.size, Image.Resampling.BICUBIC))


def _steepness(picture: Image.Image) -> float:
    """Mean of the steepest hundredth of the gradients: how sharp edges are."""
    values = np.asarray(picture.convert("L"), np.float64)
    slopes = np.sort(np.abs(np.diff(values, axis=1)), axis=None)
    return float(slopes[-slopes.size // 100 :].mean())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["absent.png"], "absent.png"),
        (["--device", "cuda:0"], "available here are"),
        (["--tile", "20"], "too small"),
    ],
)
def test_main_explains_what_is_wrong(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Bad input ends with the error's text and exit code 1, not with a traceback."""
    assert upscale_photo.main([*arguments, "--output", str(tmp_path / "out.png")]) == 1
    assert word in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("tile", [64, 97, 500])
@pytest.mark.parametrize("size", [(64, 64), (140, 201), (65, 300)])
def test_blending_an_identity_gives_the_image_back(size: tuple[int, int], tile: int) -> None:
    """The weights of each pixel add up to one, whatever the grid."""
    image = np.random.default_rng(1).random((*size, 3), np.float32)
    grid = Grid.over(size, tile=tile, margin=18)
    enlarged = [piece.repeat(2, 0).repeat(2, 1) for piece in grid.cut(image)]
    np.testing.assert_allclose(grid.blend(enlarged, 2), image.repeat(2, 0).repeat(2, 1), atol=1e-6)


@pytest.mark.network
def test_sync_call(capsys: pytest.CaptureFixture[str]) -> None:
    """The synchronous example."""
    sync_call.main()
    assert "HostFrame(512x384 float32" in capsys.readouterr().out


def test_multi_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """The three-context example."""
    multi_stream.main()
    assert "became" in capsys.readouterr().out


def test_small_examples_are_small() -> None:
    """Two of the examples fit on a screen: at most 40 lines."""
    for module in (sync_call, multi_stream):
        assert len(Path(str(module.__file__)).read_text("utf-8").splitlines()) <= 40
