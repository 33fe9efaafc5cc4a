"""Life of a context: opening, scopes, closing, finalisers, process edges (S1, S3, S4, S11, S33-S35, S38)."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from itertools import product

import anyio
import pytest
from helpers import WAIT_S, Boom, Gate, LogRecords, fail, fault, run_quietly

from pixtreme.infer.errors import CaptureError, ClosedError, ContextError, ContractError, NotPicklableError, StreamFault
from pixtreme.infer.runtimes.host import RUNTIME
from pixtreme.infer.runtimes.host._capture import _TRANSITIONS as CAPTURE_TRANSITIONS
from pixtreme.infer.runtimes.host._capture import Capture, CaptureStatus, HostRuntimeError
from pixtreme.infer.streams import StreamContext, _stream, available_devices
from pixtreme.infer.streams import _captures as captures
from pixtreme.infer.streams._completion import Completion, HandleStatus
from pixtreme.infer.streams._in_flight import InFlight
from pixtreme.infer.streams._lifetime import _TRANSITIONS as CONTEXT_TRANSITIONS
from pixtreme.infer.streams._lifetime import ContextStatus


class TestOpen:
    """S1: devices and options."""

    @pytest.mark.parametrize("device", ["auto", "cpu"])
    def test_devices(self, device: str) -> None:
        """S1, S11: a stream of its own on the device; what was asked for can be read back."""
        assert "cpu" in available_devices()
        with StreamContext.open(device, name="mine") as context, StreamContext.open(device) as second:
            assert (context.device, context.name, context.closed, context.faulted) == ("cpu", "mine", False, False)
            assert context.stream is not second.stream
            assert second.name != context.name
            assert "'mine' on cpu: open, 0 in flight" in repr(context)

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", 3, "gpu", "cuda:x", "", None, True, -1, 1.5])
    def test_unusable_device(self, device: object) -> None:
        """S1: an unusable device is an error that says what is available."""
        with pytest.raises(ContextError, match=r"available here are \('cpu',\)") as raised:
            StreamContext.open(device)  # type: ignore[arg-type]
        assert repr(device) in str(raised.value)

    @pytest.mark.parametrize(
        "options",
        [{"name": ""}, {"name": 3}, {"priority": True}, {"priority": "high"}, {"timing": 1}]
        + [{"max_in_flight": bound} for bound in (0, -1, True, 1.0, "3")],
    )
    def test_malformed_option(self, options: dict[str, object]) -> None:
        """S1: a malformed option is refused before a stream is made."""
        threads = threading.active_count()
        with pytest.raises(ContractError, match=next(iter(options))):
            StreamContext.open("cpu", **options)  # type: ignore[arg-type]
        assert threading.active_count() == threads


class TestScopes:
    """S4: use() makes device and stream current for this thread and restores both."""

    def test_nesting_restores_what_was_found(self, context: StreamContext, other: StreamContext) -> None:
        """S4, C33: T-U-T nesting, an exception, and re-entering one scope object."""
        assert RUNTIME.current() is None
        scope = context.use()
        with pytest.raises(Boom), scope, other.use(), scope:
            assert RUNTIME.current() is context.stream
            assert StreamContext.current() is context
            fail()
        assert RUNTIME.current() is None
        with pytest.raises(ContextError, match="inside no scope"):
            StreamContext.current()

    def test_restores_a_stream_somebody_else_made_current(self, context: StreamContext) -> None:
        """S4, C33: what was current before, by whatever means, is current again."""
        foreign = RUNTIME.create_stream(priority=0)
        put_back = RUNTIME.activate(foreign)
        with context.use():
            assert RUNTIME.current() is context.stream
        assert RUNTIME.current() is foreign
        put_back()
        RUNTIME.destroy_stream(foreign)

    def test_out_of_order_exit(self, context: StreamContext, other: StreamContext) -> None:
        """S4, C33: a scope left out of order says so, and the original stream is current once both are left."""
        first, second = context.use(), other.use()
        first.__enter__()
        second.__enter__()
        with pytest.raises(ContextError, match="entered later"):
            first.__exit__(None, None, None)
        assert RUNTIME.current() is other.stream
        second.__exit__(None, None, None)
        assert RUNTIME.current() is None

    def test_exit_on_another_thread(self, context: StreamContext) -> None:
        """S4, C33: a scope left by another thread says so and touches that thread's stream not at all."""
        scope = context.use()
        scope.__enter__()
        errors: list[BaseException] = []

        def leave() -> None:
            try:
                scope.__exit__(None, None, None)
            except ContextError as error:
                errors.append(error)

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(WAIT_S)
        assert "another thread" in str(errors[0])
        with pytest.raises(ContextError, match="inside no scope"):
            StreamContext.current()  # this thread's next look puts the original stream back
        assert RUNTIME.current() is None

    @pytest.mark.anyio
    async def test_await_inside_a_scope_is_noticed(self, context: StreamContext, other: StreamContext) -> None:
        """S4, C34: two tasks that await inside their scopes interleave; the one left out of order says so."""
        inside, left = anyio.Event(), anyio.Event()
        errors: list[ContextError] = []

        async def first() -> None:
            try:
                with context.use():
                    inside.set()
                    await left.wait()
            except ContextError as error:
                errors.append(error)

        async def second() -> None:
            await inside.wait()
            scope = other.use()
            scope.__enter__()
            left.set()
            while not errors:
                await anyio.lowlevel.checkpoint()
            scope.__exit__(None, None, None)

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            group.start_soon(second)
        assert "do not await inside a use() scope" in str(errors[0])
        assert RUNTIME.current() is None

    def test_a_new_thread_is_inside_no_scope(self, context: StreamContext) -> None:
        """S4, C34: current streams belong to threads; a new one starts outside any scope."""
        seen: list[object] = []
        with context.use():
            thread = threading.Thread(target=lambda: seen.append(RUNTIME.current()))
            thread.start()
            thread.join(WAIT_S)
        assert seen == [None]

    @pytest.mark.anyio
    async def test_async_with_does_not_make_current(self) -> None:
        """S4: a task's context is not made current for its thread."""
        async with StreamContext.open("cpu"):
            assert RUNTIME.current() is None


class TestClose:
    """S3: closing drains, closes, releases."""

    def test_drains(self) -> None:
        """S3: close returns after everything enqueued ran; later use is a ClosedError; idempotent."""
        gate, ran = Gate(), threading.Event()
        context = StreamContext.open("cpu")
        gate.hold(context)
        context.submit(context.stream.enqueue, ran.set)
        thread = threading.Thread(target=context.close)
        thread.start()
        gate.wait_until_reached()
        assert thread.is_alive()
        gate.open()
        thread.join(WAIT_S)
        assert ran.is_set()
        context.close()
        assert context.closed
        assert "closed" in repr(context)
        uses: list[Callable[[], object]] = [
            lambda: context.submit(int),
            lambda: context.submit_sync(int),
            lambda: context.record(),
            lambda: context.wait(),
            lambda: context.synchronize(),
            lambda: context.use().__enter__(),
            lambda: context.__enter__(),
            lambda: context.bind(None, None, precision="fp32", input_hw=(1, 1)),  # type: ignore[arg-type]
        ]
        for use in uses:
            with pytest.raises(ClosedError, match="after close"):
                use()

    @pytest.mark.anyio
    async def test_async_form_does_not_block_the_loop(self) -> None:
        """S3: async with drains without blocking the loop; other tasks run meanwhile."""
        gate = Gate()
        beats = 0

        async def open_later() -> None:
            nonlocal beats
            for beats in range(1, 20):  # noqa: B007
                await anyio.lowlevel.checkpoint()
            gate.open()

        async with anyio.create_task_group() as group:
            async with StreamContext.open("cpu") as context:
                gate.hold(context)
                handle = context.record()
                group.start_soon(open_later)
        assert beats == 19
        assert handle.done()
        assert context.closed
        await context.aclose()
        with pytest.raises(ClosedError):
            async with context:
                pass

    @pytest.mark.anyio
    async def test_cancelled_async_close_still_closes(self) -> None:
        """S3, S15: cancelling aclose takes effect after the drain; nothing is abandoned half-closed."""
        gate = Gate()
        context = StreamContext.open("cpu")
        gate.hold(context)
        after: list[str] = []
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:

                async def cancel_then_open() -> None:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                    assert not context._lifetime.finalizer.alive or context._lifetime.status is ContextStatus.CLOSING
                    gate.open()

                group.start_soon(cancel_then_open)
                await context.aclose()
                await anyio.lowlevel.checkpoint()
                after.append("not reached")
        assert scope.cancelled_caught
        assert after == []
        assert context._lifetime.status is ContextStatus.CLOSED

    def test_native_asyncio_cancel_of_a_close(self) -> None:
        """S3: task.cancel() without anyio's scopes is delivered after the drain too."""
        import asyncio

        gate = Gate()
        context = StreamContext.open("cpu")
        gate.hold(context)

        async def main() -> bool:
            task = asyncio.create_task(context.aclose())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
            gate.open()
            try:
                await task
            except asyncio.CancelledError:
                return True
            return False

        assert asyncio.run(main())
        assert context._lifetime.status is ContextStatus.CLOSED

    def test_refused_inside_its_own_scope(self, context: StreamContext) -> None:
        """S3, S4: a context cannot close while its stream is current here; it stays open."""
        with context.use():
            with pytest.raises(ContextError, match="leave the scope"):
                context.close()
        assert not context.closed

    def test_refused_on_its_own_worker(self, context: StreamContext) -> None:
        """S24b: the thread that reports completions must not wait for its own stream: an error, not a hang."""
        errors: list[str] = []
        gate = Gate()

        def callback(_: object) -> None:
            for wait in (context.close, context.synchronize, pending.result, lambda: context.submit_sync(int)):
                try:
                    wait()
                except ContextError as error:
                    errors.append(str(error))

        gate.hold(context)
        first = context.record()
        first.call_when_done(callback)
        gate2 = Gate()
        gate2.hold(context)
        pending = context.record()
        gate.open()
        gate2.wait_until_reached()
        assert len(errors) == 4
        assert "would never end" in errors[0]
        gate2.open()

    def test_close_of_a_faulted_context(self, log: LogRecords) -> None:
        """S3, S18: closing does not raise a fault its handles carry; one nobody could ask for is logged."""
        context = StreamContext.open("cpu", name="broken")
        context.stream.enqueue(fail)
        context.close()
        assert [text for text in log.take() if "broken" in text and "Boom('boom')" in text]

    def test_interrupted_close_goes_on(self) -> None:
        """S3, C31: Ctrl-C interrupts a drain; calling close() again finishes it."""
        gate = Gate()
        context = StreamContext.open("cpu")
        gate.hold(context)
        gate.wait_until_reached()
        timer = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            context.close()
        timer.join()
        with pytest.raises(ClosedError):
            context.submit(int)
        gate.open()
        context.close()
        assert context._lifetime.status is ContextStatus.CLOSED

    def test_synchronize(self, context: StreamContext) -> None:
        """S11: synchronize blocks until everything is over and raises the fault."""
        ran = threading.Event()
        context.stream.enqueue(ran.set)
        context.synchronize()
        assert ran.is_set()
        context.stream.enqueue(fail)
        with pytest.raises(StreamFault):
            context.synchronize()

    def test_handle_outlives_its_context(self) -> None:
        """C14: an old handle still resolves to its own work."""
        with StreamContext.open("cpu") as context:
            handle = context.submit(lambda: "mine")
        assert handle.result() == "mine"
        with pytest.raises(ClosedError):
            handle.then(context, int)


class TestAdopt:
    """S33: two contexts on one stream know of each other."""

    def test_closing_leaves_the_stream_alone(self, context: StreamContext) -> None:
        """S3, S33: an adopted stream belongs to somebody else."""
        alias = StreamContext.adopt(context.stream, name="alias")
        assert alias.submit(lambda: 1).result(WAIT_S) == 1
        alias.close()
        assert _stream.consumers[context.core_stream.key] is context
        assert context.submit(lambda: 2).result(WAIT_S) == 2

    def test_refuses_what_is_no_stream(self) -> None:
        """S33: only native streams."""
        for thing in (None, 0, 1, 2, "cpu", object()):
            with pytest.raises(ContextError, match="native stream"):
                StreamContext.adopt(thing)  # type: ignore[arg-type]

    def test_capture_on_an_alias_is_refused_by_name(self, context: StreamContext) -> None:
        """S33, C09: a second capture, and eager work on an alias while the first captures, name who captures."""
        from pixtreme.infer.cuda_graph import CudaGraphSession

        with StreamContext.adopt(context.stream, name="alias") as alias:
            refusals: list[str] = []

            def operation() -> None:
                context.stream.enqueue(int)
                if RUNTIME.is_capturing(context.stream):
                    for call in (
                        lambda: alias.submit(int),
                        lambda: alias.synchronize(),
                        lambda: CudaGraphSession({"second": lambda: None}, context=alias),
                    ):
                        with pytest.raises((CaptureError, ContextError), match="operation 'first'") as raised:
                            call()
                        refusals.append(str(raised.value))

            session = CudaGraphSession({"first": operation}, context=context)
            assert len(refusals) == 3
            session.close()


class TestFinalisers:
    """S34: finalisers never call the runtime while a capture is open on the device."""

    def test_dropped_context_is_released(self) -> None:
        """S34, C14: dropping an open context warns, and its stream ends after what it has."""
        gate, ran = Gate(), threading.Event()
        context = StreamContext.open("cpu", name="lost")
        gate.hold(context)
        context.stream.enqueue(ran.set)
        with pytest.warns(ResourceWarning, match="'lost'"):
            del context
            gc.collect()
        gate.open()
        assert ran.wait(WAIT_S)

    def test_collection_inside_a_capture(self, context: StreamContext) -> None:
        """S34, C04: context, session and handle collected inside a capture are released after it; it survives."""
        from pixtreme.infer.cuda_graph import CudaGraphSession

        class Cycle:
            def __init__(self, *things: object) -> None:
                self.things = (*things, self)

        foreign = RUNTIME.create_stream(priority=0)
        lost = StreamContext.open("cpu", name="lost")
        handle = lost.submit(lambda: 1)
        handle.on(foreign)
        worker = weakref.ref(lost.stream.worker)
        cycle = Cycle(CudaGraphSession({"op": lambda: lost.stream.enqueue(int)}, context=lost), handle, lost)
        ref = weakref.ref(cycle.things[0])
        deferred: list[int] = []

        def operation() -> None:
            nonlocal lost, handle, cycle
            context.stream.enqueue(int)
            if RUNTIME.is_capturing(context.stream):
                del lost, handle, cycle
                gc.collect()
                deferred.append(len(captures.deferred))
                assert ref() is None

        gc.disable()
        try:
            with pytest.warns(ResourceWarning, match="lost"):
                session = CudaGraphSession({"op": operation}, context=context)
        finally:
            gc.enable()
        assert deferred[0] >= 2
        assert not captures.deferred
        with context.use():
            session.replay("op")
        context.synchronize()
        session.close()
        RUNTIME.destroy_stream(foreign)
        del worker

    def test_collection_inside_a_host_task(self, context: StreamContext, other: StreamContext, gate: Gate) -> None:
        """S34, G8: a session whose last reference goes inside a host task is kept until its stream's work is over."""
        from pixtreme.infer.cuda_graph import CudaGraphSession

        token = threading.Event()
        ref = weakref.ref(token)
        sessions = [CudaGraphSession({"op": lambda: context.stream.enqueue(int)}, resources=[token], context=context)]
        del token
        gate.hold(context)
        other.submit(other.stream.enqueue, sessions.clear).result(WAIT_S)
        gc.collect()
        assert ref() is not None
        other.record()  # a safe point: the release is asked for again, behind the work under way
        assert ref() is not None
        gate.open()
        context.synchronize()
        assert ref() is None


class TestProcessEdges:
    """Forks, exit, pickling, imports."""

    def test_child_after_fork_is_refused(self, context: StreamContext) -> None:
        """C32 (and S12): a child that uses an inherited context gets an error, and can open its own."""
        context.synchronize()
        reader, writer = os.pipe()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
            child = os.fork()
        if child == 0:
            text = "no error"
            try:
                context.submit(int)
            except ContextError as error:
                own = StreamContext.open("cpu")
                text = str(error) if own.submit(lambda: 1).result(5) == 1 else "own context failed"
                own.close()
            finally:
                os.write(writer, text.encode())
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        message = os.read(reader, 4096).decode()
        os.close(reader)
        assert "spawn" in message
        assert str(os.getpid()) in message

    @pytest.mark.parametrize(
        "state",
        [
            "pass",
            "context.stream.enqueue(gate.wait)",  # a task that never ends
            "handle = context.submit(context.stream.enqueue, gate.wait)",
            "[context.stream.enqueue(sum, range(10**6)) for _ in range(100)]",
        ],
    )
    @pytest.mark.slow
    def test_interpreter_exit(self, state: str) -> None:
        """S24b (and S12): at exit an open context neither hangs nor prints anything."""
        program = (
            "import threading\nfrom pixtreme.infer.streams import StreamContext\n"
            f"gate = threading.Event()\ncontext = StreamContext.open('cpu')\n{state}\n"
        )
        run_quietly(program)

    def test_nothing_is_pickled(self, context: StreamContext) -> None:
        """S38: contexts, handles and sessions refuse to be pickled or copied, and say what to send instead."""
        from pixtreme.infer.cuda_graph import CudaGraphSession

        session = CudaGraphSession({"op": lambda: context.stream.enqueue(int)}, context=context)
        for thing, send in ((context, "device name"), (context.record(), "NumPy array"), (session, "artifact")):
            for dump in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(NotPicklableError, match=send):
                    dump(thing)
        session.close()

    def test_import_initialises_no_cuda(self) -> None:
        """S38: importing starts no thread, loads no CUDA driver and no event loop."""
        program = (
            "import sys, threading, pixtreme.infer\n"
            "assert threading.active_count() == 1\n"
            "maps = open('/proc/self/maps').read()\n"
            "assert 'libcuda.so' not in maps, 'the CUDA driver is loaded'\n"
            "loaded = {'onnxruntime', 'onnx', 'anyio', 'trio', 'asyncio', 'rich', 'matplotlib'} & set(sys.modules)\n"
            "assert not loaded, loaded\n"
        )
        run_quietly(program)


def test_fault_leaves_an_independent_context_working(context: StreamContext, other: StreamContext) -> None:
    """S30: one broken context, one that goes on."""
    fault(context)
    assert context.faulted
    assert "faulted" in repr(context)
    assert other.submit(lambda: 1).result(WAIT_S) == 1


def test_launch_blocking_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """S32, S6: with launch blocking a failing task comes straight out of submit, with its traceback."""
    monkeypatch.setenv("PIXTREME_INFER_LAUNCH_BLOCKING", "1")
    with StreamContext.open("cpu") as context:
        assert context.submit(lambda: 1).done()
        with pytest.raises(Boom):
            context.submit(context.stream.enqueue, fail)
        assert context.faulted


def test_no_device_wide_synchronise_in_the_library() -> None:
    """S35: no verb of the runtime protocol, and so no code written on it, can synchronise a device."""
    from pixtreme.infer.runtimes import Runtime

    verbs = [name for name in dir(Runtime) if "sync" in name]
    assert verbs == ["synchronize"]
    assert list(Runtime.synchronize.__annotations__) == ["event", "return"]


@pytest.mark.parametrize(("status", "event"), list(product(ContextStatus, ["close", "drained"])))
def test_every_pair_of_the_context_table(status: ContextStatus, event: str) -> None:
    """S3, T8: each known pair leads where the table says; an unknown one changes nothing."""
    with StreamContext.open("cpu") as context:
        context._lifetime.status = status
        expected = CONTEXT_TRANSITIONS.get((status, event))
        try:
            if event == "close":
                context._lifetime.begin_close(context)
            else:
                context._finish_close()
        except KeyError:
            assert expected is None
            assert context._lifetime.status is status
        else:
            assert context._lifetime.status is expected
        if context._lifetime.status is ContextStatus.CLOSED and not context.stream.destroyed:
            RUNTIME.destroy_stream(context.stream)  # the test set CLOSED by hand
            context._lifetime.finalizer.detach()
        elif context._lifetime.status is not ContextStatus.CLOSED:
            context._lifetime.status = ContextStatus.OPEN


@pytest.mark.parametrize("cause", [None, Boom()], ids=["complete", "fault"])
@pytest.mark.parametrize("status", list(HandleStatus))
def test_a_completion_finishes_once(context: StreamContext, status: HandleStatus, cause: BaseException | None) -> None:
    """S13: pending becomes complete or faulted, and nothing else ever happens."""
    completion = Completion(context.core_stream, None, InFlight("a test", None), "work")
    if status is HandleStatus.PENDING:
        completion.finish(cause)
        assert completion.status is (HandleStatus.COMPLETE if cause is None else HandleStatus.FAULTED)
    else:
        completion.finish(None if status is HandleStatus.COMPLETE else Boom())
        with pytest.raises(RuntimeError, match="reported twice"):
            completion.finish(cause)
        assert completion.status is status


@pytest.mark.parametrize(("status", "event"), list(product(CaptureStatus, ["violate", "end"])))
def test_every_pair_of_the_capture_table(status: CaptureStatus, event: str) -> None:
    """S29, T8: a capture ends once; what it refuses changes nothing."""
    stream = RUNTIME.create_stream(priority=0)
    capture = Capture(stream)
    capture.status = status
    expected = CAPTURE_TRANSITIONS.get((status, event), status)
    try:
        if event == "violate":
            capture.violate("a test", status=900)
        capture.end(stream)
    except (HostRuntimeError, KeyError):
        assert (status, event) != (CaptureStatus.ACTIVE, "end")
    assert capture.status is expected
    RUNTIME.destroy_stream(stream)
