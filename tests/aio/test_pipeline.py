"""Pipelines on the host runtime (A1-A7), on asyncio, uvloop and trio."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, assert_type

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from helpers import WAIT_S, Boom, Gate, doubled, fail, frame
from samples import small_model

from pixtreme.infer.aio import Pipeline, Run, Stage
from pixtreme.infer.errors import BusyError, ClosedError, ContextError, ContractError, PipelineError, StreamFault
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.onnx_module import FACTORY
from pixtreme.infer.streams import BoundInference, StreamContext

pytestmark = pytest.mark.anyio


class Adder:
    """A stage's call: enqueues ``value + 1`` and returns the cell it arrives in."""

    def __init__(self, context: StreamContext) -> None:
        self.context = context
        self.calls = 0
        self.threads: set[int] = set()

    def __call__(self, cell: Any) -> Any:
        self.calls += 1
        self.threads.add(threading.get_ident())
        result = np.empty(1)
        self.context.stream.enqueue(np.add, cell, 1.0, result)
        return result


def cells(count: int) -> Iterator[Any]:
    for number in range(count):
        yield np.array([float(number)])


class Counted:
    """A source that says how far it was read."""

    def __init__(self, count: int) -> None:
        self.read = 0
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        for cell in cells(self._count):
            self.read += 1
            yield cell


async def feed(count: int) -> AsyncIterator[Any]:
    for cell in cells(count):
        await anyio.lowlevel.checkpoint()
        yield cell


def numbers(results: list[Any]) -> list[float]:
    return [float(result[0]) for result in results]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async", "blocking"])
async def test_results_come_in_source_order(
    context: StreamContext, other: StreamContext, in_thread: bool, kind: str
) -> None:
    """A1, A2, A6: sync, async and blocking sources through three stages, the middle one in a thread or not."""
    first, second, third = Adder(context), Adder(other), Adder(context)
    stages = (Stage(context, first), Stage(other, second, in_thread=in_thread), Stage(context, third))
    async with Pipeline(*stages, depth=3) as pipeline:
        source = feed(20) if kind == "async" else cells(20)
        run = pipeline.run(source, blocking_source=kind == "blocking")
        assert_type(run, Run[Any])
        results = [result async for result in run]
    assert numbers(results) == [number + 3.0 for number in range(20)]
    assert (threading.get_ident() in second.threads) == (not in_thread)
    assert first.threads == third.threads == {threading.get_ident()}


async def test_stages_are_chained_on_the_device(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """A1: while the first stage's work has not begun, the second stage has been submitted already; nobody waited."""
    gate.hold(context)
    second = Adder(other)
    async with Pipeline(Stage(context, Adder(context)), Stage(other, second), depth=4) as pipeline:
        run = pipeline.run(cells(4))
        with anyio.move_on_after(0.05):
            await anext(run)
        assert second.calls == 4
        gate.open()
        assert numbers([result async for result in run]) == [2.0, 3.0, 4.0, 5.0]


async def test_a_cancelled_wait_loses_nothing(context: StreamContext, gate: Gate) -> None:
    """A5, S15: the wait for a result is cancelled, again and again; then every result comes, once and in order."""
    gate.hold(context)
    async with Pipeline(Stage(context, Adder(context)), depth=2) as pipeline:
        run = pipeline.run(cells(5))
        for _ in range(3):
            with anyio.move_on_after(0.01) as scope:
                await anext(run)
            assert scope.cancelled_caught
        gate.open()
        assert numbers([result async for result in run]) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("depth", [1, 3])
async def test_nothing_is_read_ahead_of_depth(context: StreamContext, depth: int) -> None:
    """A3: a slow consumer slows the source: at most `depth` items are read and not delivered."""
    source = Counted(30)
    async with Pipeline(Stage(context, Adder(context)), depth=depth) as pipeline:
        delivered = 0
        async for _ in pipeline.run(source):
            delivered += 1
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert source.read <= delivered + depth
    assert source.read == delivered == 30


async def test_nothing_is_read_before_iteration(context: StreamContext) -> None:
    """A2: a run that nobody iterates reads nothing."""
    source = Counted(3)
    async with Pipeline(Stage(context, Adder(context))) as pipeline:
        run = pipeline.run(source)
        await anyio.sleep(0.01)
        assert source.read == 0
        assert len([result async for result in run]) == 3


def _raising(context: StreamContext, at: int) -> Any:
    """A stage's call that raises on one item."""
    adder = Adder(context)

    def call(cell: Any) -> Any:
        if adder.calls == at:
            raise Boom("stage")
        return adder(cell)

    return call


def _faulting(context: StreamContext, at: int) -> Any:
    """A stage's call whose work fails on the device for one item."""
    adder = Adder(context)

    def call(cell: Any) -> Any:
        if adder.calls == at:
            context.stream.enqueue(fail)
        return adder(cell)

    return call


def _breaking(at: int) -> Iterator[Any]:
    yield from cells(at)
    raise Boom("source")


@pytest.mark.parametrize("where", ["source", "call", "call in a thread", "device", "first stage on the device"])
async def test_a_failure_comes_after_the_results_before_it(
    context: StreamContext, other: StreamContext, where: str
) -> None:
    """A4: item 57 of 100 fails: 0-56 are delivered, one error names item and stage, everything is drained."""
    first, second = Stage(context, Adder(context), name="first"), Stage(other, Adder(other), name="second")
    if where.startswith("call"):
        second = Stage(other, _raising(other, 57), name="second", in_thread="thread" in where)
    elif where == "device":
        second = Stage(other, _faulting(other, 57), name="second")
    elif where.startswith("first"):
        first = Stage(context, _faulting(context, 57), name="first")
    source = _breaking(57) if where == "source" else Counted(100)
    results = []
    async with Pipeline(first, second, depth=4) as pipeline:
        run = pipeline.run(source)
        with pytest.raises(PipelineError) as caught:
            async for result in run:
                results.append(result)
        assert numbers(results) == [number + 2.0 for number in range(57)]
        stage = {"source": "source", "first stage on the device": "first"}.get(where, "second")
        assert (caught.value.index, caught.value.stage) == (57, stage)
        assert f"item 57, stage {stage!r}" in str(caught.value)
        cause = caught.value.__cause__
        assert isinstance(cause.__cause__ if isinstance(cause, StreamFault) else cause, Boom)
        assert context.in_flight == other.in_flight == 0  # drained before it was raised
        with pytest.raises(StopAsyncIteration):
            await anext(run)
    if isinstance(source, Counted):
        assert source.read <= 57 + 1 + 4


async def test_the_pipeline_goes_on_after_a_failure(context: StreamContext) -> None:
    """A4: what a call raises breaks its run and no stream: the next run works."""
    async with Pipeline(Stage(context, _raising(context, 2))) as pipeline:
        with pytest.raises(PipelineError):
            async for _ in pipeline.run(cells(9)):
                pass
        assert len([result async for result in pipeline.run(cells(0))]) == 0
        first = Adder(context)
    async with Pipeline(Stage(context, first)) as pipeline:
        assert numbers([result async for result in pipeline.run(cells(3))]) == [1.0, 2.0, 3.0]


async def test_an_exception_of_the_consumer_comes_out_as_it_is(context: StreamContext) -> None:
    """A5: what the loop's body raises is not wrapped, and everything is drained."""
    with pytest.raises(Boom):
        async with Pipeline(Stage(context, Adder(context))) as pipeline:
            async for _ in pipeline.run(cells(9)):
                raise Boom
    assert context.in_flight == 0


@pytest.mark.parametrize("held", [True, False])
async def test_leaving_early_drains(context: StreamContext, held: bool, gate: Gate) -> None:
    """A5: break stops the source; leaving the block waits for what is under way, and nothing of it stays alive."""
    source = Counted(100)
    made: list[weakref.ref[Any]] = []
    adder = Adder(context)

    def call(cell: Any) -> Any:
        result = adder(cell)
        made.append(weakref.ref(result))
        if held and adder.calls == 2:
            gate.hold(context)
        return result

    async with anyio.create_task_group() as group:
        async with Pipeline(Stage(context, call), depth=3) as pipeline:
            async for _ in pipeline.run(source):
                break
            if held:
                group.start_soon(_open_later, gate)
    assert context.in_flight == 0
    assert source.read <= 1 + 3
    assert len(made) == adder.calls
    del _
    await anyio.lowlevel.checkpoint()
    assert [ref for ref in made if ref() is not None] == []


async def _open_later(gate: Gate) -> None:
    await anyio.sleep(0.02)
    gate.open()


async def test_a_run_left_early_makes_way(context: StreamContext) -> None:
    """A5, A6: after a break the next run begins once the first one's work is over; `aclosing` works as well."""
    async with Pipeline(Stage(context, Adder(context))) as pipeline:
        async for _ in pipeline.run(cells(50)):
            break
        for _ in range(3):
            pipeline.run(cells(50))  # dropped, and never iterated
        assert numbers([result async for result in pipeline.run(cells(3))]) == [1.0, 2.0, 3.0]
        async with aclosing(pipeline.run(cells(50))) as run:
            async for _ in run:
                break
        await run.aclose()
        assert numbers([result async for result in pipeline.run(cells(2))]) == [1.0, 2.0]


async def test_two_runs_at_once_are_refused(context: StreamContext) -> None:
    """A6: a second run, a second task for one run, and a second entry are refused and change nothing."""
    async with Pipeline(Stage(context, Adder(context))) as pipeline:
        run = pipeline.run(cells(4))
        assert float((await anext(run))[0]) == 1.0
        with pytest.raises(BusyError, match="one at a time"):
            pipeline.run(cells(4))
        with pytest.raises(BusyError, match="entered already"):
            async with pipeline:
                pass
        assert numbers([result async for result in run]) == [2.0, 3.0, 4.0]


async def test_two_tasks_on_one_run(context: StreamContext, gate: Gate) -> None:
    """A6: results come one at a time: a second task that asks meanwhile is refused."""
    gate.hold(context)
    async with Pipeline(Stage(context, Adder(context))) as pipeline:
        run = pipeline.run(cells(1))

        async def first() -> None:
            assert float((await anext(run))[0]) == 1.0

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(BusyError, match="second task"):
                await anext(run)
            gate.open()


async def test_a_pipeline_works_in_its_block(context: StreamContext) -> None:
    """A5: before and after the block a run is refused, and a run that outlives it says so."""
    pipeline = Pipeline(Stage(context, Adder(context)))
    with pytest.raises(ClosedError, match="not entered"):
        pipeline.run(cells(1))
    async with pipeline:
        run = pipeline.run(cells(9))
        await anext(run)
    with pytest.raises(ClosedError, match="not entered"):
        pipeline.run(cells(1))
    with pytest.raises(ClosedError, match="inside the `async with`"):
        while True:
            await anext(run)
    async with pipeline:  # it may be entered again
        assert len([result async for result in pipeline.run(cells(2))]) == 2


async def test_bounded_contexts_are_waited_for() -> None:
    """A1, S10: a context with `max_in_flight` takes items as slots come, on the loop and in a thread."""
    for in_thread in (False, True):
        async with StreamContext.open("cpu", max_in_flight=1) as context:
            async with Pipeline(Stage(context, Adder(context), in_thread=in_thread), depth=5) as pipeline:
                assert len([result async for result in pipeline.run(cells(20))]) == 20


@pytest.fixture
def upscale(context: StreamContext, tmp_path: Path) -> BoundInference[FrameLike]:
    """A bound module."""
    return context.bind(FACTORY, small_model(tmp_path / "small.onnx"), precision="fp32", input_hw=(4, 6))


async def test_a_bound_module_is_a_stage(
    context: StreamContext, other: StreamContext, upscale: BoundInference[FrameLike]
) -> None:
    """A1: a module bound to the stage's context; another context's is refused."""
    async with Pipeline(Stage(context, upscale), depth=2) as pipeline:
        results = [result async for result in pipeline.run(frame(float(value)) for value in range(5))]
    assert [float(result.data.max()) for result in results] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert results[0].shape == (8, 12, 3)
    with pytest.raises(ContextError, match="the context that owns it"):
        Stage(other, upscale)


async def test_handles_are_items(context: StreamContext, other: StreamContext) -> None:
    """A1: a source may give handles; the first stage is ordered after them."""
    source = [context.submit(doubled, context, np.array([float(number)])) for number in range(4)]
    async with Pipeline(Stage(other, Adder(other))) as pipeline:
        assert numbers([result async for result in pipeline.run(source)]) == [1.0, 3.0, 5.0, 7.0]


async def test_a_slow_host_call_leaves_the_loop_free(context: StreamContext) -> None:
    """A1: while a call in a thread is stuck, the loop runs; other stages on its context go through a thread, too."""
    stuck, entered = threading.Event(), threading.Event()
    after = Adder(context)

    def slow(cell: Any) -> Any:
        entered.set()
        assert stuck.wait(WAIT_S)
        return cell

    async with Pipeline(Stage(context, slow, in_thread=True), Stage(context, after), depth=3) as pipeline:
        run = pipeline.run(cells(3))
        with anyio.move_on_after(0.05):
            await anext(run)
        assert entered.is_set()
        stuck.set()
        assert numbers([result async for result in run]) == [1.0, 2.0, 3.0]
    assert threading.get_ident() not in after.threads


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda context: Stage(None, print), ContractError, "a StreamContext"),  # type: ignore[arg-type]
        (lambda context: Stage(context, 1), ContractError, "a callable"),  # type: ignore[arg-type]
        (lambda context: Stage(context, print, in_thread=1), ContractError, "True or False"),  # type: ignore[arg-type]
        (lambda context: Stage(context, print, name=""), ContractError, "non-empty"),
        (lambda context: Pipeline(), ContractError, "at least one Stage"),
        (lambda context: Pipeline(print), ContractError, "at least one Stage"),  # type: ignore[arg-type]
        (lambda context: Pipeline(Stage(context, print), depth=0), ContractError, "a positive int"),
        (lambda context: Pipeline(Stage(context, print), depth=True), ContractError, "a positive int"),
    ],
)
async def test_malformed_pipelines(context: StreamContext, make: Any, error: Any, words: str) -> None:
    """A1: every argument is checked, with the observed and the accepted value."""
    with pytest.raises(error) as caught:
        make(context)
    assert words in str(caught.value)


async def test_malformed_sources(context: StreamContext) -> None:
    """A2: what cannot be iterated, and an async source for a thread, are refused; the pipeline stays usable."""
    async with Pipeline(Stage(context, Adder(context))) as pipeline:
        for source, blocking in ((1, False), ("text", False), (feed(1), True), ([1], 1)):
            with pytest.raises(ContractError, match="accepted is"):
                pipeline.run(source, blocking_source=blocking)  # type: ignore[arg-type]
        assert len([result async for result in pipeline.run(cells(2))]) == 2
    assert "first" in repr(pipeline)
