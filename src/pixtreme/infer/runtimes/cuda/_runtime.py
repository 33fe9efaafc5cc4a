"""The CUDA runtime: `Runtime` over ``cupy.cuda``, one object for each device.

A thin adapter with no logic of its own: who waits for what is in `_completion_thread`, arrays are in `_arrays`. Nothing
here touches a device before a context is opened on one. Device status is always the raw code of a call, never CuPy's
``Event.done``, which is False for ever on a faulted device (S24a).
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import cupy
import numpy as np
from cupy.cuda.runtime import CUDARuntimeError
from pixtreme.core import Frame

from pixtreme.infer.frames import FrameLike
from pixtreme.infer.runtimes._protocol import (
    NativeArray,
    NativeEvent,
    NativeGraph,
    NativeStream,
    Notify,
    PrivateMemory,
    StreamKey,
    enqueueing_blocks,
)
from pixtreme.infer.runtimes.cuda import _arrays, _driver, _memory
from pixtreme.infer.runtimes.cuda._completion_thread import CompletionThread, Outcome, Verbs

__all__ = ("CudaRuntime", "device_count", "runtime_of")

_NOT_READY = 600
_NO_DEVICE = 100
_OLD_DRIVER = 35
# Some other thread captures in global mode, or did when the call was made: no fault, ask again (S24).
_CAPTURE_IN_PROGRESS = (900, 901, 906)
_RETRY_S = 0.001

_generations = itertools.count(1)
_pause = threading.Event()  # never set: waiting for it is a pause that releases the GIL


def device_count() -> int:
    """Return the number of usable CUDA devices; 0 where there is no driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except CUDARuntimeError:
        return 0


def why_unusable() -> str:
    """Return why there is no usable device, and the remedy."""
    try:
        if cupy.cuda.runtime.getDeviceCount():
            return "nothing is wrong"
        status = _NO_DEVICE
        text = "cudaErrorNoDevice"
    except CUDARuntimeError as error:
        status, text = error.status, str(error)
    if not _driver.is_installed():
        return "no NVIDIA driver is installed (libcuda cannot be loaded); install it, or pass the GPU to the container"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if status == _NO_DEVICE and visible is not None:
        return f"no device is visible with CUDA_VISIBLE_DEVICES={visible!r}; unset it, or name a device of this machine"
    if status == _NO_DEVICE:
        return f"the driver finds no device ({text}); look at nvidia-smi"
    if status == _OLD_DRIVER:
        version = cupy.cuda.runtime.runtimeGetVersion()
        return (
            f"the driver is too old for CUDA {version // 1000}.{version % 1000 // 10}, which CuPy {cupy.__version__} "
            "is built for; update the driver, or install the CuPy of an older CUDA"
        )
    return f"{text}; look at nvidia-smi"


def pci_bus_id(ordinal: int) -> str:
    """Return the PCI address of a device, such as ``"0000:01:00.0"``."""
    return str(cupy.cuda.runtime.deviceGetPCIBusId(ordinal))


@cache
def runtime_of(ordinal: int) -> CudaRuntime:
    """Return the runtime of one device; there is one for each."""
    return CudaRuntime(ordinal)


def current_runtime() -> CudaRuntime | None:
    """Return the runtime of the current device where a stream was made current on it; None where none was."""
    try:
        ordinal = int(cupy.cuda.runtime.getDevice())
    except CUDARuntimeError:
        return None
    return runtime_of(ordinal) if cupy.cuda.get_current_stream(ordinal).ptr else None


class _Pointer:
    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def native_stream(stream: Any) -> tuple[CudaRuntime, NativeStream]:
    """Return the runtime of a CuPy stream, or of an object with ``__cuda_stream__``, and the CuPy stream for it."""
    if not isinstance(stream, cupy.cuda.Stream | cupy.cuda.ExternalStream):
        if hasattr(cupy.cuda.Stream, "from_external"):
            stream = cupy.cuda.Stream.from_external(stream)  # CuPy 14
        else:
            external = cupy.cuda.ExternalStream(stream.__cuda_stream__()[1])
            external.owner = stream  # kept alive
            stream = external
    ordinal = stream.device_id if stream.device_id >= 0 else int(cupy.cuda.runtime.getDevice())
    return runtime_of(ordinal), stream


class CudaRuntime:
    """One CUDA device."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.device = f"cuda:{ordinal}"
        self._lock = threading.RLock()
        self._threads: dict[StreamKey, CompletionThread] = {}
        self._generations: dict[int, int] = {}  # of streams made here, by pointer
        self._blocking = enqueueing_blocks()

    # -- streams

    def create_stream(self, *, priority: int) -> NativeStream:
        with self._device():
            stream = cupy.cuda.Stream(non_blocking=True, priority=priority)
        with self._lock:
            generation = self._generations[stream.ptr] = next(_generations)
        weakref.finalize(stream, self._stream_is_gone, stream.ptr, generation).atexit = False
        return stream

    def destroy_stream(self, stream: NativeStream) -> None:
        """CuPy destroys a stream with its last reference; work on it still runs to its end."""

    def cancel_pending(self, stream: NativeStream) -> None:
        """What a device was given, it does."""

    def attach(self, stream: NativeStream) -> None:
        self._thread_of(stream).attach()

    def detach(self, stream: NativeStream) -> None:
        self._thread_of(stream).detach()

    def key(self, stream: NativeStream) -> StreamKey:
        return StreamKey(self.device, stream.ptr, self._generations.get(stream.ptr, 0))

    def is_stream(self, value: object) -> bool:
        kinds = (cupy.cuda.Stream, cupy.cuda.ExternalStream)
        return isinstance(value, kinds) and value.device_id in (-1, self.ordinal)

    def is_event(self, value: object) -> bool:
        return isinstance(value, cupy.cuda.Event)

    def stream_at(self, pointer: int) -> NativeStream:
        return native_stream(_Pointer(pointer))[1]

    def orders_itself_with_the_default_stream(self, stream: NativeStream) -> bool:
        return not stream.is_non_blocking

    def current(self) -> NativeStream | None:
        if cupy.cuda.runtime.getDevice() != self.ordinal:
            return None
        return cupy.cuda.get_current_stream(self.ordinal)

    def here(self) -> CudaRuntime:
        return runtime_of(int(cupy.cuda.runtime.getDevice()))

    def enqueue(self, stream: NativeStream, task: Callable[[], object]) -> None:
        task()

    def activate(self, stream: NativeStream) -> Callable[[], None]:
        device = cupy.cuda.runtime.getDevice()
        cupy.cuda.runtime.setDevice(self.ordinal)
        found = cupy.cuda.get_current_stream()
        stream.use()

        def put_back() -> None:
            cupy.cuda.runtime.setDevice(self.ordinal)
            found.use()
            cupy.cuda.runtime.setDevice(device)

        return put_back

    # -- events

    def create_event(self, *, timing: bool = False) -> NativeEvent:
        with self._device():
            return cupy.cuda.Event(block=True, disable_timing=not timing)

    def record(self, event: NativeEvent, stream: NativeStream) -> None:
        event.record(stream)

    def wait(self, stream: NativeStream, event: NativeEvent) -> None:
        stream.wait_event(event)

    def query(self, event: NativeEvent) -> bool:
        status = cupy.cuda.runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise CUDARuntimeError(status)
        return bool(status == 0)

    def synchronize(self, event: NativeEvent) -> None:
        cupy.cuda.runtime.eventSynchronize(event.ptr)

    def elapsed_ms(self, start: NativeEvent, end: NativeEvent) -> float:
        return float(cupy.cuda.get_elapsed_time(start, end))

    # -- completion

    def report(self, event: NativeEvent, stream: NativeStream, notify: Notify) -> None:
        self._thread_of(stream).add(event, notify)

    def ensure_reporting(self, stream: NativeStream) -> None:
        self._thread_of(stream).ensure_reporting()

    def reports_here(self, stream: NativeStream) -> bool:
        return self._thread_of(stream).reports_here()

    def hold(self, stream: NativeStream) -> Callable[[], object]:
        flag = cupy.cuda.alloc_pinned_memory(4)
        value = np.frombuffer(flag, np.int32, 1)
        put_back = self.activate(stream)
        try:
            kernel = _hold_kernel(self.ordinal)
            value[0] = 0
            kernel((1,), (1,), (np.uint64(flag.ptr),))
        finally:
            put_back()
        event = self.create_event()
        self.record(event, stream)
        self.report(event, stream, partial(_let_go, flag))  # the kernel reads it until then
        return partial(value.__setitem__, 0, 1)

    # -- capture

    def begin_capture(self, stream: NativeStream) -> None:
        stream.begin_capture()  # relaxed: what other threads do stays their affair

    def end_capture(self, stream: NativeStream) -> NativeGraph:
        return stream.end_capture()

    def is_capturing(self, stream: NativeStream) -> bool:
        try:
            return bool(stream.is_capturing())
        except CUDARuntimeError:
            raise
        except RuntimeError:  # how CuPy says that an error has invalidated the capture, which is still to be ended
            return True

    def node_count(self, graph: NativeGraph) -> int:
        return _driver.node_count(graph.graph)

    def launch(self, graph: NativeGraph, stream: NativeStream) -> None:
        graph.launch(stream)

    def private_memory(self) -> PrivateMemory:
        return _memory.PrivatePool()

    # -- arrays

    needs_staging = True
    xp = cupy

    def guarded(self, value: Any, event: NativeEvent, label: object) -> Any:
        return value

    def bare(self, value: Any) -> Any:
        return value

    def import_array(self, source: object, *, name: str) -> NativeArray:
        with self._device():
            return _arrays.import_array(source, name=name, ordinal=self.ordinal)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NativeArray:
        with self._device():
            return cupy.empty(shape, dtype)

    def copy(self, target: NativeArray, source: NativeArray, stream: NativeStream) -> None:
        put_back = self.activate(stream)
        try:
            cupy.copyto(target, source, casting="no")
        finally:
            put_back()

    def address(self, array: NativeArray) -> int:
        return int(array.data.ptr)

    def overlaps(self, first: NativeArray, second: NativeArray) -> bool:
        return _arrays.overlaps(first, second)

    def same_storage(self, first: NativeArray, second: NativeArray) -> bool:
        return _arrays.same_storage(first, second)

    def staging_buffer(self, size: int) -> Any:
        with self._device():
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)

    def copy_from_host(self, target: NativeArray, source: Any, stream: NativeStream) -> None:
        with self._device():
            target.set(source, stream)

    def copy_to_host(self, target: Any, source: NativeArray, stream: NativeStream) -> None:
        put_back = self.activate(stream)  # a strided source is packed first, on the same stream
        try:
            source.get(stream, out=target, blocking=False)
        finally:
            put_back()

    def to_host(self, array: NativeArray) -> Any:
        with self._device():
            return array.get()

    def from_host(self, target: NativeArray, values: Any) -> None:
        with self._device():
            stream = cupy.cuda.get_current_stream()
            target.set(np.ascontiguousarray(values), stream)
            stream.synchronize()  # a copy from pageable memory returns once the values are staged

    def make_frame(
        self, data: NativeArray, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None
    ) -> FrameLike:
        frame: FrameLike = Frame(data=data, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
        return frame

    # -- ours

    def _device(self) -> AbstractContextManager[object]:
        device: AbstractContextManager[object] = cupy.cuda.Device(self.ordinal)
        return device

    def _thread_of(self, stream: NativeStream) -> CompletionThread:
        key = self.key(stream)
        thread = self._threads.get(key)
        if thread is None:
            with self._lock:
                verbs = Verbs(self._enter_thread, _wait, _look)
                thread = self._threads.setdefault(key, CompletionThread(verbs, blocking=self._blocking))
        return thread

    def _enter_thread(self) -> None:
        cupy.cuda.runtime.setDevice(self.ordinal)
        _driver.relax_this_thread()

    def _stream_is_gone(self, pointer: int, generation: int) -> None:
        """Forget what was kept by identity: the driver may give the pointer to another stream, or has (S33)."""
        with self._lock:
            if self._generations.get(pointer) == generation:
                del self._generations[pointer]
            self._threads.pop(StreamKey(self.device, pointer, generation), None)


def _let_go(flag: object, fault: BaseException | None) -> None:
    """Take part in a report only to hold ``flag`` until it comes."""


@cache
def _hold_kernel(ordinal: int) -> Any:
    """Return a kernel that spins until a flag in pinned memory is set; compiled and loaded by running it once."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void hold(unsigned long long flag) { while (*(volatile int*)flag == 0) {} }', "hold"
    )
    flag = cupy.cuda.alloc_pinned_memory(4)
    np.frombuffer(flag, np.int32, 1)[0] = 1
    kernel((1,), (1,), (np.uint64(flag.ptr),))
    cupy.cuda.get_current_stream().synchronize()
    return kernel


def _wait(event: NativeEvent) -> Outcome:
    while True:
        try:
            cupy.cuda.runtime.eventSynchronize(event.ptr)
        except CUDARuntimeError as error:
            if error.status not in _CAPTURE_IN_PROGRESS:
                return Outcome(True, error)
            _pause.wait(_RETRY_S)
        else:
            return Outcome(True)


def _look(event: NativeEvent) -> Outcome:
    with _driver.relaxed():
        status = cupy.cuda.runtime.eventQuery(event.ptr)
    if status == _NOT_READY or status in _CAPTURE_IN_PROGRESS:
        return Outcome(False)
    return Outcome(True, None if status == 0 else CUDARuntimeError(status))
