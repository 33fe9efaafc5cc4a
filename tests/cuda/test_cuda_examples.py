"""Every example, on "cpu" and on a CUDA device, with equal pixels (R4); `verify_motion_blur` observes the host itself.

A network of ours stands in for ONNX Runtime, which the emulated device has not: see `two_runtimes`.
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import realesr
import serve
import sync_call
import trio_fanout
import two_runtimes
import upscale_photo
import verify_motion_blur
import video_pipeline
from onnx_files import DECLARED, write_model
from PIL import Image
from rich.progress import Progress
from tiles import Grid

from pixtreme.infer import OnnxArtifact, StreamPool
from pixtreme.infer.onnx_module import FACTORY

pytestmark = pytest.mark.cuda
DEVICES = ("cpu", "cuda:0")


@pytest.fixture(autouse=True)
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The network of the examples, by an enlarger of the same factor."""

    def write(path: Path) -> Path:
        return write_model(path, factor=4, metadata={**DECLARED, "spatial_scale": 4}, out=(1, "4H", "4W", 3))

    two_runtimes.install(monkeypatch)
    monkeypatch.setattr(realesr, "write_onnx", write)
    return write(tmp_path / "network.onnx")


def equal_on_both(results: dict[str, Any]) -> None:
    assert set(results) == set(DEVICES)
    one, two = (np.asarray(results[device]) for device in DEVICES)
    assert one.dtype != object
    assert one.std() > 0.01  # a picture
    np.testing.assert_allclose(one, two, atol=1e-6)


def test_sync_call() -> None:
    """R4: one call."""
    equal_on_both({device: sync_call.main(device) for device in DEVICES})


def test_trio_fanout() -> None:
    """R4: a pool under a nursery."""
    results: dict[str, Any] = {device: trio_fanout.main(device) for device in DEVICES}
    assert [len(one) for one in results.values()] == [4, 4]
    for number in range(4):
        equal_on_both({device: results[device][number] for device in DEVICES})


@pytest.mark.parametrize("streams", [1, 3])
def test_upscale_photo(network: Path, streams: int) -> None:
    """R4: a photograph in tiles, on several contexts."""
    image = upscale_photo.load(None)[120:260, 200:400]
    grid = Grid.over(image.shape[:2], tile=96, margin=realesr.RADIUS)

    def upscaled(device: str) -> Any:
        with Progress(disable=True) as progress:
            job = upscale_photo.upscale(image, network, grid, device=device, streams=streams, progress=progress)
            return asyncio.run(job)[0]

    equal_on_both({device: upscaled(device) for device in DEVICES})


def test_video_pipeline(tmp_path: Path, network: Path) -> None:
    """R4: a video through three contexts; the files decode to the same frames."""
    video_pipeline.write(tmp_path / "in.mp4", video_pipeline.pan(5, (48, 64)))

    def upscaled(device: str) -> list[Any]:
        target = tmp_path / f"{device.partition(':')[0]}.mp4"
        with Progress(disable=True) as progress:
            job = video_pipeline.upscale(
                tmp_path / "in.mp4", target, network, device=device, depth=3, progress=progress
            )
            assert asyncio.run(job).frames == 5
        return list(video_pipeline.decode(target))

    equal_on_both({device: upscaled(device) for device in DEVICES})


def test_serve(network: Path) -> None:
    """R4: the service's application, asked for three pictures at once."""
    body = io.BytesIO()
    Image.fromarray(next(video_pipeline.pan(1, (70, 90)))).save(body, "PNG")

    async def ask(app: Any) -> bytes:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body.getvalue(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/upscale", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        assert sent[0]["status"] == 200
        return b"".join(message.get("body", b"") for message in sent)

    async def main(device: str) -> list[bytes]:
        pool = await StreamPool.open_async(
            [device] * 2, FACTORY.graph_factory(), OnnxArtifact(network), precision="fp32", input_hw=(64, 64)
        )
        async with pool:
            app = serve.make_app(pool, tile=64, limit=8)
            return await asyncio.gather(*(ask(app) for _ in range(3)))

    def pictures(device: str) -> list[Any]:
        return [np.asarray(Image.open(io.BytesIO(png)), np.float32) for png in asyncio.run(main(device))]

    equal_on_both({device: pictures(device) for device in DEVICES})


def test_verify_motion_blur(capsys: pytest.CaptureFixture[str]) -> None:
    """The proof of the temporal module, beside a CUDA device."""
    assert verify_motion_blur.main() == 0, capsys.readouterr().out
