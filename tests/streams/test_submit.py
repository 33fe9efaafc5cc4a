"""submit, record, wait, bind and the in-flight bound (S5-S10)."""

from __future__ import annotations

import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Generator
from typing import Any

import anyio
import numpy as np
import pytest
from helpers import WAIT_S, Boom, Gate, doubled, fail, fault

from pixtreme.infer.errors import BusyError, CaptureError, ClosedError, ContextError, ContractError, StreamFault
from pixtreme.infer.runtimes.host import RUNTIME
from pixtreme.infer.streams import BoundInference, EventHandle, StreamContext

Pair = namedtuple("Pair", "left right")


class Token:
    """Something to hold weakly."""


def test_returns_at_once_and_resolves(context: StreamContext, gate: Gate) -> None:
    """S5: submit never waits for the device; the handle resolves to what fn returned."""
    gate.hold(context)
    handle = context.submit(doubled, context, np.ones(4))
    assert not handle.done()
    gate.open()
    np.testing.assert_array_equal(handle.result(WAIT_S), np.full(4, 2.0))


def test_fn_runs_here_inside_use(context: StreamContext, other: StreamContext) -> None:
    """S5: fn is called on this thread with the context current, and what was current before is so again."""
    with other.use():
        seen = context.submit(lambda: (threading.get_ident(), StreamContext.current(), RUNTIME.current())).result()
        assert seen == (threading.get_ident(), context, context.stream)
        assert RUNTIME.current() is other.stream


def test_handles_among_arguments_are_ordered_on_the_device(
    context: StreamContext, other: StreamContext, gate: Gate
) -> None:
    """S5: handles in lists, tuples, named tuples and dict values are replaced by values, ordered on the device."""
    gate.hold(context)
    one = context.submit(doubled, context, np.ones(2))

    def collect(plain: Any, *, nested: dict[str, Any]) -> list[Any]:
        arrays = [plain, nested["list"][0], nested["tuple"][1][0], nested["pair"].left]
        result: list[Any] = []
        other.stream.enqueue(lambda: result.extend(array.sum() for array in arrays))
        return result

    handle = other.submit(collect, one, nested={"list": [one, 1], "tuple": (0, (one,)), "pair": Pair(one, None)})
    assert not handle.done()
    gate.open()
    assert handle.result(WAIT_S) == [4.0] * 4


def test_containers_without_handles_are_passed_as_they_are(context: StreamContext) -> None:
    """S5: a list a function fills stays the caller's list."""
    results: list[int] = []
    assert context.submit(lambda target: target, results).result() is results


def test_waits_for_the_callers_current_stream(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """S5: by default work is ordered after what the caller's current stream has; after=None opts out."""
    gate.hold(context)
    with context.use():
        ordered = other.submit(lambda: None)
    with StreamContext.open("cpu") as third, context.use():
        free = third.submit(lambda: None, after=None)
        free.result(WAIT_S)
        named = third.submit(lambda: None, after=[ordered])
        assert not ordered.done()
        assert not named.done()
        gate.open()
    named.result(WAIT_S)


@pytest.mark.parametrize("kind", ["handle", "event", "context", "stream"])
def test_wait_takes_every_dependency(context: StreamContext, other: StreamContext, gate: Gate, kind: str) -> None:
    """S8: handles, events, contexts and native streams order the context, on the device."""
    gate.hold(context)
    handle = context.record("value")
    dependency = {"handle": handle, "event": handle.event, "context": context, "stream": context.stream}[kind]
    other.wait(dependency)
    later = other.submit(lambda: None)
    assert not later.done()
    gate.open()
    later.result(WAIT_S)


def test_wait_for_oneself_adds_nothing(context: StreamContext) -> None:
    """S8: a stream is in order with itself."""
    context.wait(context, context.stream, context.record())
    context.synchronize()


def test_arguments_and_result_live_until_the_event(context: StreamContext, gate: Gate) -> None:
    """S5, S15: arguments and result are kept alive until the event completes, though every handle is gone."""
    gate.hold(context)
    argument, result = Token(), Token()
    refs = [weakref.ref(argument), weakref.ref(result)]
    context.submit(lambda _, r=[result]: r.pop(), argument)
    del argument, result
    last = context.record()
    assert [ref() is not None for ref in refs] == [True, True]
    gate.open()
    last.result(WAIT_S)
    assert [ref() for ref in refs] == [None, None]


def test_record_keeps_alive_too(context: StreamContext, gate: Gate) -> None:
    """S7: record is the event and the keeping alive alone, for code inside use()."""
    token = Token()
    ref = weakref.ref(token)
    with context.use():
        gate.hold(context)
        handle = context.record("value", keep_alive=[token])
    del token
    assert ref() is not None
    gate.open()
    assert handle.result(WAIT_S) == "value"
    assert ref() is None


def test_exception_of_fn_comes_straight_out(context: StreamContext, gate: Gate) -> None:
    """S6: no handle, the context stays usable, and what fn had enqueued keeps its arguments alive."""
    token = Token()
    ref = weakref.ref(token)

    def enqueue_and_fail(argument: Token) -> None:
        gate.hold(context)
        raise Boom("call time")

    with pytest.raises(Boom, match="call time") as raised:
        context.submit(enqueue_and_fail, token)
    del token, raised
    assert ref() is not None
    assert context.in_flight == 0
    assert not context.faulted
    gate.open()
    assert context.submit(lambda: 1).result(WAIT_S) == 1
    context.synchronize()
    assert ref() is None


def test_device_failure_is_no_call_failure(context: StreamContext) -> None:
    """S6, S18: what a host task raises comes through the handle, not out of submit."""
    handle = context.submit(context.stream.enqueue, fail)
    with pytest.raises(StreamFault) as raised:
        handle.result(WAIT_S)
    assert isinstance(raised.value.__cause__, Boom)


class TestBound:
    """S10: max_in_flight."""

    def test_submit_refuses_and_enqueues_nothing(self) -> None:
        """S10: at the bound submit raises BusyError, and fn was not called."""
        gate = Gate()
        with StreamContext.open("cpu", max_in_flight=2) as context:
            gate.hold(context)
            handles = [context.submit(lambda: None) for _ in range(2)]
            called: list[int] = []
            with pytest.raises(BusyError, match="max_in_flight=2"):
                context.submit(called.append, 1)
            assert (called, context.in_flight) == ([], 2)
            gate.open()
            for handle in handles:
                handle.result(WAIT_S)
            assert context.submit(lambda: "room again").result(WAIT_S) == "room again"

    def test_failed_submission_gives_its_slot_back(self) -> None:
        """S6, S10: fifty failures do not use up the bound."""
        with StreamContext.open("cpu", max_in_flight=1) as context:
            for _ in range(50):
                with pytest.raises(Boom):
                    context.submit(fail)
            with pytest.raises(ContractError):
                context.submit(3)  # type: ignore[call-overload]
            assert context.submit(lambda: 1).result(WAIT_S) == 1

    def test_submit_sync_waits_in_order_of_asking(self) -> None:
        """S10: submit_sync waits on the host; slots are given in order of asking, and submit does not overtake."""
        gate = Gate()
        order: list[int] = []
        with StreamContext.open("cpu", max_in_flight=1) as context:
            gate.hold(context)
            context.submit(lambda: None)
            threads = []
            for number in range(4):
                thread = threading.Thread(target=lambda number=number: context.submit_sync(order.append, number))
                thread.start()
                threads.append(thread)
                while len(context._in_flight.queue) <= number:  # until this one has asked
                    thread.join(0.001)
            with pytest.raises(BusyError, match="4 submissions wait"):
                context.submit(lambda: None)
            gate.open()
            for thread in threads:
                thread.join(WAIT_S)
        assert order == [0, 1, 2, 3]

    @pytest.mark.anyio
    async def test_submit_async_waits_in_order_without_blocking(self) -> None:
        """S10: submit_async waits without blocking the loop, in order of asking."""
        gate = Gate()
        order: list[int] = []
        async with StreamContext.open("cpu", max_in_flight=1) as context:
            gate.hold(context)
            context.submit(lambda: None)

            async def ask(number: int, *, task_status: Any) -> None:
                task_status.started()
                await (await context.submit_async(order.append, number))

            async with anyio.create_task_group() as group:
                for number in range(5):
                    await group.start(ask, number)
                    while len(context._in_flight.queue) <= number:
                        await anyio.lowlevel.checkpoint()
                assert order == []
                gate.open()
        assert order == [0, 1, 2, 3, 4]

    @pytest.mark.anyio
    async def test_cancelled_request_passes_its_turn_on(self) -> None:
        """S10, S15: a cancelled submit_async loses nothing for those behind it."""
        gate = Gate()
        async with StreamContext.open("cpu", max_in_flight=1) as context:
            gate.hold(context)
            context.submit(lambda: None)
            with anyio.move_on_after(0.01) as scope:
                await context.submit_async(lambda: None)
            assert scope.cancelled_caught
            results: list[str] = []

            async def ask() -> None:
                results.append(await (await context.submit_async(lambda: "granted")))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                gate.open()
            assert results == ["granted"]
            assert context._in_flight._promised == 0

    @pytest.mark.anyio
    async def test_submit_sync_is_refused_on_a_loop(self, context: StreamContext) -> None:
        """S10: on a thread that runs an event loop submit_sync would freeze it, bound or not."""
        with pytest.raises(ContextError, match="submit_async"):
            context.submit_sync(lambda: None)

    @pytest.mark.anyio
    async def test_submit_async_means_the_stream_current_when_asked(
        self, context: StreamContext, other: StreamContext
    ) -> None:
        """S5, S10: "current" is the caller's stream when it asks, not the one current when the slot comes."""

        class AskedInside:
            """Runs the first step of a coroutine inside a scope, and the rest outside."""

            def __await__(self) -> Generator[Any, Any, EventHandle[None]]:
                steps = target.submit_async(lambda: None).__await__()
                with context.use():
                    trap = next(steps)
                while True:
                    try:
                        trap = steps.send((yield trap))
                    except StopIteration as stop:
                        handle: EventHandle[None] = stop.value
                        return handle

        gate = Gate()
        try:
            async with StreamContext.open("cpu") as target:
                gate.hold(context)
                handle = await AskedInside()
                assert not handle.done()
                gate.open()
                await handle
        finally:
            gate.open()

    def test_record_counts_but_is_never_refused(self) -> None:
        """S7, S10: what is enqueued already gets its handle."""
        gate = Gate()
        with StreamContext.open("cpu", max_in_flight=1) as context:
            gate.hold(context)
            context.record()
            context.record()
            assert context.in_flight == 2
            with pytest.raises(BusyError):
                context.submit(lambda: None)
            gate.open()


class Instance:
    """A module instance that notices overlapping calls."""

    scale = 1
    contract = "contract"

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.context = StreamContext.current()
        self.busy = threading.Lock()

    def __call__(self, value: Any, /, **params: Any) -> Any:
        assert self.busy.acquire(blocking=False), "host calls overlapped"
        try:
            self.context.stream.enqueue(int)
            return value, params
        finally:
            self.busy.release()

    def close(self) -> None:
        self.log.append(f"closed {id(self)} on {StreamContext.current().name}")


class Factory:
    """Opens `Instance`."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def open(self, artifact: str, /, *, precision: str, input_hw: tuple[int, int]) -> Instance:
        self.log.append(f"open {artifact} {precision} {input_hw}")
        return Instance(self.log)


def bind(context: StreamContext, factory: Any, name: str) -> BoundInference[Any]:
    """Bind a module that stands for one: it takes anything and returns it."""
    return context.bind(factory, name, precision="fp32", input_hw=(2, 3))


class TestBind:
    """S9: bind."""

    def test_opens_inside_and_owns(self, log: Any) -> None:
        """S3, S9: opened with the context current; closed with it, in reverse order of binding."""
        events: list[str] = []
        with StreamContext.open("cpu", name="owner") as context:
            first, second = (bind(context, Factory(events), name) for name in "ab")
            handle = first("frame", mv=1)
            assert handle.result(WAIT_S) == ("frame", {"mv": 1})
            assert handle.context is context
            observed: tuple[object, ...] = (first.scale, first.contract, first.context)
            assert observed == (1, "contract", context)
            expected = [f"closed {id(bound.instance)} on owner" for bound in (second, first)]
        assert events == ["open a fp32 (2, 3)", "open b fp32 (2, 3)", *expected]
        assert first.closed
        with pytest.raises(ClosedError):
            first("frame")

    def test_close_waits_for_outstanding_work(self, context: StreamContext) -> None:
        """S9, C8: closing a bound module finishes outstanding work first; idempotent."""
        events: list[str] = []
        bound = bind(context, Factory(events), "a")
        gate = Gate()
        gate.hold(context)
        handle = bound("frame")
        thread = threading.Thread(target=bound.close)
        thread.start()
        gate.wait_until_reached()
        assert len(events) == 1
        gate.open()
        thread.join(WAIT_S)
        bound.close()
        assert handle.done()
        assert len(events) == 2
        assert "closed" in repr(bound)

    def test_calls_of_two_threads_take_turns(self, context: StreamContext) -> None:
        """S9: host calls to an instance never overlap."""
        bound = bind(context, Factory([]), "a")
        failures: list[BaseException] = []

        def call() -> None:
            try:
                for _ in range(200):
                    bound("frame")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert failures == []

    def test_failing_close_does_not_keep_the_rest_open(self) -> None:
        """S3: one module whose close raises; the others close, the stream goes, the first error comes out."""

        class Stubborn(Instance):
            def close(self) -> None:
                super().close()
                raise Boom(f"stubborn {len(self.log)}")

        class StubbornFactory(Factory):
            def open(self, artifact: str, /, *, precision: str, input_hw: tuple[int, int]) -> Instance:
                return Stubborn(self.log)

        events: list[str] = []
        context = StreamContext.open("cpu")
        for _ in range(3):
            bind(context, StubbornFactory(events), "a")
        with pytest.raises(Boom, match="stubborn 1") as raised:
            context.close()
        assert len(events) == 3
        assert len(raised.value.__notes__) == 2
        assert context.closed
        context.close()


def test_faulted_context_takes_nothing_more(context: StreamContext) -> None:
    """S18: new submissions fail at once with the first cause, and nothing is called."""
    fault(context)
    called: list[int] = []
    submissions: list[Callable[[], object]] = [
        lambda: context.submit(called.append, 1),
        lambda: context.submit_sync(called.append, 1),
        lambda: context.record(),
        lambda: context.wait(),
    ]
    for submission in submissions:
        with pytest.raises(StreamFault) as raised:
            submission()
        assert isinstance(raised.value.__cause__, Boom)
    assert called == []
    assert context.faulted


def test_faulted_handle_is_refused_as_input(context: StreamContext, other: StreamContext) -> None:
    """S18, S30: a handle known to be faulted stops the submission; the other context stays as it is."""
    handle = context.submit(context.stream.enqueue, fail)
    handle.exception(WAIT_S)
    with pytest.raises(StreamFault):
        other.submit(lambda value: value, handle)
    assert not other.faulted
    assert other.submit(lambda: 1).result(WAIT_S) == 1


def test_fault_of_pending_input_reaches_the_dependant(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """S30: data that never arrives faults the stream that waits for it, with the first cause."""
    gate.hold(context)
    handle = context.submit(context.stream.enqueue, fail)
    ran: list[int] = []
    dependant = other.submit(lambda _: other.stream.enqueue(ran.append, 1), handle)
    gate.open()
    with pytest.raises(StreamFault) as raised:
        dependant.result(WAIT_S)
    assert isinstance(raised.value.__cause__, Boom)
    assert ran == []
    assert other.faulted


def test_nothing_is_submitted_into_a_capture(context: StreamContext, other: StreamContext) -> None:
    """S33: while a stream captures, submit and record on it are refused by name, ordering after it as well."""
    from pixtreme.infer.cuda_graph import CudaGraphSession

    refused: list[str] = []

    def operation() -> None:
        context.stream.enqueue(int)
        if not RUNTIME.is_capturing(context.stream):
            return
        calls: list[Callable[[], object]] = [
            lambda: context.submit(int),
            lambda: context.record(),
            lambda: other.submit(int),
        ]
        for call in calls:
            with pytest.raises(CaptureError, match="operation 'op'") as raised:
                call()
            refused.append(str(raised.value))

    CudaGraphSession({"op": operation}, context=context).close()
    assert len(refused) == 3
