"""Handles: states, blocking, callbacks, faults, handing over (S13, S16, S18, S19, S23, S24b, S24c, S36)."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import WAIT_S, Boom, Gate, LogRecords, doubled, fail, frame

from pixtreme.infer.errors import BusyError, ContextError, ContractError, HandleTimeout, StreamFault
from pixtreme.infer.runtimes.host import RUNTIME, HostEvent, HostRuntime
from pixtreme.infer.streams import EventHandle, StreamContext
from pixtreme.infer.streams._completion import HandleStatus


class Token:
    """Something to hold weakly."""


def test_states(context: StreamContext, gate: Gate) -> None:
    """S13: pending, then complete, and never back; the native event says the same."""
    gate.hold(context)
    handle = context.submit(lambda: "value")
    assert (handle.done(), handle.status, handle.context) == (False, HandleStatus.PENDING, context)
    assert isinstance(handle.event, HostEvent)
    assert not RUNTIME.query(handle.event)
    assert "pending" in repr(handle)
    gate.open()
    assert handle.result(WAIT_S) == "value"
    assert (handle.done(), handle.status, handle.exception()) == (True, HandleStatus.COMPLETE, None)
    assert RUNTIME.query(handle.event)
    assert "complete" in repr(handle)


def test_timeout_leaves_it_usable(context: StreamContext, gate: Gate) -> None:
    """S19: result(timeout) raises HandleTimeout; the handle stays usable; 0 only looks."""
    gate.hold(context)
    handle = context.submit(lambda: 1)
    for timeout in (0, 0.01):
        with pytest.raises(HandleTimeout, match="stays usable"):
            handle.result(timeout)
        with pytest.raises(TimeoutError):
            handle.exception(timeout)
    assert handle.completion.waiters == {}
    gate.open()
    assert handle.result(1e9) == 1  # more than a lock can wait for


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "1", [1]])
def test_malformed_timeout(context: StreamContext, timeout: object) -> None:
    """S19: a malformed timeout is refused before anything is waited for."""
    with pytest.raises(ContractError, match="timeout"):
        context.record().result(timeout)  # type: ignore[arg-type]


def test_ctrl_c_interrupts_a_blocked_result(context: StreamContext, gate: Gate) -> None:
    """S19, S24b, C31: KeyboardInterrupt comes within 100 ms, and the handle can be waited for again."""
    gate.hold(context)
    handle = context.submit(lambda: 1)
    gate.wait_until_reached()
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.05, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert time.perf_counter() - sent[0] < 0.1  # the limit S19 gives
    timer.join()
    gate.open()
    assert handle.result(WAIT_S) == 1


def test_callbacks(context: StreamContext, gate: Gate, log: LogRecords) -> None:
    """S13, S23: called with the handle on the reporting thread, at once if done; one that raises loses no other."""
    seen: list[tuple[EventHandle[int], str]] = []

    def note(handle: EventHandle[int]) -> None:
        seen.append((handle, threading.current_thread().name))

    gate.hold(context)
    handle = context.submit(lambda: 1)
    handle.call_when_done(note)
    handle.call_when_done(lambda _: fail("callback"))
    handle.call_when_done(note)
    assert seen == []
    gate.open()
    context.synchronize()
    assert seen == [(handle, "pixtreme.infer host stream")] * 2
    handle.call_when_done(note)
    assert seen[2] == (handle, threading.current_thread().name)
    assert log.take() == ["a completion callback failed"]
    with pytest.raises(ContractError, match="callable"):
        handle.call_when_done(1)  # type: ignore[arg-type]


def test_a_callback_may_submit(context: StreamContext, other: StreamContext) -> None:
    """S13: a callback runs outside any task, so it may enqueue the next step."""
    chained: list[EventHandle[int]] = []
    context.submit(lambda: 1).call_when_done(lambda handle: chained.append(handle.then(other, lambda value: value + 1)))
    context.synchronize()
    assert chained[0].result(WAIT_S) == 2


def test_then(context: StreamContext, other: StreamContext) -> None:
    """S13: then is submit with the value first."""
    handle = context.submit(doubled, context, np.ones(3)).then(other, lambda value, extra: (value, extra), extra=2)
    value, extra = handle.result(WAIT_S)
    assert handle.context is other
    assert (value.tolist(), extra) == ([2.0] * 3, 2)


def test_elapsed(context: StreamContext) -> None:
    """S13: device milliseconds between two handles of contexts opened with timing=True."""
    with StreamContext.open("cpu", timing=True) as timed:
        first, gate = timed.record(), Gate()
        gate.hold(timed)
        last = timed.record()
        with pytest.raises(BusyError, match="await both"):
            last.elapsed_ms(first)
        gate.open()
        last.result(WAIT_S)
        assert last.elapsed_ms(first) > 0 > first.elapsed_ms(last)
        with pytest.raises(ContextError, match="timing=True"):
            last.elapsed_ms(context.record())
        with pytest.raises(ContractError, match="EventHandle"):
            last.elapsed_ms(3)  # type: ignore[arg-type]


class TestFaults:
    """S18."""

    def test_every_way_of_asking_gets_it(self, context: StreamContext) -> None:
        """S18: result, exception and callbacks get a StreamFault with the task's exception as cause."""
        handle = context.submit(context.stream.enqueue, fail, "it broke")
        with pytest.raises(StreamFault, match="it broke") as raised:
            handle.result(WAIT_S)
        error = handle.exception()
        assert error is not None
        assert isinstance(error.__cause__, Boom)
        assert error.__cause__ is raised.value.__cause__
        assert isinstance(error.__cause__, Boom)
        assert error.__cause__.__traceback__ is not None
        statuses: list[HandleStatus] = []
        handle.call_when_done(lambda handle: statuses.append(handle.status))
        assert statuses == [HandleStatus.FAULTED]

    def test_work_before_the_fault_stays_complete(self, context: StreamContext) -> None:
        """S24a (and S18): each handle keeps its own outcome."""
        before = context.submit(lambda: 1)
        broken = context.submit(context.stream.enqueue, fail)
        assert isinstance(broken.exception(WAIT_S), StreamFault)
        assert before.result() == 1

    def test_unretrieved_fault_is_logged_once_by_name(self, log: LogRecords) -> None:
        """S18: a fault nobody asked for is logged once, by name, when the handle goes."""
        gate = Gate()
        with StreamContext.open("cpu", name="broken") as context:
            gate.hold(context)
            handles = [context.submit(context.stream.enqueue, fail) for _ in range(5)]
            gate.open()
            context._recorder.drain("a test").block()
            assert log.messages == []  # the handles are still there to be asked
            handles.clear()
            gc.collect()
        (message,) = log.take()
        assert "HostStream.enqueue on context 'broken' (cpu)" in message
        assert "Boom('boom')" in message

    def test_handle_dropped_before_the_fault(self, log: LogRecords) -> None:
        """S18: dropped while pending, logged when the fault comes."""
        gate = Gate()
        with StreamContext.open("cpu", name="broken") as context:
            gate.hold(context)
            context.submit(context.stream.enqueue, fail)
            assert log.messages == []
            gate.open()
        assert len(log.take()) == 1

    def test_retrieved_fault_is_not_logged(self, context: StreamContext) -> None:
        """S18: asked once is known."""
        handles = [context.submit(context.stream.enqueue, fail)]
        with pytest.raises(StreamFault):
            handles[0].result(WAIT_S)

    def test_fault_travels_with_a_hand_over(self, context: StreamContext, other: StreamContext, gate: Gate) -> None:
        """S18, S30: a handle whose value went on to another stream passes the fault on; only the end is asked."""
        gate.hold(context)
        end = context.submit(context.stream.enqueue, fail).then(other, lambda value: value)
        gate.open()
        assert isinstance(end.exception(WAIT_S), StreamFault)


class TestHandOver:
    """S16: on(target)."""

    def test_orders_the_target_without_a_host_wait(
        self, context: StreamContext, other: StreamContext, gate: Gate
    ) -> None:
        """S16: the target waits on the device; the value is handed over at once."""
        gate.hold(context)
        handle = context.submit(doubled, context, np.ones(2))
        with other.use():
            value = handle.on(other)
            later = other.submit(doubled, other, value)
        assert not later.done()
        gate.open()
        np.testing.assert_array_equal(later.result(WAIT_S), [4.0, 4.0])

    def test_own_context_adds_nothing(self, context: StreamContext, gate: Gate) -> None:
        """S16: on the handle's own context nothing is added and nothing more is kept."""
        gate.hold(context)
        handle = context.submit(Token)
        assert handle.on(context) is handle.on(context.stream)
        assert context._recorder._kept == []

    @pytest.mark.parametrize("by_stream", [False, True])
    def test_value_lives_until_the_targets_use_is_over(
        self, context: StreamContext, other: StreamContext, gate: Gate, by_stream: bool
    ) -> None:
        """S16: kept until what the target's scope enqueued is complete; each hand-over counts."""
        handle = context.submit(Token)
        handle.result(WAIT_S)
        ref = weakref.ref(handle.result())
        with StreamContext.open("cpu") as third:
            third_gate = Gate()
            for target, held in ((other, gate), (third, third_gate)):
                with target.use():
                    handle.on(target.stream if by_stream else target)
                    held.hold(target)
            del handle
            assert ref() is not None
            gate.open()
            other.synchronize()
            assert ref() is not None  # the third stream still uses it
            third_gate.open()
            third.synchronize()
            assert ref() is None

    def test_outside_a_scope_the_next_record_seals(
        self, context: StreamContext, other: StreamContext, gate: Gate
    ) -> None:
        """S16: handed over outside a scope, the value lives until the target's next event is complete."""
        handle = context.submit(Token)
        ref = weakref.ref(handle.result(WAIT_S))
        handle.on(other)
        del handle
        gate.hold(other)
        last = other.record()
        assert ref() is not None
        gate.open()
        last.result(WAIT_S)
        assert ref() is None

    def test_stream_without_a_context(self, context: StreamContext) -> None:
        """S16: for a native stream the value lives until what is enqueued there when the handle goes is complete."""
        foreign = RUNTIME.create_stream(priority=0)
        gate = Gate()
        handle = context.submit(Token)
        ref = weakref.ref(handle.result(WAIT_S))
        handle.on(foreign)
        foreign.enqueue(gate.wait)
        del handle
        gc.collect()
        assert ref() is not None
        gate.open()
        foreign.synchronize()
        done = RUNTIME.create_event()  # the release is reported behind the event: one more event is behind the release
        RUNTIME.record(done, foreign)
        RUNTIME.synchronize(done)
        assert ref() is None
        RUNTIME.destroy_stream(foreign)

    def test_pending_work_orders_a_stream_without_a_context(self, context: StreamContext, gate: Gate) -> None:
        """S16: a native stream waits too."""
        foreign = RUNTIME.create_stream(priority=0)
        gate.hold(context)
        handle = context.record("value")
        ran = threading.Event()
        assert handle.on(foreign) == "value"
        foreign.enqueue(ran.set)
        gate.wait_until_reached()
        assert not ran.is_set()
        gate.open()
        assert ran.wait(WAIT_S)
        RUNTIME.destroy_stream(foreign)

    @pytest.mark.parametrize("target", [None, "cpu", 7, object()])
    def test_refuses_other_targets(self, context: StreamContext, target: object) -> None:
        """S16: what is no context or stream of this runtime is refused, with await and staging as the way on."""
        with pytest.raises(ContextError, match=r"await.*stage"):
            context.record().on(target)

    def test_between_runtimes(self, context: StreamContext) -> None:
        """S16: handing over between runtimes is refused, pointing to await and staging."""

        class SecondRuntime(HostRuntime):
            """Stands for another device's runtime; a subclass of the real one, so it keeps its interface."""

            device = "cpu-2"

        second = SecondRuntime()
        foreign = StreamContext(
            second, second.create_stream(priority=0), owned=True, name=None, timing=False, max_in_flight=None
        )
        handle = context.record("value")
        uses: list[Callable[[], object]] = [
            lambda: handle.on(foreign),
            lambda: foreign.submit(lambda value: value, handle),
            lambda: foreign.wait(handle),
            lambda: foreign.wait(context),
        ]
        for use in uses:
            with pytest.raises(ContextError, match="await the handle"):
                use()
        assert foreign.in_flight == 0
        foreign.close()

    def test_faulted_value_is_not_handed_over(self, context: StreamContext, other: StreamContext) -> None:
        """S16, S18: what is known to be broken stops here."""
        handle = context.submit(context.stream.enqueue, fail)
        handle.exception(WAIT_S)
        with pytest.raises(StreamFault):
            handle.on(other)
        assert not other.faulted


class TestRelease:
    """S24c: where values are released."""

    def test_on_the_reporting_thread_outside_our_locks(self, context: StreamContext, gate: Gate) -> None:
        """S24c: a finaliser runs on the reporting thread, and may call the library."""
        seen: list[tuple[str, int, bool]] = []

        class Finalised:
            def __del__(self) -> None:
                name = threading.current_thread().name
                seen.append((name, context.in_flight, context.submit(lambda: True).done()))

        gate.hold(context)
        context.submit(lambda _: None, Finalised())
        gate.open()
        context.synchronize()
        assert seen[0][0] == "pixtreme.infer host stream"

    def test_a_raising_finaliser_is_not_fatal(
        self, context: StreamContext, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S24c: what a user's finaliser raises is reported by the interpreter's hook, and the stream goes on."""
        import sys

        unraisable: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda info: unraisable.append(info.exc_value))

        class Raising:
            def __del__(self) -> None:
                fail("finaliser")

        gate.hold(context)
        context.submit(lambda _: None, Raising())
        gate.open()
        assert context.submit(lambda: 1).result(WAIT_S) == 1
        assert [repr(error) for error in unraisable] == ["Boom('finaliser')"]


def test_published_only_after_the_record(context: StreamContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """S36, C22: where the record call fails there is no handle, no slot is lost, and no later one is unrecorded."""
    record = RUNTIME.record

    def failing(event: HostEvent, stream: object) -> None:
        if event.point is None and armed:
            raise Boom("record")
        record(event, stream)  # type: ignore[arg-type]

    armed = True
    monkeypatch.setattr(RUNTIME, "record", failing)
    with pytest.raises(Boom, match="record"):
        context.submit(lambda: 1)
    armed = False
    assert context.in_flight == 0
    assert context._in_flight._promised == 0
    assert context.submit(lambda: 2).result(WAIT_S) == 2


def test_reporting_is_ensured_before_each_wait(gate: Gate) -> None:
    """S21: a runtime that reports only when asked to (CUDA's completion thread) is asked before each kind of wait."""

    class Lazy(HostRuntime):
        """Reports like the host, and notes when it was asked to."""

        device = "cpu-lazy"
        demanded = 0

        def ensure_reporting(self, stream: object) -> None:
            self.demanded += 1

    runtime = Lazy()
    context = StreamContext(
        runtime, runtime.create_stream(priority=0), owned=True, name=None, timing=False, max_in_flight=1
    )
    waits: list[Callable[[EventHandle[None]], object]] = [
        lambda handle: handle.result(WAIT_S),
        lambda handle: handle.exception(WAIT_S),
        lambda handle: handle.call_when_done(lambda _: None),
        lambda handle: context.submit_sync(lambda: None),
    ]
    for wait in waits:
        held = Gate()
        held.hold(context)
        handle = context.record()
        before = runtime.demanded
        timer = threading.Timer(0.02, held.open)
        timer.start()
        wait(handle)
        assert runtime.demanded > before
        timer.join()
        context._recorder.drain("a test").block()
    context.close()


def test_dlpack(context: StreamContext, gate: Gate) -> None:
    """S17: a handle to an array or frame is a DLPack producer; on the CPU the export waits for the work."""
    pixels = np.zeros(3, np.float32)
    gate.hold(context)

    def enqueue() -> Any:
        context.stream.enqueue(np.copyto, pixels, np.float32(2))
        return pixels

    handle = context.submit(enqueue)
    threading.Timer(0.02, gate.open).start()
    assert handle.__dlpack_device__() == (1, 0)
    assert np.from_dlpack(handle).tolist() == [2, 2, 2]
    assert np.shares_memory(np.from_dlpack(handle), pixels)
    assert np.from_dlpack(context.submit(lambda: frame(4.0))).max() == 4.0
    with pytest.raises(ContractError, match="stream=1"):
        handle.__dlpack__(stream=1)
    with pytest.raises(ContractError, match="array or frame"):
        context.submit(lambda: 1).__dlpack__()
