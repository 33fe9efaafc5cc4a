"""Graph sessions, buffers and array import on the CUDA runtime, under contexts and under plain CuPy streams."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import types
from typing import Any

import cupy
import numpy as np
import pytest
from helpers import WAIT_S, Boom, fail
from pixtreme.core import Frame

import pixtreme.infer
from pixtreme.infer.cuda_graph import CudaGraphBuffers, CudaGraphSession
from pixtreme.infer.errors import CaptureError, ClosedError, ContextError, ContractError
from pixtreme.infer.streams import StreamContext

pytestmark = pytest.mark.cuda

SHAPE = (4, 6, 3)
HOST = np.ones(4)
METADATA: dict[str, Any] = {"channels": ("R", "G", "B"), "colorspace": "sRGB", "gamma": "sRGB"}


def gpu_frame(value: float = 0.0, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Frame:
    return Frame(data=cupy.full(shape, value, dtype), **METADATA)


class Doubler:
    """A module as published ones are: buffers, a session and the request path, on whatever stream is current."""

    def __init__(self, **options: Any) -> None:
        self.buffers = CudaGraphBuffers(gpu_frame(), gpu_frame(), params={"gain": cupy.ones(1, cupy.float32)})
        self.session = CudaGraphSession({"run": self.enqueue}, resources=(self.buffers,), **options)

    def enqueue(self) -> None:
        temporary = self.buffers.input_frame.data * 2
        cupy.copyto(self.buffers.output_frame.data, temporary * self.buffers.params["gain"])

    def __call__(self, frame: Any, gain: Any) -> Any:
        self.session.check_context()
        self.buffers.copy_inputs(frame, gain=gain)
        self.session.replay("run")
        return self.buffers.copy_output(**METADATA)

    def close(self) -> None:
        self.session.close()
        self.buffers.close()


def test_a_plain_cupy_stream() -> None:
    """G1, G7, G12, G15: the request path of published modules, with no context anywhere."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        module = Doubler()
        assert module.session.context is None
        results = [module(gpu_frame(value), cupy.full(1, 10, cupy.float32)) for value in (1, 2, 3)]
        with pytest.raises(ContextError, match="belongs to a context"):
            module.session.launch("run")
    with pytest.raises(ContextError, match="required is"):
        module.session.check_context()
    stream.synchronize()
    assert [float(result.data.get().max()) for result in results] == [20, 40, 60]
    with stream:
        module.close()
        with pytest.raises(ClosedError):
            module(gpu_frame(), cupy.ones(1, cupy.float32))


def test_in_a_context(context: StreamContext, other: StreamContext) -> None:
    """G1, G6, G7, G20: bound to the context, verified at open; another stream is refused with both named."""
    with context.use():
        module = Doubler(verify=True)
        handle = context.record(module(gpu_frame(4), cupy.full(1, 3, cupy.float32)))
        launched = module.session.launch("run")
    assert module.session.context is context
    assert handle.result(WAIT_S).data.get().max() == 24
    assert launched.result(WAIT_S) is None
    with other.use(), pytest.raises(ContextError, match="required is"):
        module.session.replay("run")
    with context.use(), pytest.raises(ContractError, match=r"one of \('run',\)"):
        module.session.replay("walk")
    module.close()


def test_names_threads_and_close(context: StreamContext) -> None:
    """G9, G10, G16, G21: what a session knows; another thread; idempotent closes; outputs are the caller's own."""
    with context.use():
        module = Doubler()
    assert (module.session.names, module.session.closed, module.session.context) == (("run",), False, context)
    results: list[Any] = []

    def request() -> None:
        with context.use():
            results.append(context.record(module(gpu_frame(1), cupy.ones(1, cupy.float32))))

    for _ in range(2):
        thread = threading.Thread(target=request)
        thread.start()
        thread.join(WAIT_S)
    first, second = (handle.result(WAIT_S).data for handle in results)
    fixed = module.buffers.output_frame.data.data.ptr
    assert len({first.data.ptr, second.data.ptr, fixed}) == 3
    second.fill(9)
    cupy.cuda.get_current_stream().synchronize()
    assert first.get().max() == 2
    with context.use():
        for _ in range(2):
            module.close()
        with pytest.raises(ClosedError):
            module.buffers.copy_output(**METADATA)
        with pytest.raises(ClosedError):
            module.buffers.copy_inputs(gpu_frame(), gain=cupy.ones(1, cupy.float32))
    assert module.session.closed
    assert first.get().max() == 2


def test_default_streams_are_refused() -> None:
    """G2: before any operation runs."""
    ran: list[int] = []
    with pytest.raises(ContextError):
        CudaGraphSession({"run": lambda: ran.append(1)})
    with cupy.cuda.Stream(ptds=True), pytest.raises(ContextError, match="default stream 2"):
        CudaGraphSession({"run": lambda: ran.append(1)})
    assert ran == []


def test_work_that_cannot_be_captured(context: StreamContext, other: StreamContext) -> None:
    """G3, G4, G5: nothing recorded, a synchronisation, an exception: the stream is out of capture and usable."""
    array = cupy.ones(4)

    def unwanted() -> None:
        raise AssertionError("after_prepare ran though an operation failed")

    def elsewhere() -> None:
        with other.use():
            array.fill(2)

    operations: list[tuple[Any, type[Exception], str]] = [
        (lambda: None, CaptureError, "recorded nothing"),
        (elsewhere, CaptureError, "recorded nothing"),
        (context.stream.synchronize, cupy.cuda.runtime.CUDARuntimeError, "capturing"),
        (array.get, Exception, "."),
        (fail, Boom, "."),
    ]
    for operation, kind, text in operations:
        with pytest.raises(kind, match=text) as raised, context.use():
            CudaGraphSession({"good": lambda: array.fill(1), "bad": operation}, after_prepare=unwanted)
        assert "while preparing operation 'bad' of a CudaGraphSession" in raised.value.__notes__
        assert not context.stream.is_capturing()
        assert context.submit(lambda: array + 1).result(WAIT_S) is not None
    with context.use():
        Doubler().close()


def test_everything_is_released(context: StreamContext, emulator: Any) -> None:
    """G4, G8: graphs and storage go with close, once the work is complete; close itself does not wait."""
    gc.collect()
    graphs = emulator.live(2), emulator.live(3)
    with context.use():
        module = Doubler()
    assert (emulator.live(2), emulator.live(3)) == (graphs[0] + 1, graphs[1] + 1)
    emulator.hold(context.stream)
    with context.use():
        result = context.record(module(gpu_frame(2), cupy.ones(1, cupy.float32)))
        module.close()
    del module
    gc.collect()
    assert (emulator.live(2), emulator.live(3)) == (graphs[0] + 1, graphs[1] + 1)
    emulator.release()
    assert result.result(WAIT_S).data.get().max() == 4
    context.synchronize()
    gc.collect()
    assert (emulator.live(2), emulator.live(3)) == graphs


@pytest.mark.parametrize("warm", [False, True])
def test_temporaries_are_the_sessions_own(context: StreamContext, warm: bool) -> None:
    """G18, C07: memory an operation allocates while captured is not given to strangers under a replay."""
    with context.use():
        if warm:
            del_me = [cupy.empty(SHAPE, cupy.float32) for _ in range(8)]
            del del_me
        module = Doubler()
        strangers = [cupy.full(SHAPE, 7, cupy.float32) for _ in range(32)]
        result = context.record(module(gpu_frame(5), cupy.ones(1, cupy.float32)))
        assert result.result(WAIT_S).data.get().max() == 10
        assert all((stranger.get() == 7).all() for stranger in strangers)
    module.close()


def test_memory_of_other_pools_is_noticed(context: StreamContext) -> None:
    """G18: an operation that allocates around the session's pool is named; the stream stays usable."""
    pool = cupy.cuda.MemoryPool()

    def operation() -> None:
        with cupy.cuda.using_allocator(pool.malloc):
            cupy.copyto(target, source * 2)

    source, target = cupy.ones(4), cupy.zeros(4)
    with context.use(), pytest.raises(CaptureError, match="operation 'bad' made 2 allocations from another pool"):
        CudaGraphSession({"good": lambda: cupy.copyto(target, source * 2), "bad": operation})
    assert context.submit(lambda: source + 1).result(WAIT_S).get()[0] == 2


def test_a_blocking_stream_is_not_captured() -> None:
    """S35: an adopted blocking stream is refused with the reason; a plain one is the published modules' affair."""
    stream = cupy.cuda.Stream()
    source, target = cupy.ones(4), cupy.zeros(4)
    stream.synchronize()
    with StreamContext.adopt(stream) as adopted:
        with pytest.raises(ContextError, match="adopted a blocking stream"):
            CudaGraphSession({"run": lambda: cupy.copyto(target, source)}, context=adopted)
        assert adopted.submit(lambda: source + 1).result(WAIT_S).get()[0] == 2
    with stream:
        session = CudaGraphSession({"run": lambda: cupy.copyto(target, source)})
        session.replay("run")
        session.close()
    stream.synchronize()
    assert target.get()[0] == 1


def test_after_a_failed_capture(context: StreamContext) -> None:
    """S35: the backend's pending error is consumed: the next unrelated call is not blamed."""
    with pytest.raises(Exception, match="capturing"), context.use():
        CudaGraphSession({"run": context.stream.synchronize})
    assert cupy.cuda.runtime.streamQuery(context.stream.ptr) in (0, 600)  # complete, or not yet: no error of another's
    cupy.cuda.Stream(non_blocking=True).synchronize()
    assert cupy.ones(3).sum().get() == 3


def test_a_release_during_a_capture_waits(context: StreamContext) -> None:
    """G19, S34: closing and dropping one session while another captures leaves the capture alone."""
    with context.use():
        closed, dropped = Doubler(), Doubler()

        def operation() -> None:
            nonlocal dropped
            closed.session.close()
            dropped = None  # type: ignore[assignment]
            gc.collect()
            with pytest.raises(ClosedError):
                closed.session.replay("run")
            cupy.copyto(target, source)

        source, target = cupy.ones(4), cupy.zeros(4)
        session = CudaGraphSession({"run": operation})
        target.fill(0)
        session.replay("run")
        assert context.record(target).result(WAIT_S).get().tolist() == [1, 1, 1, 1]
    session.close()


class Interface:
    """A producer of the CUDA Array Interface."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | changes


def test_sources(context: StreamContext, emulator: Any) -> None:
    """G12, G13: strided CuPy arrays, frames, DLPack and CAI v3, whose stream field costs no wait."""
    busy = cupy.cuda.Stream(non_blocking=True)
    with context.use():
        module = Doubler()
        gain = cupy.full(1, 1, cupy.float32)
        strided = Frame(data=cupy.full((8, 6, 3), 3, cupy.float32)[::2].copy(), **METADATA)
        emulator.hold(busy)
        sources = [
            gain,
            Interface(gain, stream=busy.ptr),
            Interface(gain, stream=1),
            Interface(gain, strides=(4,)),
            cupy.full(4, 1, cupy.float32)[2:3],
        ]
        handles = [context.record(module(strided, source)) for source in sources]
    assert [float(handle.result(WAIT_S).data.get().max()) for handle in handles] == [6.0] * len(sources)
    module.close()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: np.ones(1, np.float32), "host memory|not a CUDA device's"),
        (lambda: [1.0], "no array"),
        (lambda: None, "no array"),
        (lambda: cupy.ones(2, cupy.float32), "shape"),
        (lambda: cupy.ones(1, cupy.float64), "dtype"),
        (lambda: Interface(cupy.ones(1, cupy.float32), version=2), "version 2"),
        (lambda: Interface(cupy.ones(1, cupy.float32), mask=cupy.ones(1)), "a mask"),
        (lambda: Interface(cupy.ones(1, cupy.float32), typestr=">f4"), "native order"),
        (lambda: Interface(cupy.ones(1, cupy.float32), typestr="?nonsense"), "typestr"),
        (lambda: Interface(cupy.ones(1, cupy.float32), data=(0, False)), "a device pointer"),
        (
            lambda: Interface(cupy.ones(1, cupy.float32), data=(np.ones(1).ctypes.data, False)),
            "host memory|memory of a",
        ),
        (lambda: cupy.ones(1, cupy.complex64), "plain numbers"),
    ],
)
def test_bad_sources(context: StreamContext, make: Any, text: str) -> None:
    """G12, G13: refused by name before any copy."""
    with context.use():
        module = Doubler()
        fixed = module.buffers.params["gain"]
        fixed.fill(9)
        with pytest.raises(ContractError, match=text) as raised:
            module.buffers.copy_inputs(gpu_frame(5), gain=make())
        assert "'gain'" in str(raised.value)
        assert context.record(fixed).result(WAIT_S).get().tolist() == [9]
        assert module.buffers.input_frame.data.get().max() == 0
    module.close()


def test_overlap(context: StreamContext) -> None:
    """G14: exactly the fixed storage is no copy, a part of it is refused."""
    with context.use():
        storage = cupy.zeros(8, cupy.float32)
        buffers = CudaGraphBuffers(gpu_frame(), gpu_frame(), params={"gain": storage[2:6]})
        buffers.copy_inputs(gpu_frame(), gain=storage[2:6])
        buffers.copy_inputs(gpu_frame(), gain=cupy.ones(8, cupy.float32)[4:])
        with pytest.raises(ContractError, match="overlaps"):
            buffers.copy_inputs(gpu_frame(), gain=storage[3:7])
        with pytest.raises(ContractError, match="overlaps"):
            CudaGraphBuffers(gpu_frame(), gpu_frame(), params={"a": storage[:5], "b": storage[4:]})


def test_bad_frames(context: StreamContext) -> None:
    """G11, G12, G15: a host frame for a CUDA buffer, another size, bad metadata."""
    from helpers import frame as host_frame

    with context.use():
        module = Doubler()
        for bad in (host_frame(), gpu_frame(shape=(4, 5, 3)), gpu_frame(dtype="uint8"), cupy.zeros(SHAPE)):
            with pytest.raises(ContractError):
                module(bad, cupy.ones(1, cupy.float32))
        with pytest.raises(Exception, match="channels|Channel"):
            module.buffers.copy_output(channels=("R",), colorspace="sRGB", gamma="sRGB")
    module.close()


class Execution:
    """In place of one TensorRT execution of CDA-VSR: reads and writes the same device addresses on the stream given."""

    def __init__(self, route: str, size: tuple[int, int], scale: int, channels: int) -> None:
        height, width = size
        self.route, self.scale = route, scale
        self.shapes = {
            "frame": (1, 3, height, width),
            "mv": (1, 2, height, width),
            "residual": (1, 1, height, width),
            "state_in": (1, channels, height, width),
            "output": (1, 3, scale * height, scale * width),
            "state_out": (1, channels, height, width),
        }

    def enqueue(self, addresses: dict[str, int], *, stream: int) -> None:
        assert cupy.cuda.get_current_stream().ptr == stream
        arrays = {}
        for name, shape in self.shapes.items():
            size = int(np.prod(shape)) * 4
            memory = cupy.cuda.UnownedMemory(addresses[name], size, self)
            arrays[name] = cupy.ndarray(shape, cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
        seen = arrays["frame"] + arrays["residual"] * arrays["mv"][:, :1]
        if self.route == "P":
            seen = seen + arrays["state_in"][:, :3] * 0.5
        arrays["output"][...] = seen.repeat(self.scale, 2).repeat(self.scale, 3)
        arrays["state_out"].fill(0)
        arrays["state_out"][:, :3] = seen

    def close(self) -> None:
        pass


@pytest.mark.skipif(
    pixtreme.infer._dispatch.architectures()[1].version is None, reason="pixtreme-infer-cda-vsr is not installed"
)
def test_the_published_temporal_module(context: StreamContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1, G17, C8: pixtreme-infer-cda-vsr's own graph instance answers a sequence as its normal instance does."""
    tensoracle = types.ModuleType("tensoracle")
    tensoracle.EngineExecution = Execution  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensoracle", tensoracle)
    names = ("_factory", "_graph", "_model", "_runtime")
    _factory, _graph, _model, _runtime = (importlib.import_module(f"pixtreme.infer.cda_vsr.{name}") for name in names)

    size, scale = (4, 6), 2
    spec = _model.Configuration(size, "fp32", _model.Architecture(scale=scale))
    contract: Any = _factory._contract("artifact", spec)
    channels = spec.state_channels

    def executions(routes: dict[str, Any]) -> dict[str, Execution]:
        return {name: Execution(route, size, scale, channels) for name, route in routes.items()}

    generator = np.random.default_rng(0)
    requests = []
    for reset in (False, False, True, False, False, False, True, True, False):
        frame = Frame(data=cupy.asarray(generator.random((*size, 3), np.float32)), **METADATA)
        mv = cupy.asarray(generator.random((2, *size), np.float32))
        requests.append((frame, mv, cupy.asarray(generator.random((1, *size), np.float32)), reset))
    cupy.cuda.get_current_stream().synchronize()
    answers = []
    builders: list[Any] = [
        lambda: _runtime._Instance(contract, spec, executions({"I": "I", "P": "P"})),
        lambda: _graph._GraphInstance(contract, spec, executions({"I0": "I", "I1": "I", "P0": "P", "P1": "P"})),
    ]
    for build in builders:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            instance = build()
            results = [instance(frame, mv=mv, residual=res, reset=reset) for frame, mv, res, reset in requests]
            stream.synchronize()
            answers.append([result.data.get() for result in results])
            instance.close()
    for normal, graph in zip(*answers, strict=True):
        assert np.array_equal(normal, graph)
    assert not np.array_equal(answers[0][0], answers[0][1])
    with context.use():  # and bound to a context of ours
        instance = _graph._GraphInstance(contract, spec, executions({"I0": "I", "I1": "I", "P0": "P", "P1": "P"}))
    handles = [context.submit(instance, frame, mv=mv, residual=res, reset=reset) for frame, mv, res, reset in requests]
    for handle, normal in zip(handles, answers[0], strict=True):
        assert np.array_equal(handle.result(WAIT_S).data.get(), normal)
    with context.use():
        instance.close()
