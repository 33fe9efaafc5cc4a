"""What only a card can tell: a request's stages at video sizes, and whether copies overlap with compute.

Stages (copy-in, replay, copy-out) are timed with CUDA events, the await on the host, from the submission to the resumed
task. Medians and 90th percentiles, in milliseconds; no threshold. On an emulated device the figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from pixtreme.core import Frame

from pixtreme.infer.cuda_graph import CudaGraphBuffers, CudaGraphSession
from pixtreme.infer.streams import StreamContext

METADATA: dict[str, Any] = {"channels": ("R", "G", "B"), "colorspace": "sRGB", "gamma": "sRGB"}
STEPS = 16  # kernels in a graph


class Request:
    """A module of a few elementwise kernels on fixed storage, as a graph."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        frames = [Frame(data=cupy.zeros(shape, cupy.float32), **METADATA) for _ in range(3)]
        self.frame, source, target = frames
        self.buffers = CudaGraphBuffers(source, target)

        def operation() -> None:
            cupy.copyto(target.data, source.data)
            for _ in range(STEPS):
                target.data *= 1.0001

        self.session = CudaGraphSession({"run": operation}, resources=(self.buffers,))

    def stages(self) -> list[Any]:
        """Enqueue one request with an event around each stage."""
        events = [cupy.cuda.Event() for _ in range(4)]
        events[0].record()
        self.buffers.copy_inputs(self.frame)
        events[1].record()
        self.session.replay("run")
        events[2].record()
        self.buffers.copy_output(**METADATA)
        events[3].record()
        return events

    def __call__(self) -> Any:
        self.buffers.copy_inputs(self.frame)
        self.session.replay("run")
        return self.buffers.copy_output(**METADATA)


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p90": ordered[int(0.9 * (len(ordered) - 1))]}


async def measure_requests(shape: tuple[int, int, int], samples: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each stage, and from submission to the resumed task."""
    seen: dict[str, list[float]] = {name: [] for name in ("copy-in", "replay", "copy-out", "submit to resumed")}
    async with StreamContext.open("cuda:0") as context:
        with context.use():
            request = Request(shape)
        for number in range(samples + 5):
            events = await context.submit(request.stages)
            started = time.perf_counter()
            await context.submit(request)
            host = (time.perf_counter() - started) * 1e3
            if number >= 5:
                for name, first, last in zip(seen, events[:-1], events[1:], strict=False):
                    seen[name].append(cupy.cuda.get_elapsed_time(first, last))
                seen["submit to resumed"].append(host)
        with context.use():
            request.session.close()
    return {name: summary(values) for name, values in seen.items()}


def measure_overlap(shape: tuple[int, int, int], samples: int) -> dict[str, float]:
    """How much longer copies and kernels take one after the other than on two streams."""
    size = int(np.prod(shape)) * 4
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.float32, size // 4)
    device, work = cupy.empty(size // 4, cupy.float32), cupy.ones(size // 4, cupy.float32)
    with StreamContext.open("cuda:0") as copying, StreamContext.open("cuda:0") as computing:

        def copy() -> None:
            device.set(pinned, cupy.cuda.get_current_stream())

        def compute() -> None:
            for _ in range(STEPS):
                cupy.multiply(work, 1.0001, out=work)

        def run(first: StreamContext, second: StreamContext) -> float:
            started = time.perf_counter()
            for _ in range(4):
                handles = first.submit(copy, after=None), second.submit(compute, after=None)
            for handle in handles:
                handle.result()
            return time.perf_counter() - started

        run(copying, computing)
        serial = statistics.median(run(computing, computing) for _ in range(samples))
        overlapped = statistics.median(run(copying, computing) for _ in range(samples))
    return {"one stream / two streams": serial / overlapped}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    shapes = [(36, 64, 3)] if options.quick else [(1080, 1920, 3), (2160, 3840, 3)]
    samples = 3 if options.quick else 100
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    results: dict[str, Any] = {"device": properties["name"].decode(), "cupy": cupy.__version__}
    for shape in shapes:
        name = f"{shape[1]}x{shape[0]}"
        results[name] = asyncio.run(measure_requests(shape, samples)) | {"overlap": measure_overlap(shape, samples)}
    text = json.dumps(results, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", "utf-8")
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
