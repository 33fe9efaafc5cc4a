"""What people write without reading: handles among futures and arrays, coroutine functions, closures, bound modules."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import trio
import trio.testing
from helpers import WAIT_S, Gate, doubled, frame
from samples import small_model

from pixtreme.infer.contracts import GpuArrayParamContract
from pixtreme.infer.errors import ClosedError, ContextError, ContractError
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY
from pixtreme.infer.streams import BoundInference, EventHandle, StreamContext

RGB = {"channels": "RGB", "colorspace": "sRGB", "gamma": "sRGB"}


@dataclass
class Request:
    """A container that submit does not look into."""

    image: Any


@pytest.fixture
def bound(context: StreamContext, tmp_path: Path) -> BoundInference[Any]:
    return context.bind(FACTORY, small_model(tmp_path / "small.onnx"), precision="fp32", input_hw=(4, 6))


def _uvloop() -> asyncio.AbstractEventLoop:
    uvloop = pytest.importorskip("uvloop")
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _wait(handle: EventHandle[int]) -> int:
    done, pending = await asyncio.wait([asyncio.ensure_future(handle)], timeout=WAIT_S)
    assert not pending
    return done.pop().result()


async def _wait_for(handle: EventHandle[int]) -> int:
    return await asyncio.wait_for(handle, WAIT_S)


async def _gather(handle: EventHandle[int]) -> int:
    first, second = await asyncio.gather(handle, handle)
    assert first == second
    return first


async def _shield(handle: EventHandle[int]) -> int:
    return await asyncio.shield(handle)


async def _as_completed(handle: EventHandle[int]) -> int:
    (only,) = [await one for one in asyncio.as_completed([handle])]
    return only


async def _ensure_future(handle: EventHandle[int]) -> int:
    return await asyncio.ensure_future(handle)


async def _timeout(handle: EventHandle[int]) -> int:
    async with asyncio.timeout(WAIT_S):
        return await handle


async def _group(handle: EventHandle[int]) -> int:
    async def take() -> int:
        return await handle

    async with asyncio.TaskGroup() as group:
        task = group.create_task(take())
    return task.result()


async def _to_thread(handle: EventHandle[int]) -> int:
    return await asyncio.to_thread(handle.result, WAIT_S)


WORKS = [_wait, _wait_for, _gather, _shield, _as_completed, _ensure_future, _timeout, _group, _to_thread]


@pytest.mark.parametrize("loop_factory", [None, _uvloop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("use", WORKS)
def test_what_asyncio_does_with_an_awaitable_works(
    context: StreamContext, gate: Gate, use: Callable[[EventHandle[int]], Any], loop_factory: Any
) -> None:
    """R7: whatever takes an awaitable takes a pending handle."""

    async def main() -> int:
        gate.hold(context)
        handle = context.submit(lambda: 5)
        asyncio.get_running_loop().call_soon(gate.open)
        result: int = await use(handle)
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(main()) == 5


async def _bare_wait(handle: Any) -> None:
    await asyncio.wait([handle], timeout=WAIT_S)


async def _create_task(handle: Any) -> None:
    asyncio.create_task(handle)  # noqa: RUF006


async def _threadsafe(handle: Any) -> None:
    asyncio.run_coroutine_threadsafe(handle, asyncio.get_running_loop())


async def _futures_wait(handle: Any) -> None:
    concurrent.futures.wait([handle], timeout=0)


async def _futures_as_completed(handle: Any) -> None:
    next(concurrent.futures.as_completed([handle], timeout=0))


@pytest.mark.parametrize("loop_factory", [None, _uvloop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("use", "error", "advice"),
    [
        (_bare_wait, AttributeError, "ensure_future"),
        (_futures_wait, AttributeError, "wait_all"),
        (_futures_as_completed, AttributeError, "as_completed"),
        (_create_task, TypeError, "coroutine"),
        (_threadsafe, TypeError, "coroutine"),
    ],
)
def test_what_wants_a_future_or_coroutine_says_so_at_once(
    context: StreamContext, gate: Gate, use: Any, error: type[Exception], advice: str, loop_factory: Any
) -> None:
    """R7: the work is still pending when the error comes: nothing waited, nothing hangs."""
    gate.hold(context)
    handle = context.submit(lambda: 5)

    async def main() -> None:
        with pytest.raises(error, match=advice):
            await use(handle)
        assert not handle.done()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    gate.open()
    assert handle.result(WAIT_S) == 5


@pytest.mark.anyio
async def test_anyio_scopes_and_groups(context: StreamContext, gate: Gate) -> None:
    """R7: a timeout around an await gives the task back at once and leaves the handle usable; trio's words too."""
    gate.hold(context)
    handle = context.submit(lambda: 5)
    with anyio.move_on_after(0.01) as scope:
        await handle
    assert scope.cancelled_caught
    gate.open()
    seen: list[int] = []

    async def take() -> None:
        seen.append(await handle)

    async with anyio.create_task_group() as group:
        group.start_soon(take)
        group.start_soon(take)
    assert seen == [5, 5]
    async with anyio.create_task_group() as group:
        with pytest.raises(TypeError):
            group.start_soon(handle)  # type: ignore[arg-type]


async def _nursery(handle: Any) -> Any:
    results: list[Any] = []

    async def take() -> None:
        results.append(await handle)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(take)
    assert results == [5] * 3
    return results[0]


async def _started(handle: Any) -> Any:
    async def take(task_status: Any) -> None:
        task_status.started(await handle)

    async with trio.open_nursery() as nursery:
        return await nursery.start(take)


async def _fail_after(handle: Any) -> Any:
    with trio.fail_after(WAIT_S):
        return await handle


async def _in_shield(handle: Any) -> Any:
    with trio.CancelScope() as outer:
        outer.cancel()
        with trio.CancelScope(shield=True):
            return await handle


async def _trio_to_thread(handle: Any) -> Any:
    return await trio.to_thread.run_sync(handle.result, WAIT_S)


async def _from_thread(handle: Any) -> Any:
    async def take() -> Any:
        return await handle

    return await trio.to_thread.run_sync(trio.from_thread.run, take)


async def _cut_short(handle: Any) -> Any:
    with trio.CancelScope() as scope:
        scope.cancel()
        await handle
    assert scope.cancelled_caught
    return await handle


TRIO = [_nursery, _started, _fail_after, _in_shield, _trio_to_thread, _from_thread, _cut_short]


@pytest.mark.parametrize("use", TRIO)
def test_trios_own_words(context: StreamContext, gate: Gate, use: Callable[[Any], Any]) -> None:
    """R7: nurseries, cancel scopes, deadlines and threads of trio take a pending handle."""

    async def main() -> Any:
        gate.hold(context)
        handle = context.submit(lambda: 5)
        trio.lowlevel.spawn_system_task(_open_soon, gate)
        return await use(handle)

    assert trio.run(main) == 5


async def _open_soon(gate: Gate) -> None:
    await trio.lowlevel.checkpoint()
    gate.open()


def test_trio_timeouts_leave_the_handle(context: StreamContext, gate: Gate) -> None:
    """R7: `fail_after`, `move_on_after` and a cancelled nursery give the task back at once, the work still pending."""

    async def main() -> None:
        gate.hold(context)
        handle = context.submit(lambda: 5)
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.01):
            await handle
        with trio.move_on_after(0.01) as scope:
            await handle
        assert scope.cancelled_caught

        async def take() -> None:
            await handle

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert not handle.done()
        gate.open()
        assert await handle == 5

    trio.run(main)


def test_trio_wants_functions(context: StreamContext, gate: Gate) -> None:
    """R7: a handle given where trio wants an async function is refused at once."""

    async def main() -> None:
        gate.hold(context)
        handle: Any = context.submit(lambda: 5)
        async with trio.open_nursery() as nursery:
            with pytest.raises(TypeError, match="callable"):
                nursery.start_soon(handle)
            with pytest.raises(TypeError, match="callable"):
                await nursery.start(handle)
        assert not handle.done()
        gate.open()
        await handle

    trio.run(main)
    with pytest.raises(TypeError, match="callable"):
        trio.run(context.submit(lambda: 5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "read",
    [
        np.asarray,
        np.array,
        np.mean,
        lambda handle: np.stack([handle, handle]),
        lambda handle: np.ones(2) + handle,
        lambda handle: HostFrame(data=handle, **RGB),
    ],
    ids=["asarray", "array", "mean", "stack", "add", "HostFrame"],
)
@pytest.mark.parametrize("finished", [False, True])
def test_a_handle_is_no_array(context: StreamContext, gate: Gate, read: Callable[[Any], Any], finished: bool) -> None:
    """R8: NumPy never makes an object array of a handle; the error says what to write, done or not."""
    gate.hold(context)
    handle = context.submit(doubled, context, np.ones(3))
    if finished:
        gate.open()
        handle.result(WAIT_S)
    with pytest.raises(ContractError, match="await"):
        read(handle)


def test_a_frame_is_its_pixels() -> None:
    """R8: NumPy takes a host frame as its pixels, without a copy unless one is asked for."""
    image = frame(2.0)
    assert np.shares_memory(np.asarray(image), image.data)
    assert not np.shares_memory(np.array(image), image.data)
    assert np.asarray(image, dtype=np.float16).dtype == np.float16
    assert np.mean(image) == 2.0
    with pytest.raises(ValueError, match="copy"):
        np.asarray(image, dtype=np.uint8, copy=False)


async def _coroutine_function(*_: object) -> None: ...


async def _generator_function(*_: object) -> Any:
    yield 1


class _Callable:
    async def __call__(self, *_: object) -> None: ...


ASYNCHRONOUS = [_coroutine_function, _generator_function, partial(_coroutine_function, 1), _Callable()]


@pytest.mark.parametrize("fn", ASYNCHRONOUS)
def test_coroutine_functions_are_refused(context: StreamContext, fn: Any) -> None:
    """R8: submit and Stage say that nothing awaits here; the slot comes back and no coroutine is left unawaited."""
    from pixtreme.infer.aio import Stage

    with pytest.raises(ContractError, match="awaits"):
        context.submit(fn, np.ones(2))
    with pytest.raises(ContractError, match="coroutine function"):
        Stage(context, fn)
    gc.collect()  # a coroutine that nobody closed would warn here
    assert context.in_flight == 0
    assert context.submit(lambda: 1).result(WAIT_S) == 1


def test_a_handle_as_the_result_is_refused(context: StreamContext, other: StreamContext) -> None:
    """R8: a handle of a handle would be awaited once and read unfinished."""
    with pytest.raises(ContractError, match=r"value\.on"):
        context.submit(lambda: other.submit(lambda: 1))


@pytest.mark.parametrize(
    "hide",
    [
        lambda handle: {handle},
        lambda handle: frozenset({handle}),
        lambda handle: deque([handle]),
        lambda handle: OrderedDict(a=handle),
        lambda handle: {handle: 1},
        lambda handle: Request(handle),
        lambda handle: [Request(handle)],
    ],
    ids=["set", "frozenset", "deque", "OrderedDict", "key", "dataclass", "dataclass in a list"],
)
def test_a_handle_in_a_container_that_is_not_looked_into(context: StreamContext, hide: Callable[[Any], Any]) -> None:
    """R8: the function would get the handle itself, or lose the order: it is refused, and nothing is called."""
    handle = context.submit(lambda: 1)
    called: list[object] = []
    with pytest.raises(ContractError, match="in a list, a tuple or a dict"):
        context.submit(called.append, hide(handle))
    assert called == []


@pytest.mark.parametrize("after", [np.zeros(3), np.zeros(0), {}, 3, "now", b"current"])
def test_after_is_no_array(context: StreamContext, after: Any) -> None:
    """R8: what looks like an argument of the function is not taken for dependencies, an empty array included."""
    with pytest.raises(ContractError, match="after"):
        context.submit(lambda: 1, after=after)
    assert context.in_flight == 0


@pytest.mark.parametrize("name", ["after", "out", "host", "blocking_source", "frame", "reset"])
def test_parameter_names_that_our_calls_take(name: str) -> None:
    """R12: a contract cannot declare a parameter that would never reach the module."""
    with pytest.raises(ContractError, match=name):
        GpuArrayParamContract(name, ("H", "W", 1), "float32", "share")


class _Holder:
    def __init__(self, image: Any) -> None:
        self.image = image

    def read(self) -> None: ...

    def __call__(self) -> None: ...


class _Token:
    """Something to hold weakly."""


@pytest.mark.parametrize(
    "holding",
    [
        lambda token: lambda: token and None,
        lambda token: partial(lambda _: None, token),
        lambda token: _Holder(token).read,
        _Holder,
    ],
    ids=["closure", "partial", "bound method", "callable object"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_callable_holds_lives_as_long_as_the_work(
    context: StreamContext, gate: Gate, holding: Callable[[Any], Callable[[], None]], fails: bool
) -> None:
    """R15: as an argument does, whether the call returns or raises."""
    gate.hold(context)
    token = _Token()
    alive = weakref.ref(token)
    fn = holding(token)
    if fails:
        with pytest.raises(TypeError):
            context.submit(fn, "one argument too many")
    else:
        context.submit(fn)
    del token, fn
    gc.collect()
    assert alive() is not None
    gate.open()
    context.synchronize()
    context.submit(lambda: None).result(WAIT_S)  # the report of the one before has let go
    gc.collect()
    assert alive() is None


class TestBoundInference:
    """R5: a bound module is a submission like any other."""

    def test_submitted_to_its_context(self, context: StreamContext, bound: BoundInference[Any]) -> None:
        """R5: submit, submit_sync and then take it and give its own handle, under a bound of one as well."""
        assert np.asarray(context.submit(bound, frame(1.0)).result(WAIT_S)).max() == 1.0
        assert np.asarray(context.submit_sync(bound, frame(2.0)).result(WAIT_S)).max() == 2.0
        handle = context.submit(lambda: frame(3.0)).then(context, bound)
        assert np.asarray(handle.result(WAIT_S)).max() == 3.0

    def test_a_bound_of_one(self, tmp_path: Path) -> None:
        """R5: it takes one slot, not two."""
        with StreamContext.open("cpu", max_in_flight=1) as context:
            bound = context.bind(FACTORY, small_model(tmp_path / "m.onnx"), precision="fp32", input_hw=(4, 6))
            for number in (1.0, 2.0):
                assert np.asarray(context.submit(bound, frame(number)).result(WAIT_S)).max() == number
                assert np.asarray(bound.submit_sync(frame(number)).result(WAIT_S)).max() == number

    def test_refused_elsewhere_and_after_close(
        self, context: StreamContext, other: StreamContext, bound: BoundInference[Any]
    ) -> None:
        """R5: another context is refused with the right one's name; a closed module everywhere, `instance` included."""
        from pixtreme.infer.aio import Stage

        with pytest.raises(ContextError, match=context.name):
            other.submit(bound, frame())
        assert other.in_flight == 0
        stage = Stage(bound)
        assert stage.context is context
        with bound:
            pass
        assert bound.closed
        for use in (
            lambda: bound.instance,
            lambda: bound(frame()),
            lambda: context.submit(bound, frame()),
            lambda: bound.submit_sync(frame()),
            lambda: Stage(bound),
            lambda: context.submit(stage.call, frame()),
            bound.__enter__,
        ):
            with pytest.raises(ClosedError):
                use()
        assert context.in_flight == 0

    @pytest.mark.anyio
    async def test_async_forms(self, context: StreamContext, bound: BoundInference[Any], gate: Gate) -> None:
        """R5, R6: submit_async and aclose; a cancelled close is still a close, and waits for the work."""
        async with bound:
            handle = await bound.submit_async(frame(1.0))
            assert np.asarray(await handle).max() == 1.0
            assert np.asarray(await (await context.submit_async(bound, frame(2.0)))).max() == 2.0
            gate.hold(context)
            last = bound(frame(3.0))
            async with anyio.create_task_group() as group:
                group.start_soon(bound.aclose)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
                assert not last.done()
                gate.open()
        assert bound.closed
        assert last.done()
        await bound.aclose()
