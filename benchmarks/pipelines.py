"""Parts of `run.py`: pipelines against their ideal and against other ways, the loop's longest callback, idling."""

from __future__ import annotations

import asyncio
import asyncio.events
import hashlib
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import realesr
import video_pipeline
from rich.progress import Progress

from pixtreme.infer.aio import Pipeline, Stage
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact
from pixtreme.infer.streams import StreamContext


class Video:
    """A video, and each stage of its upscaling as a plain function."""

    def __init__(self, folder: Path, frames: int, hw: tuple[int, int]) -> None:
        self.source, self.target = folder / "pan.mp4", folder / "upscaled.mp4"
        self.artifact = OnnxArtifact(realesr.write_onnx(folder / "realesr.onnx"))
        self.frames, self.hw = frames, hw
        video_pipeline.write(self.source, video_pipeline.pan(frames, hw))

    @contextmanager
    def network(self) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
        """The network as a blocking function, on one stream."""
        with StreamContext.open("cpu") as context:
            bound = context.bind(FACTORY.graph_factory(), self.artifact, precision="fp32", input_hw=self.hw)

            def compute(image: np.ndarray) -> np.ndarray:
                frame = HostFrame(data=image, channels="RGB", colorspace="sRGB", gamma="sRGB")
                pixels: np.ndarray = bound(frame).result().data
                return pixels

            compute(np.zeros((*self.hw, 3), np.float32))
            yield compute

    def stages(self) -> dict[str, float]:
        """Seconds of each stage over all frames, one after the other on an otherwise idle machine."""
        started = time.perf_counter()
        images = list(video_pipeline.decode(self.source))
        decoded = time.perf_counter()
        with self.network() as compute:
            begun = time.perf_counter()
            results = [compute(image) for image in images]
            computed = time.perf_counter()
        encoder = video_pipeline.Encoder(self.target)
        for result in results:
            encoder.add(result)
        encoder.close()
        return {
            "decode": decoded - started,
            "compute": computed - begun,
            "encode": time.perf_counter() - computed,
        }

    def with_a_thread_pool(self) -> float:
        """What is written without this library: futures of one worker, a few frames ahead, encoded in order."""
        with self.network() as compute, ThreadPoolExecutor(1) as pool:
            encoder = video_pipeline.Encoder(self.target)
            started = time.perf_counter()
            ahead: deque[Future[np.ndarray]] = deque()
            for image in video_pipeline.decode(self.source):
                ahead.append(pool.submit(compute, image))
                if len(ahead) == 4:
                    encoder.add(ahead.popleft().result())
            while ahead:
                encoder.add(ahead.popleft().result())
            seconds = time.perf_counter() - started
            encoder.close()
        return seconds

    def with_to_thread(self) -> float:
        """The same with one asyncio.to_thread call after the other for each frame."""
        with self.network() as compute:
            encoder = video_pipeline.Encoder(self.target)
            decoder = video_pipeline.decode(self.source)

            async def main() -> float:
                started = time.perf_counter()
                while (image := await asyncio.to_thread(next, decoder, None)) is not None:
                    await asyncio.to_thread(encoder.add, await asyncio.to_thread(compute, image))
                return time.perf_counter() - started

            seconds = asyncio.run(main())
            encoder.close()
        return seconds

    def with_a_pipeline(self) -> tuple[float, float]:
        """Seconds of the example's pipeline, and milliseconds of the event loop's longest callback meanwhile."""
        longest = 0.0
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.events.Handle) -> None:
            nonlocal longest
            started = time.perf_counter()
            run(handle)
            longest = max(longest, time.perf_counter() - started)

        async def main() -> float:
            nonlocal longest

            async def forget_the_opening() -> None:
                nonlocal longest
                await asyncio.sleep(0.3)
                longest = 0.0

            forgetting = asyncio.create_task(forget_the_opening())
            with Progress(disable=True) as progress:
                figures = await video_pipeline.upscale(
                    self.source, self.target, self.artifact.path, device="cpu", depth=4, progress=progress
                )
            await forgetting
            return figures.seconds

        asyncio.events.Handle._run = timed  # type: ignore[method-assign,assignment]
        try:
            return asyncio.run(main()), longest * 1e3
        finally:
            asyncio.events.Handle._run = run  # type: ignore[method-assign]


def measure_video(frames: int) -> dict[str, dict[str, float]]:
    """The pipeline against its ideal (half of all work, or the slowest stage) and against two others, in frames/s."""
    with tempfile.TemporaryDirectory() as folder:
        video = Video(Path(folder), frames, (96, 160))
        stages = video.stages()
        ideal = max(sum(stages.values()) / 2, *stages.values())
        ours, block = video.with_a_pipeline()
        return {
            "video, frames/s": {
                "ideal": frames / ideal,
                "pipeline": frames / ours,
                "thread pool": frames / video.with_a_thread_pool(),
                "asyncio.to_thread": frames / video.with_to_thread(),
            },
            "video stages, s": stages,
            "longest callback of the loop, ms": {"during the pipeline": block},
        }


def measure_balanced(items: int) -> dict[str, float]:
    """Three stages of equal work, which holds no GIL, on three contexts: items/s against all work on two cores."""
    data = bytes(4 << 20)

    def work() -> None:
        hashlib.sha256(data).digest()

    def enqueue(item: Any) -> Any:
        StreamContext.current().stream.enqueue(work)
        return item

    async def main() -> float:
        contexts = [StreamContext.open("cpu") for _ in range(3)]
        async with Pipeline(*(Stage(context, enqueue) for context in contexts), depth=6) as pipeline:
            started = time.perf_counter()
            count = len([item async for item in pipeline.run(range(items))])
            seconds = time.perf_counter() - started
        for context in contexts:
            await context.aclose()
        return count / seconds

    started = time.perf_counter()
    for _ in range(3 * items):
        work()
    return {"ideal": items / ((time.perf_counter() - started) / 2), "pipeline": asyncio.run(main())}


def measure_idle(seconds: float) -> dict[str, float]:
    """CPU time of the whole process while one task waits for long work, in percent of a core."""

    async def main(wait: Callable[[Any], Any]) -> float:
        async with StreamContext.open("cpu") as context:
            gate = threading.Event()
            handle = context.submit(context.stream.enqueue, gate.wait, seconds)
            await asyncio.sleep(0)
            started, used = time.perf_counter(), time.process_time()
            await wait(handle)
            return (time.process_time() - used) / (time.perf_counter() - started) * 100

    async def plain(handle: Any) -> None:
        await handle

    async def polling(handle: Any) -> None:
        while not handle.done():  # noqa: ASYNC110 - what is compared, not what is recommended
            await asyncio.sleep(0)

    return {"await handle": asyncio.run(main(plain)), "polling": asyncio.run(main(polling))}
