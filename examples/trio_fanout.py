"""A trio program: many tasks share a pool of streams, each with a deadline of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import realesr
import trio
from sklearn.datasets import load_sample_image

from pixtreme.infer.aio import StreamPool
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact


async def fan_out(pool: StreamPool[Any], tiles: list[HostFrame]) -> list[HostFrame | None]:
    """Upscale tiles at once; a task that misses its deadline gives up waiting, and its work runs to its end."""
    results: list[HostFrame | None] = [None] * len(tiles)

    async def one(index: int) -> None:
        with trio.move_on_after(30):
            results[index] = await pool.run(tiles[index], host=True)

    async with pool, trio.open_nursery() as nursery:
        for index in range(len(tiles)):
            nursery.start_soon(one, index)
    return results


def main(device: str = "auto") -> list[HostFrame | None]:
    photograph = load_sample_image("flower.jpg").astype(np.float32) / 255
    crops = [photograph[100:164, left : left + 96] for left in range(0, 384, 96)]
    tiles = [HostFrame.rgb(crop) for crop in crops]
    with tempfile.TemporaryDirectory() as folder:
        artifact = OnnxArtifact(realesr.write_onnx(Path(folder) / "realesr.onnx"))
        pool = StreamPool.open([device] * 2, FACTORY, artifact, precision="fp32", input_hw=(64, 96))
        results = trio.run(fan_out, pool, tiles)
    for number, result in enumerate(results):
        print(f"tile {number}: {'too late' if result is None else result}")
    return results


if __name__ == "__main__":
    main()
