"""Upscale a video x4: decode → upload → upscale → download → encode, on three contexts, a few frames at a time.

Without a file it makes one by panning over a photograph of scikit-learn. Decoding runs in a thread as the pipeline's
source, encoding in a thread behind it, and the event loop only hands handles on. Runs without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import av
import numpy as np
import realesr
from rich.progress import Progress
from sklearn.datasets import load_sample_image

from pixtreme.infer import InferError, Pipeline, Stage, StreamContext, bind_onnx_async, staging

RATE = 24


def pan(frames: int, hw: tuple[int, int]) -> Iterator[np.ndarray]:
    """Yield uint8 RGB crops that move over a photograph."""
    photograph = load_sample_image("china.jpg")
    height, width = hw
    for number in range(frames):
        left = (photograph.shape[1] - width) * number // max(frames - 1, 1)
        yield photograph[200 : 200 + height, left : left + width]


def write(path: Path, frames: Iterator[np.ndarray]) -> None:
    """Encode uint8 RGB frames."""
    encoder = Encoder(path)
    for frame in frames:
        encoder.add(frame)
    encoder.close()


def decode(path: Path) -> Iterator[np.ndarray]:
    """Yield a video's frames as float32 RGB in [0, 1], shape (height, width, 3)."""
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24").astype(np.float32) * np.float32(1 / 255)


class Encoder:
    """Writes frames to a video file."""

    def __init__(self, path: Path) -> None:
        self._container = av.open(str(path), "w")
        self._stream: Any = None

    def add(self, image: np.ndarray) -> None:
        """Encode a frame: uint8, or float in [0, 1]."""
        if image.dtype != np.uint8:
            image = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
        if self._stream is None:
            self._stream = self._container.add_stream("mpeg4", rate=RATE)
            self._stream.height, self._stream.width = image.shape[:2]
            self._stream.pix_fmt, self._stream.bit_rate = "yuv420p", 8_000_000
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))

    def close(self) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))
        self._container.close()


@dataclass
class Figures:
    """What a run took."""

    frames: int = 0
    seconds: float = 0.0
    longest_block_ms: float = 0.0


async def watch_the_loop(figures: Figures) -> None:
    """Note how late the loop wakes a task that asked for a millisecond."""
    while True:
        started = time.perf_counter()
        await anyio.sleep(0.001)
        figures.longest_block_ms = max(figures.longest_block_ms, (time.perf_counter() - started) * 1e3 - 1)


async def upscale(
    source: Path, target: Path, artifact: Path, *, device: str, depth: int, progress: Progress
) -> Figures:
    """Upscale ``source`` into ``target``."""
    height, width = next(decode(source)).shape[:2]
    figures = Figures()
    bar = progress.add_task("upscaling", total=None)
    encoder = Encoder(target)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        copy_in, compute, copy_out = [
            await enter(StreamContext.open(device, name=name)) for name in ("copy in", "compute", "copy out")
        ]
        network = await bind_onnx_async(compute, artifact, input_hw=(height, width))
        stack.callback(encoder.close)
        watcher = asyncio.create_task(watch_the_loop(figures))
        stack.callback(watcher.cancel)
        started = time.perf_counter()
        pipeline = await enter(
            Pipeline(
                Stage(copy_in, staging.Upload(channels="RGB", colorspace="sRGB", gamma="sRGB")),
                Stage(compute, network),
                Stage(copy_out, staging.Download()),
                depth=depth,
            )
        )
        async for image in pipeline.run(decode(source), blocking_source=True):
            await anyio.to_thread.run_sync(encoder.add, image)
            figures.frames += 1
            progress.update(bar, completed=figures.frames)
        figures.seconds = time.perf_counter() - started
    return figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video", type=Path, nargs="?", help="a video file; without one a pan over a photograph")
    parser.add_argument("--frames", type=int, default=48, help="length of the pan")
    parser.add_argument("--size", type=int, nargs=2, default=(96, 160), metavar=("HEIGHT", "WIDTH"), help="of the pan")
    parser.add_argument("--depth", type=int, default=4, help="frames between decoder and encoder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--output", type=Path, default=Path("upscaled.mp4"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        video = options.video
        if video is None:
            video = Path(folder) / "pan.mp4"
            write(video, pan(options.frames, tuple(options.size)))
        artifact = realesr.write_onnx(Path(folder) / "realesr.onnx")
        job = upscale(video, options.output, artifact, device=options.device, depth=options.depth, progress=progress)
        try:
            figures = asyncio.run(job)
        except (InferError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
    print(
        f"{figures.frames} frames in {figures.seconds:.2f} s, {figures.frames / figures.seconds:.2f} frames per second"
    )
    print(f"longest block of the event loop: {figures.longest_block_ms:.2f} ms; wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
