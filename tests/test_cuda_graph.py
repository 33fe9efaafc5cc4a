"""Graph sessions and buffers on the host runtime (G1-G12, G14-G17, G19-G21)."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers import WAIT_S, Boom, Gate, fail, frame

from pixtreme.infer.cuda_graph import _TRANSITIONS as TRANSITIONS
from pixtreme.infer.cuda_graph import CudaGraphBuffers, CudaGraphSession, SessionStatus, fire
from pixtreme.infer.errors import CaptureError, ClosedError, ContextError, ContractError, StreamFault
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.runtimes.host import RUNTIME, HostRuntimeError
from pixtreme.infer.streams import StreamContext, _captures

METADATA = {"channels": "RGB", "colorspace": "sRGB", "gamma": "sRGB"}


@pytest.fixture
def buffers(context: StreamContext) -> CudaGraphBuffers:
    """Fixed storage of 4x6 RGB in and out, and a parameter."""
    with context.use():
        return CudaGraphBuffers(frame(), frame(), params={"gain": np.ones((4, 6, 1), np.float32)})


@pytest.fixture
def session(context: StreamContext, buffers: CudaGraphBuffers) -> Iterator[CudaGraphSession]:
    """``output = input * gain`` and ``output = input + 1``."""
    opened = CudaGraphSession(operations(context, buffers), resources=(buffers,), context=context)
    yield opened
    opened.close()


def operations(context: StreamContext, buffers: CudaGraphBuffers) -> dict[str, Callable[[], None]]:
    source, target = buffers.input_frame.data, buffers.output_frame.data
    return {
        "scale": lambda: context.stream.enqueue(np.multiply, source, buffers.params["gain"], target),
        "shift": lambda: context.stream.enqueue(np.add, source, 1, target),
    }


def request(session: CudaGraphSession, buffers: CudaGraphBuffers, name: str, value: float, gain: float = 1.0) -> Any:
    """What a module does for each request."""
    session.check_context()
    buffers.copy_inputs(frame(value), gain=np.full((4, 6, 1), gain, np.float32))
    session.replay(name)
    return buffers.copy_output(**METADATA)


class TestSession:
    """CudaGraphSession."""

    def test_replays_operations_on_new_inputs(
        self, context: StreamContext, buffers: CudaGraphBuffers, session: CudaGraphSession
    ) -> None:
        """G1, G7, G15: bound to the context; each replay works on this request's inputs, results are independent."""
        assert session.context is context
        assert session.names == ("scale", "shift")
        with context.use():
            results = [request(session, buffers, name, n, 3.0) for n in range(5) for name in ("scale", "shift")]
        context.synchronize()
        assert [result.data.flat[0] for result in results] == [value for n in range(5) for value in (3 * n, n + 1)]

    def test_prepares_in_mapping_order(self, context: StreamContext) -> None:
        """G3: for each operation in order, one warm-up, a wait, one capture; then after_prepare; then a check."""
        calls: list[str] = []

        def operation(name: str) -> Callable[[], None]:
            def run() -> None:
                calls.append(f"{name} {'captured' if RUNTIME.is_capturing(context.stream) else 'warm-up'}")
                context.stream.enqueue(calls.append, f"{name} ran")

            return run

        session = CudaGraphSession(
            {"b": operation("b"), "a": operation("a")}, after_prepare=lambda: calls.append("after"), context=context
        )
        assert calls == ["b warm-up", "b ran", "b captured", "a warm-up", "a ran", "a captured", "after"]
        with context.use():
            session.replay("a")
        context.synchronize()
        assert calls[-1] == "a ran"  # G7: the Python operation is not called again
        session.close()

    def test_binds_to_what_is_current(self, context: StreamContext) -> None:
        """G1, G9: without a context it binds to the thread's current stream, a scope's or a plain one."""
        with context.use():
            session = CudaGraphSession({"op": lambda: context.stream.enqueue(int)})
        assert session.context is context
        session.close()
        plain = RUNTIME.create_stream(priority=0)
        put_back = RUNTIME.activate(plain)
        session = CudaGraphSession({"op": lambda: plain.enqueue(int)})
        session.replay("op")
        assert session.context is None
        with pytest.raises(ContextError, match="a handle belongs to a context"):
            session.launch("op")
        session.close()
        put_back()
        RUNTIME.destroy_stream(plain)

    def test_no_stream_current(self) -> None:
        """G1: with nothing current there is nothing to bind to; no operation runs."""
        called: list[int] = []
        with pytest.raises(ContextError, match="explicit stream"):
            CudaGraphSession({"op": lambda: called.append(1)})
        assert called == []

    @pytest.mark.parametrize("pointer", [0, 1, 2])
    def test_default_streams_are_refused(self, pointer: int) -> None:
        """G2: pointers 0, 1 and 2 are default streams; refused before any operation runs."""
        stream = RUNTIME.create_stream(priority=0)
        stream.ptr = pointer  # the host has no default stream: this one stands for it
        called: list[int] = []
        put_back = RUNTIME.activate(stream)
        try:
            with pytest.raises(ContextError, match=f"default stream {pointer}"):
                CudaGraphSession({"op": lambda: called.append(1)})
        finally:
            put_back()
            RUNTIME.destroy_stream(stream)
        assert called == []

    @pytest.mark.parametrize(
        "place", ["warm-up", "capture", "device", "violation", "swallowed", "after_prepare", "Ctrl-C"]
    )
    def test_failure_leaves_nothing(self, place: str) -> None:
        """G4, C03, C31: the original exception, noted; the stream out of capture; everything released; no session."""
        with StreamContext.open("cpu") as context:
            token = threading.Event()
            ref = weakref.ref(token)

            def operation(held: object = token) -> None:
                capturing = RUNTIME.is_capturing(context.stream)
                context.stream.enqueue(fail if place == "device" else int)
                if capturing and place == "Ctrl-C":
                    os.kill(os.getpid(), signal.SIGINT)
                if (place, capturing) in (("warm-up", False), ("capture", True)):
                    fail(place)
                if capturing and place in ("violation", "swallowed"):
                    try:
                        context.stream.synchronize()
                    except HostRuntimeError:
                        if place == "violation":
                            raise

            expected = {"device": StreamFault, "violation": HostRuntimeError, "swallowed": CaptureError}
            after = (lambda: fail(place)) if place == "after_prepare" else None
            kind = KeyboardInterrupt if place == "Ctrl-C" else expected.get(place, Boom)
            with pytest.raises(kind) as raised:
                CudaGraphSession({"good": lambda: context.stream.enqueue(int), "op": operation}, after_prepare=after,
                                 resources=[token], context=context)  # fmt: skip
            notes = getattr(raised.value, "__notes__", [])
            if place != "after_prepare":
                assert "operation 'op'" in notes[-1] or "operation 'op'" in "".join(notes)
            if place == "violation":
                assert any("ending the capture failed as well" in note for note in notes)
            assert not RUNTIME.is_capturing(context.stream)
            assert RUNTIME.current() is None
            if place != "device":
                context.synchronize()
                session = CudaGraphSession({"op": lambda: context.stream.enqueue(int)}, context=context)
                session.close()
            else:
                assert isinstance(raised.value.__cause__, Boom)
                with pytest.raises(StreamFault):
                    context.synchronize()
            raised.value.__traceback__ = None
            del operation, token, raised
            gc.collect()
            assert ref() is None

    def test_empty_operation(self, context: StreamContext, other: StreamContext) -> None:
        """G5: an operation that recorded nothing, or only on another stream, is an error naming it."""
        for work in (lambda: None, lambda: other.stream.enqueue(int)):
            with pytest.raises(CaptureError, match="'lost' recorded nothing"):
                CudaGraphSession({"lost": work}, context=context)
        other.synchronize()

    def test_check_context(self, context: StreamContext, other: StreamContext, session: CudaGraphSession) -> None:
        """G6: another stream, none, a capture in progress, closed: each an error with observed and required."""
        with pytest.raises(ContextError, match=r"no explicit stream.*required is <HostStream"):
            session.check_context()
        with other.use(), pytest.raises(ContextError, match=repr(other.stream)) as raised:
            session.replay("scale")
        assert repr(context.stream) in str(raised.value)
        with context.use():
            session.check_context()
            RUNTIME.begin_capture(context.stream)
            with pytest.raises(ContextError, match="other code captures"):
                session.check_context()
            RUNTIME.end_capture(context.stream)
            session.check_context()
            session.close()
            with pytest.raises(ClosedError):
                session.check_context()

    def test_unknown_name(self, context: StreamContext, session: CudaGraphSession) -> None:
        """G7: lists the known ones."""
        with context.use(), pytest.raises(ContractError, match=r"'sclae'.*'scale', 'shift'"):
            session.replay("sclae")

    def test_launch_is_replay_and_record(self, context: StreamContext, session: CudaGraphSession) -> None:
        """G7: launch gives a handle."""
        gate = Gate()
        with context.use():
            gate.hold(context)
            handle = session.launch("shift")
        assert not handle.done()
        gate.open()
        assert handle.result(WAIT_S) is None

    def test_everything_lives_until_close_and_work_is_over(self, context: StreamContext) -> None:
        """G8, C12: operations and resources live until close, and until what was replayed is complete."""
        table = np.arange(6.0)
        result = np.zeros(6)
        ref = weakref.ref(table)

        def build(held: Any) -> CudaGraphSession:
            return CudaGraphSession(
                {"op": lambda: context.stream.enqueue(np.multiply, held, 2, result)}, resources=[held], context=context
            )

        session = build(table)
        del table
        gc.collect()
        gate = Gate()
        with context.use():
            gate.hold(context)
            session.replay("op")
        session.close()
        session.close()
        gc.collect()
        assert ref() is not None
        gate.open()
        context.synchronize()
        np.testing.assert_array_equal(result, np.arange(6.0) * 2)
        gc.collect()
        assert ref() is None

    def test_closing_never_waits(self, context: StreamContext, gate: Gate, session: CudaGraphSession) -> None:
        """G8: close with work under way returns at once."""
        gate.hold(context)
        session.close()
        assert not RUNTIME.query(context.record().event)
        gate.open()

    def test_from_another_thread(
        self, context: StreamContext, buffers: CudaGraphBuffers, session: CudaGraphSession
    ) -> None:
        """G10: works where the context is current, on any thread."""
        results: list[HostFrame] = []

        def work() -> None:
            with context.use():
                results.append(request(session, buffers, "shift", 4.0))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(WAIT_S)
        context.synchronize()
        assert results[0].data.flat[0] == 5.0

    def test_replay_inside_another_capture(
        self, context: StreamContext, buffers: CudaGraphBuffers, session: CudaGraphSession
    ) -> None:
        """G19, C02: refused naming both sessions, before anything; the capture survives."""
        texts: list[str] = []

        def operation() -> None:
            context.stream.enqueue(int)
            if RUNTIME.is_capturing(context.stream):
                with pytest.raises(ContextError) as raised:
                    session.replay("scale")
                texts.append(str(raised.value))

        second = CudaGraphSession({"second": operation}, context=context)
        assert "second" in texts[0]
        assert "scale, shift" in texts[0]
        with context.use():
            second.replay("second")
            assert request(session, buffers, "shift", 1.0) is not None
        context.synchronize()
        second.close()

    @pytest.mark.parametrize("way", ["close", "drop"])
    def test_closing_or_dropping_inside_another_capture(self, context: StreamContext, way: str) -> None:
        """G19, C02, C04: the release is deferred to the end of the capture, which survives."""
        first: list[CudaGraphSession] = [
            CudaGraphSession({"first": lambda: context.stream.enqueue(int)}, context=context)
        ]
        deferred: list[int] = []

        def operation() -> None:
            context.stream.enqueue(int)
            if RUNTIME.is_capturing(context.stream):
                if way == "close":
                    first[0].close()
                else:
                    first.clear()
                    gc.collect()
                deferred.append(len(_captures.deferred))

        second = CudaGraphSession({"second": operation}, context=context)
        assert deferred == [1]
        assert not _captures.deferred
        with context.use():
            second.launch("second").result(WAIT_S)
        second.close()

    def test_a_failed_capture_leaves_no_stain(self, context: StreamContext) -> None:
        """S35: after a failed capture the next unrelated call is not blamed."""
        with pytest.raises(CaptureError):
            CudaGraphSession({"lost": lambda: None}, context=context)
        assert context.submit(lambda: 1).result(WAIT_S) == 1

    def test_the_stream_may_not_be_left_capturing_by_a_submission(self, context: StreamContext) -> None:
        """S36: an event recorded into somebody's capture would never complete: no handle is made of it."""
        with pytest.raises(ContextError, match="left capturing"):
            context.submit(lambda: RUNTIME.begin_capture(context.stream))
        RUNTIME.end_capture(context.stream)
        assert context.in_flight == 0

    @pytest.mark.parametrize(("status", "event"), list(product(SessionStatus, ["prepared", "close"])))
    def test_every_pair_of_the_table(self, context: StreamContext, status: SessionStatus, event: str) -> None:
        """G8, G9: a session becomes ready once and closed for good."""
        session = CudaGraphSession({"op": lambda: context.stream.enqueue(int)}, context=context)
        session._status = status
        expected = TRANSITIONS.get((status, event))
        if event == "close":
            session.close()
            assert session._status is expected
        elif expected is None:
            with pytest.raises(KeyError):
                fire(status, event)
        else:
            assert (status, expected) == (SessionStatus.PREPARING, SessionStatus.READY)
        session.close()

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            ({"operations": {}}, "operations"),
            ({"operations": []}, "operations"),
            ({"operations": {"": int}}, "operations"),
            ({"operations": {3: int}}, "operations"),
            ({"operations": {"op": 3}}, "callables"),
            ({"operations": {"op": int}, "after_prepare": 3}, "after_prepare"),
            ({"operations": {"op": int}, "context": "cpu"}, "context"),
        ],
    )
    def test_malformed_arguments(self, arguments: dict[str, Any], word: str) -> None:
        """G1: refused before any operation runs."""
        with pytest.raises(ContractError, match=word):
            CudaGraphSession(**arguments)


class TestVerify:
    """G20: verify=True."""

    def test_sound_operations_pass_and_everything_is_restored(
        self, context: StreamContext, buffers: CudaGraphBuffers
    ) -> None:
        """G20: inputs, outputs and history are as before; after_prepare comes afterwards."""
        history = np.full((4, 6, 3), 7.0, np.float32)
        source, target = buffers.input_frame.data, buffers.output_frame.data
        source[...] = 5.0
        seen: list[float] = []

        def accumulate() -> None:
            context.stream.enqueue(np.add, history, source, history)
            context.stream.enqueue(np.copyto, target, history)

        session = CudaGraphSession(
            {"op": accumulate},
            resources=(buffers, history, "an engine"),
            after_prepare=lambda: seen.append(float(history.flat[0])),
            context=context,
            verify=True,
        )
        assert seen == [12.0]  # 7 and one warm-up; the verification's own runs were undone
        assert source.flat[0] == 5.0
        session.close()

    @pytest.mark.parametrize("mistake", ["ran while capturing", "frozen value", "history ran while capturing"])
    def test_catches_what_is_not_recorded(
        self, context: StreamContext, buffers: CudaGraphBuffers, mistake: str
    ) -> None:
        """G20, C06, C10: work that ran at capture time leaves a frozen result; the operation is named."""
        source, target = buffers.input_frame.data, buffers.output_frame.data
        history = np.zeros((4, 6, 3), np.float32)
        scratch = np.empty_like(source)

        def operation() -> None:
            if mistake == "ran while capturing":
                np.multiply(source, 2, out=scratch)  # at once, on no stream
                context.stream.enqueue(np.add, scratch, 1, target)
            elif mistake == "frozen value":
                context.stream.enqueue(np.add, source * 2, 1, target)
            else:
                np.add(history, source, out=history)
                context.stream.enqueue(np.copyto, target, source)

        with pytest.raises(CaptureError, match="operation 'op'"):
            CudaGraphSession({"op": operation}, resources=(buffers, history), context=context, verify=True)

    def test_needs_buffers(self, context: StreamContext) -> None:
        """G20: without declared inputs and outputs there is nothing to compare."""
        with pytest.raises(ContractError, match="no CudaGraphBuffers"):
            CudaGraphSession({"op": lambda: context.stream.enqueue(int)}, context=context, verify=True)


class Ema:
    """A temporal module on graphs: an exponential average with two history buffers that swap roles."""

    def __init__(self, context: StreamContext) -> None:
        self.context = context
        self.even, self.odd = np.zeros((4, 6, 3), np.float32), np.zeros((4, 6, 3), np.float32)
        self.turn = 0
        with context.use():
            self.buffers = CudaGraphBuffers(frame(), frame())
        self.session = CudaGraphSession(
            {"even": lambda: self.step(self.even, self.odd), "odd": lambda: self.step(self.odd, self.even)},
            resources=(self.buffers, self.even, self.odd),
            after_prepare=self.reset,
            context=context,
            verify=True,
        )

    def step(self, old: Any, new: Any) -> None:
        source, target = self.buffers.input_frame.data, self.buffers.output_frame.data
        self.context.stream.enqueue(lambda: np.copyto(new, (old + source) / 2))
        self.context.stream.enqueue(np.copyto, target, new)

    def reset(self) -> None:
        self.context.stream.enqueue(self.even.fill, 0)
        self.context.stream.enqueue(self.odd.fill, 0)
        self.turn = 0

    def __call__(self, value: HostFrame, *, reset: bool) -> Any:
        self.session.check_context()
        self.buffers.copy_inputs(value)
        if reset:
            self.reset()
        self.session.replay(("even", "odd")[self.turn])
        self.turn = 1 - self.turn
        return self.buffers.copy_output(**METADATA)


def test_temporal_module(context: StreamContext) -> None:
    """G17, G3: history in resources, one operation a direction, reset before replay, warm-up undone."""
    module = Ema(context)
    results, expected, state = [], [], 0.0
    with context.use():
        for number in range(12):
            reset = number in (0, 5)
            state = ((0.0 if reset else state) + number) / 2
            expected.append(state)
            results.append(module(frame(number), reset=reset))
    context.synchronize()
    assert [result.data.flat[0] for result in results] == pytest.approx(expected)
    module.session.close()


class TestBuffers:
    """CudaGraphBuffers."""

    def test_attributes(self, buffers: CudaGraphBuffers) -> None:
        """G11: the frames and arrays given, as published modules use them."""
        assert buffers.input_frame.shape == buffers.output_frame.shape == (4, 6, 3)
        assert list(buffers.params) == ["gain"]
        assert buffers.params["gain"].shape == (4, 6, 1)

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            ({"input_frame": np.zeros((4, 6, 3))}, "input_frame"),
            ({"output_frame": None}, "output_frame"),
            ({"params": {"frame": np.zeros(3)}}, "identifiers"),
            ({"params": {"reset": np.zeros(3)}}, "identifiers"),
            ({"params": {"not a name": np.zeros(3)}}, "identifiers"),
            ({"params": {3: np.zeros(3)}}, "identifiers"),
            ({"params": [1]}, "mapping"),
            ({"params": {"mv": np.zeros((4, 4))[:, ::2]}}, "C-contiguous"),
            ({"params": {"mv": np.zeros((4, 4), order="F")}}, "C-contiguous"),
            ({"params": {"mv": np.broadcast_to(np.zeros(1), 4)}}, "writeable"),
            ({"params": {"mv": np.zeros(3, ">f4")}}, "native byte order"),
            ({"params": {"mv": "text"}}, "no array"),
        ],
    )
    def test_malformed_storage(self, context: StreamContext, arguments: dict[str, Any], word: str) -> None:
        """G11: fixed storage is C-contiguous, writeable, of plain numbers, and named."""
        with context.use(), pytest.raises(ContractError, match=word):
            CudaGraphBuffers(**({"input_frame": frame(), "output_frame": frame()} | arguments))

    def test_inputs_may_not_overlap(self, context: StreamContext) -> None:
        """G11, G14: two fixed inputs in one storage would overwrite each other."""
        source = frame()
        with context.use(), pytest.raises(ContractError, match="overlaps 'frame'"):
            CudaGraphBuffers(source, frame(), params={"mv": source.data[1:]})

    def test_needs_a_current_stream(self, buffers: CudaGraphBuffers) -> None:
        """G11, G12: without a current stream there is nowhere to enqueue."""
        for call in (
            lambda: CudaGraphBuffers(frame(), frame()),
            lambda: buffers.copy_inputs(frame(), gain=np.ones((4, 6, 1), np.float32)),
            lambda: buffers.copy_output(**METADATA),
        ):
            with pytest.raises(ContextError, match="explicit stream"):
                call()

    @pytest.mark.parametrize("position", ["frame", "gain"])
    def test_rejected_request_touches_nothing(
        self, context: StreamContext, buffers: CudaGraphBuffers, position: str
    ) -> None:
        """G12: every source is validated before the first copy, whichever of them is wrong."""
        good: dict[str, Any] = {"frame": frame(9.0), "gain": np.full((4, 6, 1), 9.0, np.float32)}
        bad: list[Any] = [
            frame(9.0, shape=(4, 5, 3)),
            frame(9.0, dtype="float16"),
            frame(9.0, shape=(4, 6, 1)).data.astype(np.float64),
            None,
            "text",
        ]
        for source in bad:
            arguments = good | {position: source}
            with context.use(), pytest.raises(ContractError, match=position):
                buffers.copy_inputs(arguments.pop("frame"), **arguments)
        context.synchronize()
        assert buffers.input_frame.data.max() == 0.0
        assert buffers.params["gain"].max() == 1.0

    @pytest.mark.parametrize("names", [[], ["gain", "mv"], ["mv"]])
    def test_exactly_the_declared_names(
        self, context: StreamContext, buffers: CudaGraphBuffers, names: list[str]
    ) -> None:
        """G12: missing and undeclared names are listed."""
        with context.use(), pytest.raises(ContractError, match="missing.*undeclared"):
            buffers.copy_inputs(frame(), **{name: np.ones((4, 6, 1), np.float32) for name in names})

    @pytest.mark.parametrize(
        "layout", ["contiguous", "step", "flipped", "transposed", "column-major", "broadcast", "window", "read-only"]
    )
    def test_every_layout_gives_the_same_values(self, context: StreamContext, layout: str) -> None:
        """G12, C17, C21: strided, negative, stride-0, offset and read-only sources are copied by value."""
        values = np.arange(24, dtype=np.float32).reshape(4, 6)
        sources = {
            "contiguous": values,
            "step": np.repeat(values, 2, axis=1)[:, ::2],
            "flipped": values[::-1, ::-1].copy()[::-1, ::-1],
            "transposed": values.T.copy().T,
            "column-major": np.asfortranarray(values),
            "broadcast": np.broadcast_to(values[:1], (4, 6)),
            "window": np.pad(values, 3)[3:-3, 3:-3],
            "read-only": np.frombuffer(values.tobytes(), np.float32).reshape(4, 6),
        }
        with context.use():
            buffers = CudaGraphBuffers(frame(), frame(), params={"mv": np.zeros((4, 6), np.float32)})
            buffers.copy_inputs(frame(), mv=sources[layout])
        context.synchronize()
        np.testing.assert_array_equal(buffers.params["mv"], sources[layout])

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2), ()])
    def test_empty_and_scalar_parameters(self, context: StreamContext, shape: tuple[int, ...]) -> None:
        """C19: zero-size and zero-dimensional parameters are accepted and keep their shape."""
        with context.use():
            buffers = CudaGraphBuffers(frame(), frame(), params={"mv": np.zeros(shape, np.float32)})
            buffers.copy_inputs(frame(), mv=np.ones(shape, np.float32))
        context.synchronize()
        assert buffers.params["mv"].shape == shape
        assert (buffers.params["mv"] == 1).all()

    def test_sources(self, context: StreamContext, buffers: CudaGraphBuffers) -> None:
        """G13 (host): a frame, an array and any CPU DLPack producer; device memory is refused naming the input."""

        class Producer:
            def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
                self.array, self.device = array, device

            def __dlpack__(self, **options: Any) -> object:
                return self.array.__dlpack__(**options)

            def __dlpack_device__(self) -> tuple[int, int]:
                return self.device

        class Cuda:
            __cuda_array_interface__ = {"version": 3}  # noqa: RUF012

        gain = np.full((4, 6, 1), 2.0, np.float32)
        for source in (gain, HostFrame(data=gain, channels="Y", colorspace="sRGB", gamma="sRGB"), Producer(gain)):
            with context.use():
                buffers.copy_inputs(frame(), gain=source)
            context.synchronize()
            assert (buffers.params["gain"] == 2.0).all()
            buffers.params["gain"].fill(0)

        class Refusing(Producer):
            def __dlpack__(self, **options: Any) -> object:
                raise BufferError("not exportable")

        for refused, word in (
            (Producer(gain, (2, 0)), "another device"),
            (Cuda(), "CUDA"),
            (Refusing(gain), "not export"),
        ):
            with context.use(), pytest.raises(ContractError, match=f"'gain'.*{word}"):
                buffers.copy_inputs(frame(), gain=refused)

    def test_overlap(self, context: StreamContext, buffers: CudaGraphBuffers) -> None:
        """G14: a source that overlaps a fixed destination is refused; exactly the destination is a no-op."""
        source = buffers.input_frame
        source.data[...] = 3.0
        gain = buffers.params["gain"]
        with context.use():
            buffers.copy_inputs(source, gain=gain)
            with pytest.raises(ContractError, match="overlaps the fixed storage of 'gain'"):
                buffers.copy_inputs(source, gain=gain[::-1])
            into_input = source.data.reshape(-1)[:24].reshape(4, 6, 1)
            with pytest.raises(ContractError, match="overlaps the fixed storage of 'frame'"):
                buffers.copy_inputs(source, gain=into_input)
        context.synchronize()
        assert (source.data == 3.0).all()

    def test_sources_live_until_copied(self, context: StreamContext, buffers: CudaGraphBuffers, gate: Gate) -> None:
        """G12, C12: the caller may drop its frame at once."""
        source = np.full((4, 6, 1), 2.0, np.float32)
        ref = weakref.ref(source)
        gate.hold(context)
        with context.use():
            buffers.copy_inputs(frame(1.0), gain=source)
        del source
        gc.collect()
        assert ref() is not None
        gate.open()
        context.synchronize()
        assert ref() is None
        assert (buffers.params["gain"] == 2.0).all()

    def test_outputs_are_independent(
        self, context: StreamContext, buffers: CudaGraphBuffers, session: CudaGraphSession
    ) -> None:
        """G15, G16, G21, C11: kept results, views of them and exports never change, not by close either."""
        with context.use():
            kept = [request(session, buffers, "shift", number) for number in range(10)]
        views = [result.data[1:3] for result in kept]
        exports = [np.from_dlpack(result) for result in kept]
        context.synchronize()
        buffers.close()
        buffers.output_frame.data.fill(-1)
        for number, (result, view, export) in enumerate(zip(kept, views, exports, strict=True)):
            assert (result.data == number + 1).all()
            assert (view == number + 1).all()
            assert (export == number + 1).all()
            assert not np.shares_memory(result.data, buffers.output_frame.data)

    def test_output_metadata(self, context: StreamContext, buffers: CudaGraphBuffers) -> None:
        """G15: this request's metadata; malformed metadata is refused before a copy."""
        with context.use():
            result = buffers.copy_output(channels="RGB", colorspace="Rec.709", gamma="PQ", matrix="BT.709")
            assert isinstance(result, HostFrame)
            assert (result.colorspace, result.gamma, result.matrix) == ("Rec.709", "PQ", "BT.709")
            with pytest.raises(ContractError, match="channels"):
                buffers.copy_output(channels="RGBA", colorspace="sRGB", gamma="sRGB")

    def test_no_copies_inside_a_capture(self, context: StreamContext, buffers: CudaGraphBuffers) -> None:
        """G15: copies belong around the replay; inside an operation they are refused, and the capture survives."""

        def operation() -> None:
            context.stream.enqueue(int)
            if RUNTIME.is_capturing(context.stream):
                for call in (
                    lambda: buffers.copy_output(**METADATA),
                    lambda: buffers.copy_inputs(frame(), gain=np.ones((4, 6, 1), np.float32)),
                ):
                    with pytest.raises(CaptureError):
                        call()

        CudaGraphSession({"op": operation}, context=context).close()

    def test_close(self, context: StreamContext, buffers: CudaGraphBuffers, gate: Gate) -> None:
        """G16: idempotent, waits for nothing; later calls fail before any work."""
        gate.hold(context)
        with context.use():
            result = buffers.copy_output(**METADATA)
            buffers.close()
            buffers.close()
            for call in (
                lambda: buffers.copy_output(**METADATA),
                lambda: buffers.copy_inputs(frame(), gain=np.ones((4, 6, 1), np.float32)),
            ):
                with pytest.raises(ClosedError):
                    call()
        gate.open()
        context.synchronize()
        assert (result.data == 0).all()
        assert "closed" in repr(buffers)


def test_fixed_output_documentation() -> None:
    """G21: the docs say that a view of the fixed output is the module's own risk."""
    text = " ".join((CudaGraphSession.__doc__ or "").split())
    assert "The fixed output is never handed out by the library" in text
    assert "the module's own risk" in text
