"""Side by side in one run: what an await costs, against the limit and against what programs do today.

Prints medians and ratios, and writes JSON. Absolute times depend on the machine; only ratios of one run mean anything.

* hand-off: from the end of the work, on its thread, to the resumed task; once where the scheduler puts the threads, as
  programs run, and once with worker and loop pinned to two cores. The two differ a lot: read both.
* pending: many awaits outstanding at once, from the moment the work is released until every task has resumed.
* streams: the real network on one and on two streams, one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import anyio.to_thread
import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import realesr

from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact
from pixtreme.infer.streams import EventHandle, StreamContext
from pixtreme.infer.streams.host import RUNTIME

clock = time.perf_counter_ns
HandOff = Callable[[], Awaitable[float]]


class RawThread:
    """The limit: a thread that runs a function from a queue and wakes the loop with one call, and nothing else."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Callable[[], object], Callable[[], object]] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            item[0]()
            item[1]()
            del item


class Work:
    """Half a millisecond of real work that releases the GIL, as inference does; notes when it ended."""

    data = bytes(1 << 19)

    def __init__(self) -> None:
        self.ended = 0

    def __call__(self) -> None:
        hashlib.sha256(self.data).digest()
        self.ended = clock()


def pin(context: StreamContext, raw: RawThread, cores: set[int]) -> None:
    """Put both workers on one core and the loop's thread on another: where the scheduler puts threads changes a
    hand-off several times over, and is not what is compared."""
    for run in (context.stream.enqueue, lambda task, *args: raw.queue.put((lambda: task(*args), lambda: None))):
        run(os.sched_setaffinity, 0, {max(cores)})
    context.synchronize()
    os.sched_setaffinity(0, {min(cores)})


def handoffs(context: StreamContext, raw: RawThread) -> dict[str, HandOff]:
    """Each way from the end of a piece of work to a resumed task; microseconds."""

    async def limit() -> float:
        work, loop = Work(), asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        raw.queue.put((work, lambda: loop.call_soon_threadsafe(future.set_result, None)))
        await future
        return (clock() - work.ended) / 1e3

    async def handle() -> float:
        work = Work()
        await context.submit(context.stream.enqueue, work)
        return (clock() - work.ended) / 1e3

    async def anyio_thread() -> float:
        work = Work()
        event = context.submit(context.stream.enqueue, work).event
        await anyio.to_thread.run_sync(RUNTIME.synchronize, event)
        return (clock() - work.ended) / 1e3

    async def asyncio_thread() -> float:
        work = Work()
        event = context.submit(context.stream.enqueue, work).event
        await asyncio.to_thread(RUNTIME.synchronize, event)
        return (clock() - work.ended) / 1e3

    async def polling() -> float:
        work = Work()
        pending = context.submit(context.stream.enqueue, work)
        while not pending.done():  # noqa: ASYNC110 - what is compared, not what is recommended
            await asyncio.sleep(0)
        return (clock() - work.ended) / 1e3

    return {
        "raw thread to loop": limit,
        "await handle": handle,
        "anyio.to_thread": anyio_thread,
        "asyncio.to_thread": asyncio_thread,
        "polling": polling,
    }


async def measure_handoffs(samples: int, pinned: bool) -> dict[str, float]:
    """Median microseconds of each, sampled in turns and in a random order: what ran before warms or cools the core."""
    order = random.Random(0)
    raw = RawThread()
    cores = os.sched_getaffinity(0)
    async with StreamContext.open("cpu") as context:
        if pinned:
            pin(context, raw, cores)
        ways = handoffs(context, raw)
        seen: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(samples + 20):
            for name in order.sample(list(ways), len(ways)):
                value = await ways[name]()
                if number >= 20:
                    seen[name].append(value)
    raw.queue.put(None)
    os.sched_setaffinity(0, cores)
    return {name: statistics.median(values) for name, values in seen.items()}


async def trio_handoffs(samples: int, pinned: bool) -> dict[str, float]:
    """The same limit and the same handle on trio."""
    raw = RawThread()
    seen: dict[str, list[float]] = {"raw thread to loop": [], "await handle": []}
    token = trio.lowlevel.current_trio_token()
    cores = os.sched_getaffinity(0)
    async with StreamContext.open("cpu") as context:
        if pinned:
            pin(context, raw, cores)
        for number in range(samples + 20):
            work, event = Work(), trio.Event()
            raw.queue.put((work, lambda event=event: token.run_sync_soon(event.set)))  # type: ignore[misc]
            await event.wait()
            first = (clock() - work.ended) / 1e3
            work = Work()
            await context.submit(context.stream.enqueue, work)
            second = (clock() - work.ended) / 1e3
            if number >= 20:
                seen["raw thread to loop"].append(first)
                seen["await handle"].append(second)
    raw.queue.put(None)
    os.sched_setaffinity(0, cores)
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
    samples, pending, requests = (5, 100, 2) if options.quick else (600, 1000, 16)
    results = {
        "hand-off on asyncio, us": asyncio.run(measure_handoffs(samples, False)),
        "hand-off on asyncio between pinned cores, us": asyncio.run(measure_handoffs(samples, True)),
        "hand-off on trio, us": trio.run(trio_handoffs, samples, False),
        "hand-off on trio between pinned cores, us": trio.run(trio_handoffs, samples, True),
        "pending awaits resumed, ms": asyncio.run(measure_pending(pending)),
        "real network, frames/s": measure_streams(requests),
    }
    for title, values in results.items():
        name, unit = title.split(", ")
        table(name, unit, values, next(iter(values)))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return results


if __name__ == "__main__":
    main()
