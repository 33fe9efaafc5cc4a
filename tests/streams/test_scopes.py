"""What a scope collects goes with the work enqueued in it (S16, A12), and what a submission leaves when it fails."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator

import anyio
import numpy as np
import pytest
from helpers import WAIT_S, Gate, frame

from pixtreme.infer import staging
from pixtreme.infer.aio import Pipeline, Stage
from pixtreme.infer.errors import BusyError, ContextError
from pixtreme.infer.runtimes.host import HostRuntime
from pixtreme.infer.streams import StreamContext

RGB = {"channels": "RGB", "colorspace": "sRGB", "gamma": "sRGB"}
_numbers = itertools.count()


class Value:
    """Something whose end can be seen."""


class Staged(HostRuntime):
    """A host runtime that copies through a bounded pool, as CUDA does."""

    needs_staging = True

    def __init__(self) -> None:
        self.device = f"staged:{next(_numbers)}"  # a pool of its own


@pytest.fixture
def staged() -> Iterator[StreamContext]:
    """A context on such a runtime, with two buffers."""
    runtime = Staged()
    native = runtime.create_stream(priority=0)
    with StreamContext(runtime, native, owned=True, name=None, timing=False, max_in_flight=None) as context:
        staging.pool(context).limit = 2
        yield context


def test_a_value_lives_to_the_end_of_its_scope(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """S16: handed over inside use(), it is kept for later work of the scope, whatever is recorded in between."""
    values = [Value()]
    seen = weakref.ref(values[0])
    handle = context.submit(values.pop)
    context.synchronize()
    with other.use():
        handle.on(other)
        del handle
        between = other.record()
        between.result(WAIT_S)
        gc.collect()
        assert seen() is not None
        gate.hold(other)  # the scope's later work, which reads the value
    gc.collect()
    assert seen() is not None
    gate.open()
    other.synchronize()
    gc.collect()
    assert seen() is None


def test_keep_alive(context: StreamContext, gate: Gate) -> None:
    """S5, S16: inside a scope until its work is over, elsewhere until the next event is."""
    inside, outside = Value(), Value()
    seen = [weakref.ref(inside), weakref.ref(outside)]
    context.keep_alive(outside)
    with context.use():
        context.keep_alive(inside)
        gate.hold(context)
    del inside, outside
    gc.collect()
    assert all(one() is not None for one in seen)
    gate.open()
    context.synchronize()
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_a_scope_left_out_of_order_loses_nothing(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """S4, S16: what it collected is kept until its work is over, although leaving it raises."""
    value = Value()
    seen = weakref.ref(value)
    outer, inner = context.use(), other.use()
    outer.__enter__()
    context.keep_alive(value)
    del value
    gate.hold(context)
    inner.__enter__()
    with pytest.raises(ContextError, match="entered later"):
        outer.__exit__()
    inner.__exit__()
    gc.collect()
    assert seen() is not None
    gate.open()
    context.synchronize()
    gc.collect()
    assert seen() is None


def test_a_context_closed_by_another_thread(context: StreamContext) -> None:
    """S3, S4: leaving a scope of a context that was closed meanwhile puts back what was found, and raises nothing."""
    with context.use():
        context.keep_alive(Value())
        closer = threading.Thread(target=context.close)
        closer.start()
        closer.join(WAIT_S)
        assert context.closed
    with pytest.raises(ContextError, match="inside no scope"):
        StreamContext.current()


def test_a_slot_is_given_back_once(other: StreamContext) -> None:
    """S10: a call that leaves another scope open has its handle's slot and no second one."""
    with StreamContext.open("cpu", max_in_flight=1) as bounded:
        left_open = other.use()
        with pytest.raises(ContextError, match="entered later"):
            bounded.submit(left_open.__enter__)
        left_open.__exit__()
        bounded.synchronize()
        gate = Gate()
        gate.hold(bounded)
        bounded.submit(lambda: None)
        with pytest.raises(BusyError):
            bounded.submit(lambda: None)
        gate.open()


def test_pin(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """S5: what is current now is what a submission made elsewhere waits for."""
    order: list[str] = []
    with context.use():
        gate.hold(context)
        context.stream.enqueue(order.append, "before")
        after = other.pin()
        context.stream.enqueue(order.append, "later")
    assert other.pin(None) == []
    with other.use():
        assert other.pin() == []
    thread = threading.Thread(
        target=lambda: other.submit(other.stream.enqueue, lambda: order.append("other"), after=after)
    )
    thread.start()
    thread.join(WAIT_S)
    gate.open()
    other.synchronize()
    assert order.index("before") < order.index("other")


def test_another_thread_takes_no_epilogue(staged: StreamContext) -> None:
    """A12: a submission from another thread does not give back the buffer of a copy it knows nothing of."""
    pool = staging.pool(staged)
    gate = Gate()
    with staged.use():
        gate.hold(staged)
        pixels = staging.copy_out(frame(2.0))
        thread = threading.Thread(target=lambda: staged.submit(lambda: None))
        thread.start()
        thread.join(WAIT_S)
        gate.open()
        staged.stream.synchronize()
        assert pool.in_use == 1
    staged.synchronize()
    assert pool.in_use == 0
    assert pixels.max() == pixels.min() == 2.0


def test_a_record_takes_the_epilogue_along(staged: StreamContext) -> None:
    """A11, A12: a handle recorded inside the scope is complete once the downloaded array is filled."""
    with staged.use():
        handle = staged.record(staging.copy_out(frame(3.0)))
        nested = staged.submit(lambda: staging.copy_out(frame(4.0)))
    assert handle.result(WAIT_S).max() == 3.0
    assert nested.result(WAIT_S).min() == 4.0
    assert staging.pool(staged).in_use == 0


def test_a_failed_call_gives_its_buffer_back(staged: StreamContext) -> None:
    """A12, S6: a copy enqueued before the call raised still returns its buffer."""

    def call() -> None:
        staging.copy_in(np.zeros((4, 6, 3), np.float32), **RGB)
        raise LookupError

    for _ in range(5):
        with pytest.raises(LookupError):
            staged.submit(call)
        staged.synchronize()
    assert staging.pool(staged).in_use == 0


@pytest.mark.anyio
@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_pipeline_waits_for_buffers(staged: StreamContext, in_thread: bool) -> None:
    """A1, A12: stages with ``reserve`` wait for a buffer where a plain copy would be refused."""
    staging.pool(staged).limit = 1
    upload = Stage(staged, staging.Upload(**RGB), in_thread=in_thread)
    async with Pipeline(upload, Stage(staged, staging.Download()), depth=6) as pipeline:
        images = [np.full((4, 6, 3), number, np.float32) for number in range(20)]
        results = [result.max() async for result in pipeline.run(images)]
    assert results == list(range(20))
    assert staging.pool(staged).in_use == 0


@pytest.mark.anyio
async def test_a_cancelled_reservation_gives_its_slot_back(staged: StreamContext) -> None:
    """A12, S15: nobody waits for ever behind a copy that was never submitted."""
    pool = staging.pool(staged)
    pool.limit = 1
    upload = staging.Upload(**RGB)
    async with upload.reserve(staged):
        with anyio.move_on_after(0.01) as scope:
            async with upload.reserve(staged):
                pass
        assert scope.cancelled_caught
    assert pool.in_use == 0
    async with upload.reserve(staged) as copy:
        arrived = await staged.submit(copy, np.ones((4, 6, 3), np.float32))
    assert arrived.data.max() == 1
    assert pool.in_use == 0
