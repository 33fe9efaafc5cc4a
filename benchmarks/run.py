"""Side by side in one run: what an await costs, against the limit and against what programs do today.

Prints medians and ratios, and writes JSON. Absolute times depend on the machine; only ratios of one run mean anything.

* hand-off: from the end of the work, on its thread, to the resumed task; after work that computes and work that sleeps.
* pending: many awaits outstanding at once, from the moment the work is released until every task has resumed.
* streams: the real network on one and on two streams, one thread each.
* video: the pipeline of examples/video_pipeline.py against its ideal and against two ways to write it without us.
* idle: CPU time of the process while one task waits for long work.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import pipelines
import realesr

from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact
from pixtreme.infer.runtimes.host import RUNTIME
from pixtreme.infer.streams import EventHandle, StreamContext

clock = time.perf_counter_ns


def _on_uvloop(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


LIBRARIES: dict[str, Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "trio": trio.run,
}
if sys.platform != "win32":
    LIBRARIES["uvloop"] = _on_uvloop


class Work:
    """Half a millisecond of work that holds no GIL; notes when it ended."""

    data = bytes(1 << 19)

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.ended = 0

    def __call__(self) -> None:
        if self.kind == "computing":  # as inference does: the core stays busy, its caches do not stay ours
            hashlib.sha256(self.data).digest()
        else:  # as a thread that waits for a device does
            time.sleep(0.0005)
        self.ended = clock()


class Ways:
    """Each way from the end of a piece of work to a resumed task.

    All of them run the work on one thread, the context's worker, and the limit as well: a hand-off between threads on
    one core costs a fraction of one between two cores, and the scheduler gave a second worker another core.
    """

    def __init__(self, context: StreamContext) -> None:
        self.context = context
        self.enqueue = context.stream.enqueue

    async def limit(self, work: Work) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def task() -> None:
            work()
            loop.call_soon_threadsafe(future.set_result, None)

        self.enqueue(task)
        await future

    async def limit_on_trio(self, work: Work) -> None:
        token, event = trio.lowlevel.current_trio_token(), trio.Event()

        def task() -> None:
            work()
            token.run_sync_soon(event.set)

        self.enqueue(task)
        await event.wait()

    async def handle(self, work: Work) -> None:
        await self.context.submit(self.enqueue, work)

    async def anyio_thread(self, work: Work) -> None:
        event = self.context.submit(self.enqueue, work).event
        await anyio.to_thread.run_sync(RUNTIME.synchronize, event)

    async def asyncio_thread(self, work: Work) -> None:
        event = self.context.submit(self.enqueue, work).event
        await asyncio.to_thread(RUNTIME.synchronize, event)

    async def polling(self, work: Work) -> None:
        pending = self.context.submit(self.enqueue, work)
        while not pending.done():  # noqa: ASYNC110 - what is compared, not what is recommended
            await asyncio.sleep(0)


async def measure_handoffs(samples: int, kind: str, library: str) -> dict[str, float]:
    """Median microseconds of each, sampled in turns and in a random order: what ran before warms or cools the core."""
    order = random.Random(0)
    async with StreamContext.open("cpu") as context:
        ways = Ways(context)
        compared: dict[str, Callable[[Work], Awaitable[None]]] = {
            "raw thread to loop": ways.limit_on_trio if library == "trio" else ways.limit,
            "await handle": ways.handle,
            "anyio.to_thread": ways.anyio_thread,
        }
        if library != "trio":
            compared |= {"asyncio.to_thread": ways.asyncio_thread, "polling": ways.polling}
        seen: dict[str, list[float]] = {name: [] for name in compared}
        for number in range(samples + 20):
            for name in order.sample(list(compared), len(compared)):
                work = Work(kind)
                await compared[name](work)
                resumed = clock()
                if number >= 20:
                    seen[name].append((resumed - work.ended) / 1e3)
    return {name: statistics.median(values) for name, values in seen.items()}


async def measure_pending(count: int) -> dict[str, float]:
    """Milliseconds to resume ``count`` tasks that wait for one context's handles."""

    async def once(wait: Callable[[EventHandle[None]], Awaitable[Any]]) -> float:
        async with StreamContext.open("cpu") as context:
            release = threading.Event()
            context.stream.enqueue(release.wait)
            handles = [context.submit(lambda: None) for _ in range(count)]
            async with asyncio.TaskGroup() as group:
                for handle in handles:
                    group.create_task(_run(wait, handle))
                await asyncio.sleep(0.2)  # every task is parked; what is measured starts with the release
                started = clock()
                release.set()
            return (clock() - started) / 1e6

    async def _run(wait: Callable[[EventHandle[None]], Awaitable[Any]], handle: EventHandle[None]) -> None:
        await wait(handle)

    async def plain(handle: EventHandle[None]) -> None:
        await handle

    def through_a_thread(handle: EventHandle[None]) -> Awaitable[None]:
        return anyio.to_thread.run_sync(RUNTIME.synchronize, handle.event)

    return {"await handle": await once(plain), "anyio.to_thread": await once(through_a_thread)}


def measure_streams(requests: int) -> dict[str, float]:
    """Frames per second of the real network on one and on two streams."""
    rates = {}
    frame = HostFrame(data=np.random.default_rng(0).random((128, 192, 3), np.float32), channels="RGB",
                      colorspace="sRGB", gamma="sRGB")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        artifact = OnnxArtifact(realesr.write_onnx(Path(folder) / "network.onnx"))
        for streams in (1, 2):
            contexts = [StreamContext.open("cpu") for _ in range(streams)]
            networks = [
                context.bind(FACTORY.graph_factory(), artifact, precision="fp32", input_hw=(128, 192))
                for context in contexts
            ]
            started = clock()
            handles = [networks[number % streams](frame) for number in range(requests)]
            for handle in handles:
                handle.result()
            rates[f"{streams} stream(s)"] = requests / (clock() - started) * 1e9
            for context in contexts:
                context.close()
    return rates


def table(title: str, unit: str, values: dict[str, float], base: str) -> None:
    """Print values and their ratio to one of them."""
    print(f"\n{title}")
    for name, value in values.items():
        print(f"  {name:<22}{value:>12.2f} {unit:<10}{value / values[base]:>8.2f} x")


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    samples, pending, requests, frames, idle = (5, 100, 2, 4, 0.2) if options.quick else (600, 1000, 16, 72, 3.0)
    results = {}
    for kind in ("computing", "sleeping"):
        for library, run in LIBRARIES.items():
            results[f"hand-off on {library} after {kind} work, us"] = run(
                partial(measure_handoffs, samples, kind, library)
            )
    results |= {
        "pending awaits resumed, ms": asyncio.run(measure_pending(pending)),
        "real network, frames/s": measure_streams(requests),
        **pipelines.measure_video(frames),
        "balanced pipeline, items/s": pipelines.measure_balanced(3 * frames),
        "waiting, % of a core": pipelines.measure_idle(idle),
    }
    for title, values in results.items():
        name, unit = title.split(", ")
        table(name, unit, values, next(iter(values)))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return results


if __name__ == "__main__":
    main()
