"""Pipelines inside generators, left in every way people leave them (R16, R17)."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio
from helpers import Boom, Gate, frame
from samples import small_model

from pixtreme.infer.aio import Pipeline, Stage, StreamPool
from pixtreme.infer.errors import BusyError, ClosedError
from pixtreme.infer.onnx_module import FACTORY
from pixtreme.infer.streams import StreamContext

pytestmark = pytest.mark.anyio

ITEMS = list(range(6))
EXPECTED = [2.0 * item for item in ITEMS]


def double(context: StreamContext, item: int) -> Any:
    return context.enqueue(np.multiply, np.full(8, float(item)), 2, out=np.empty(8)).on(context)


class Video:
    """What README writes: a generator around a pipeline. It knows whether its own end was reached."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.left = 0

    async def __call__(self, source: Any = ITEMS) -> AsyncGenerator[float]:
        async with StreamContext.open("cpu") as context:
            if self.gate is not None:
                self.gate.hold(context)
            async with Pipeline(Stage(context, lambda item: double(context, item)), depth=3) as pipeline:
                async for value in pipeline.run(source):
                    yield value[0]
        self.left += 1


async def test_full_iteration() -> None:
    """R16: to the end."""
    video = Video()
    assert [value async for value in video()] == EXPECTED
    assert video.left == 1


async def test_break() -> None:
    """R16: left by break, closed or dropped."""
    closed = Video()
    async with aclosing(closed()) as values:
        async for value in values:
            assert value == 0.0
            break
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # trio's own, for every generator that is dropped
        async for _ in Video()():
            break
        gc.collect()
        assert [value async for value in Video()()] == EXPECTED


async def test_exception() -> None:
    """R16: an exception in the loop's body comes out as it is, not in a group."""
    with pytest.raises(Boom):
        async with aclosing(Video()()) as values:
            async for _ in values:
                raise Boom
    assert [value async for value in Video()()] == EXPECTED


async def test_a_timeout_around_each_step() -> None:
    """R16: what was README's own way to fail on trio."""
    seen = []
    async with aclosing(Video()()) as values:
        for _ in ITEMS:
            with anyio.fail_after(10):
                seen.append(await anext(values))
    assert seen == EXPECTED


async def test_a_timeout_that_strikes_during_a_step(gate: Gate) -> None:
    """R16: the generator ends by it, as any generator does; the next one works."""
    video = Video(gate)
    values = video()
    async with anyio.create_task_group() as group:
        group.start_soon(_open_soon, gate)  # leaving waits for the work
        with anyio.move_on_after(0.01) as scope:
            await anext(values)
    assert scope.cancelled_caught
    await values.aclose()
    assert [value async for value in Video()()] == EXPECTED


async def _open_soon(gate: Gate) -> None:
    await anyio.sleep(0.05)
    gate.open()


async def test_a_timeout_around_the_loop(gate: Gate) -> None:
    """R16: the whole loop runs out of time."""
    async with anyio.create_task_group() as group:
        group.start_soon(_open_soon, gate)
        with anyio.move_on_after(0.01) as scope:
            async for _ in Video(gate)():
                pytest.fail("nothing comes before the gate opens")
    assert scope.cancelled_caught
    assert [value async for value in Video()()] == EXPECTED


async def test_a_cancelled_task(gate: Gate) -> None:
    """R16: the task that iterates is cancelled."""
    video = Video(gate)

    async def consume() -> None:
        async with aclosing(video()) as values:
            async for _ in values:
                pytest.fail("nothing comes before the gate opens")

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await anyio.sleep(0.01)
        gate.open()
        group.cancel_scope.cancel()
    assert [value async for value in Video()()] == EXPECTED


async def test_one_task_a_step() -> None:
    """R16: every step in a task of its own, as ``asyncio.wait_for`` once made it."""
    values = Video()()
    seen: list[float] = []

    async def step() -> None:
        seen.append(await anext(values))

    for _ in ITEMS:
        async with anyio.create_task_group() as group:
            group.start_soon(step)
    await values.aclose()
    assert seen == EXPECTED


async def test_two_side_by_side() -> None:
    """R16: in turns, and left in the order in which they were entered."""
    first, second = Video()(), Video()()
    pairs = [(await anext(first), await anext(second)) for _ in range(3)]
    assert pairs == [(value, value) for value in EXPECTED[:3]]
    await first.aclose()
    assert [value async for value in second] == EXPECTED[3:]


async def test_an_async_source_in_a_generator() -> None:
    """R16: generators all the way down."""

    async def source() -> AsyncIterator[int]:
        for item in ITEMS:
            await anyio.lowlevel.checkpoint()
            yield item

    assert [value async for value in Video()(source())] == EXPECTED


async def test_a_source_that_ends_the_program(gate: Gate) -> None:
    """R16: what is no error of an item comes out of the loop, and nothing of the event loop's breaks."""

    class Stop(BaseException):
        pass

    def source() -> Iterator[int]:
        yield 1
        raise Stop

    async with StreamContext.open("cpu") as context:
        async with Pipeline(Stage(context, lambda item: double(context, item))) as pipeline:
            with pytest.raises(Stop):
                [value async for value in pipeline.run(source())]


@pytest.mark.parametrize("way", ["timeout", "cancelled", "dropped", "break"])
async def test_a_run_that_was_left_makes_way_at_once(gate: Gate, way: str) -> None:
    """R17: the next ``run()`` is no BusyError, without a turn of the loop in between, and no name is needed."""
    async with StreamContext.open("cpu") as context:
        async with Pipeline(Stage(context, lambda item: double(context, item)), depth=2) as pipeline:
            if way in ("timeout", "cancelled"):
                gate.hold(context)
                run = pipeline.run(ITEMS)  # a name keeps it alive
                with anyio.move_on_after(0.01) as scope:
                    await anext(run)
                assert scope.cancelled_caught
            elif way == "dropped":
                pipeline.run(ITEMS)
            else:
                async for _ in pipeline.run(ITEMS):
                    break
            following = pipeline.run(ITEMS)
            gate.open()
            assert [value[0] async for value in following] == EXPECTED
            if way in ("timeout", "cancelled"):
                with pytest.raises(StopAsyncIteration):
                    await anext(run)


async def test_an_interrupted_run_goes_on_where_no_other_began(gate: Gate) -> None:
    """R17: a timeout around one step loses nothing."""
    async with StreamContext.open("cpu") as context:
        gate.hold(context)
        async with Pipeline(Stage(context, lambda item: double(context, item))) as pipeline:
            run = pipeline.run(ITEMS)
            with anyio.move_on_after(0.01):
                await anext(run)
            gate.open()
            assert [value[0] async for value in run] == EXPECTED


async def test_a_run_that_somebody_waits_for_does_not_make_way(gate: Gate) -> None:
    """A6: another task's run is not taken from it."""
    async with StreamContext.open("cpu") as context:
        gate.hold(context)
        async with Pipeline(Stage(context, lambda item: double(context, item))) as pipeline:
            run = pipeline.run(ITEMS)

            async def consume() -> None:
                assert [value[0] async for value in run] == EXPECTED

            async with anyio.create_task_group() as group:
                group.start_soon(consume)
                await anyio.sleep(0.01)
                with pytest.raises(BusyError, match="leave its loop"):
                    pipeline.run(ITEMS)
                gate.open()
    with pytest.raises(ClosedError):
        pipeline.run(ITEMS)


async def test_a_pool_in_a_generator(tmp_path: Any) -> None:
    """R16: `StreamPool.map` as well."""
    model = small_model(tmp_path / "m.onnx")

    async def upscaled() -> AsyncGenerator[float]:
        pool = await StreamPool.open_async(["cpu"] * 2, FACTORY, model, precision="fp32", input_hw=(4, 6))
        async with pool:
            async for result in pool.map([frame(item / 10) for item in ITEMS]):
                yield float(result.data.max())

    async with aclosing(upscaled()) as values:
        assert await anext(values) == 0.0
    with anyio.fail_after(10):
        assert len([value async for value in upscaled()]) == len(ITEMS)


def test_a_loop_that_ends_half_way() -> None:
    """R16: `asyncio.run` and `trio.run` end with a generator half read: its work is waited for, nothing is logged."""
    problems: list[Any] = []

    async def half(kept: list[Any]) -> None:
        values = Video()()
        kept.append(values)
        assert await anext(values) == 0.0

    async def with_handler(kept: list[Any]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        await half(kept)

    for run in (lambda kept: asyncio.run(with_handler(kept)), lambda kept: trio.run(half, kept)):
        run([])  # type: ignore[no-untyped-call]
        gc.collect()
    assert problems == []
