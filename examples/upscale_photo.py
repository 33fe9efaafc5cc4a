"""Upscale a photograph x4 with a real super-resolution network, on several streams at once.

The photograph is cut into overlapping tiles; each of ``--streams`` contexts owns a graph session of the network and
serves tiles as fast as it can; an asyncio program awaits the handles and blends the result. Runs without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import realesr
from PIL import Image
from rich.progress import Progress
from sklearn.datasets import load_sample_image
from tiles import Grid, Pixels

from pixtreme.infer import BoundInference, FrameLike, InferError, StreamContext, bind_onnx_async


def load(path: Path | None) -> Pixels:
    """Return a photograph as float32 RGB in [0, 1], shape (height, width, 3)."""
    pixels = load_sample_image("china.jpg") if path is None else np.asarray(Image.open(path).convert("RGB"))
    image: Pixels = np.asarray(pixels, np.float32) * np.float32(1 / 255)
    return image


def save(image: Pixels, path: Path) -> None:
    """Quantise and write a PNG."""
    Image.fromarray(np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)).save(path)


async def upscale(
    image: Pixels, artifact: Path, grid: Grid, *, device: str, streams: int, progress: Progress
) -> tuple[Pixels, float]:
    """Upscale on ``streams`` contexts; return the image and the seconds spent, opening the sessions not included."""
    tiles = list(grid.cut(image))
    results: list[Pixels] = [np.empty(0, np.float32)] * len(tiles)
    todo = iter(range(len(tiles)))
    bar = progress.add_task(f"{streams} stream(s)", total=len(tiles))

    async def serve(network: BoundInference[FrameLike]) -> None:
        for index in todo:
            results[index] = (await network.run(tiles[index], host=True)).data
            progress.advance(bar)

    async with AsyncExitStack() as stack:
        networks = []
        for number in range(streams):
            context = await stack.enter_async_context(StreamContext.open(device, name=f"upscale {number}"))
            networks.append(await bind_onnx_async(context, artifact, input_hw=grid.tile_hw))
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for network in networks:
                group.create_task(serve(network))
        seconds = time.perf_counter() - started
    return grid.blend(results, realesr.SCALE), seconds


async def run(options: argparse.Namespace) -> None:
    image = load(options.photo)
    grid = Grid.over(image.shape[:2], tile=options.tile, margin=realesr.RADIUS)
    count = len(grid.corners)
    print(f"{image.shape[1]}x{image.shape[0]} pixels, {count} tiles of {grid.tile_hw[1]}x{grid.tile_hw[0]}")
    seconds = {}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        artifact = realesr.write_onnx(Path(folder) / "realesr.onnx")
        for streams in sorted({1, options.streams}):
            result, seconds[streams] = await upscale(
                image, artifact, grid, device=options.device, streams=streams, progress=progress
            )
    save(result, options.output)
    for streams, spent in seconds.items():
        print(f"{streams} stream(s): {count / spent:.2f} frames (tiles) per second, {spent:.2f} s for the photograph")
    if options.streams > 1:
        print(f"speed-up of {options.streams} streams over one: {seconds[1] / seconds[options.streams]:.2f}x")
    print(f"wrote {options.output} ({result.shape[1]}x{result.shape[0]})")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photo", type=Path, nargs="?", help="an image file; without one scikit-learn's china.jpg")
    parser.add_argument("--streams", type=int, default=2, help="how many contexts work at once")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--output", type=Path, default=Path("upscaled.png"))
    parser.add_argument("--tile", type=int, default=160, help="tile side in pixels")
    options = parser.parse_args(arguments)
    if options.streams < 1:
        parser.error(f"--streams {options.streams}: pass a number from 1")
    try:
        asyncio.run(run(options))
    except (InferError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
