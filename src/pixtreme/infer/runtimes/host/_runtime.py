"""The host runtime: CUDA's stream, event and capture semantics on worker threads and NumPy arrays.

One worker thread a stream takes its items in order. `HostStream.enqueue` is the "kernel launch"; tasks that release
the GIL (ONNX Runtime, most of NumPy) overlap across streams. A task that raises faults its stream: later tasks are
skipped, later events complete as faulted, and a stream that waits for one of them is faulted too (S30).

Not guaranteed: priorities (threads have none here), and any order between streams without an event.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from pixtreme.infer.frames import FrameLike, HostArray, HostFrame
from pixtreme.infer.runtimes._protocol import Notify, PrivateMemory, StreamKey
from pixtreme.infer.runtimes.host import _arrays, _guard
from pixtreme.infer.runtimes.host._capture import Capture, CaptureStatus, HostGraph, HostRuntimeError, Snapshot, Work
from pixtreme.infer.runtimes.host._worker import Record, Worker, check_caller, here

__all__ = ("HostEvent", "HostGraph", "HostRuntime", "HostRuntimeError", "HostStream")

_pointers = itertools.count(0x1000, 0x10)


class HostEvent:
    """A point in a host stream, as ``cupy.cuda.Event`` is one in a CUDA stream."""

    __slots__ = ("__weakref__", "point", "timing")

    def __init__(self, *, timing: bool) -> None:
        self.timing = timing
        self.point: Record | Snapshot | None = None  # the last record; a snapshot where that was in a capture


class HostStream:
    """A queue of host tasks, run in order by a thread of its own.

    Module code meets it as ``context.stream``.
    """

    def __init__(self) -> None:
        self.ptr = next(_pointers)
        self.worker = Worker()
        self.capture: Capture | None = None
        self.destroyed = False
        weakref.finalize(self, self.worker.finish).atexit = False

    def enqueue(self, task: Callable[..., object], /, *args: Any) -> None:
        """Enqueue ``task(*args)``: the host runtime's kernel launch.

        Stream order
        ------------
        Runs after everything enqueued before, on the stream's thread. While the stream captures, the task is
        recorded into the graph instead.

        Host synchronization
        --------------------
        None (with ``PIXTREME_INFER_LAUNCH_BLOCKING=1`` the task runs at once, in the caller).

        Lifetime
        --------
        Task and arguments are kept alive until it ran.
        """
        if not callable(task):
            raise TypeError(f"a host task must be callable, received {task!r}")
        self.check_usable()
        if any(type(one) is _guard.Guarded for one in args):
            task, args = _guard.reading, (task, *args)
        if self.capture is not None:
            self.capture.add(self, Work(task, args))
        else:
            self.worker.push(partial(self.worker.run, task, args))

    def synchronize(self) -> None:
        """Block until everything enqueued so far ran; raises the stream's fault.

        Raises
        ------
        HostRuntimeError
            The stream captures (the capture is invalidated), or this is one of its own tasks.
        """
        if self.capture is not None:
            self.capture.violate("synchronize of a capturing stream", status=900)
        event = RUNTIME.create_event()
        RUNTIME.record(event, self)
        RUNTIME.synchronize(event)

    def check_usable(self) -> None:
        """Raise where no verb may touch this stream."""
        if self.destroyed:
            raise HostRuntimeError(400, "the stream was destroyed")
        check_caller()

    def __repr__(self) -> str:
        return f"<HostStream {self.ptr:#x}>"


class _OwnMemory:
    """A NumPy array's memory is its own, so there is no pool to keep apart."""

    outside = 0

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()


class HostRuntime:
    """`Runtime` on the CPU."""

    device = "cpu"
    needs_staging = False
    xp = np

    def create_stream(self, *, priority: int) -> HostStream:
        return HostStream()

    def destroy_stream(self, stream: HostStream) -> None:
        if not stream.destroyed:
            stream.destroyed = True
            stream.worker.finish()

    def cancel_pending(self, stream: HostStream) -> None:
        stream.worker.cancelled = True

    def attach(self, stream: HostStream) -> None:
        """Nothing to do: a stream's worker is its own."""

    def detach(self, stream: HostStream) -> None:
        """Nothing to do."""

    def key(self, stream: HostStream) -> StreamKey:
        return StreamKey("cpu", stream.ptr, 0)  # pointers of host streams are never reused

    def is_stream(self, value: object) -> bool:
        return isinstance(value, HostStream)

    def is_event(self, value: object) -> bool:
        return isinstance(value, HostEvent)

    def stream_at(self, pointer: int) -> HostStream:
        raise HostRuntimeError(400, "host streams have no pointers that others know")

    def orders_itself_with_the_default_stream(self, stream: HostStream) -> bool:
        return False

    def current(self) -> HostStream | None:
        return getattr(here, "stream", None)

    def here(self) -> HostRuntime:
        return self

    def enqueue(self, stream: HostStream, task: Callable[[], object]) -> None:
        stream.enqueue(task)

    def activate(self, stream: HostStream) -> Callable[[], None]:
        found = self.current()
        here.stream = stream

        def put_back() -> None:
            here.stream = found

        return put_back

    def create_event(self, *, timing: bool = False) -> HostEvent:
        return HostEvent(timing=timing)

    def record(self, event: HostEvent, stream: HostStream) -> None:
        stream.check_usable()
        if stream.capture is not None:
            event.point = stream.capture.snapshot(stream)
            return
        worker = stream.worker
        record = Record(worker)
        worker.push(record.finish)
        event.point = record

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        stream.check_usable()
        point, capture = event.point, stream.capture
        if isinstance(point, Snapshot):
            if capture is not None and capture is not point.capture:
                capture.violate("a wait that would merge two captures", status=902)
            if point.capture.status is CaptureStatus.ENDED:
                raise HostRuntimeError(907, "the event was last recorded in a capture that has ended")
            point.capture.join(stream, point.frontier)
        elif point is not None and capture is not None:
            capture.violate("a wait for work outside the capture", status=905)
        elif point is not None and point.worker is not stream.worker:
            stream.worker.push(partial(stream.worker.follow, point))

    def query(self, event: HostEvent) -> bool:
        point = _eager(event, "query of an event recorded in a capture")
        return point is None or (point.done and _sound(point))

    def synchronize(self, event: HostEvent) -> None:
        point = _eager(event, "synchronize of an event recorded in a capture")
        if point is not None:
            point.block()
            _sound(point)

    def elapsed_ms(self, start: HostEvent, end: HostEvent) -> float:
        if not (start.timing and end.timing):
            raise HostRuntimeError(400, "both events must have been made with timing=True")
        first, last = (_eager(event, "timing of an event recorded in a capture") for event in (start, end))
        if first is None or last is None:
            raise HostRuntimeError(400, "an event was never recorded")
        if not (first.done and last.done):
            raise HostRuntimeError(600, "an event is not complete yet")
        return (last.time_ns - first.time_ns) / 1e6

    def report(self, event: HostEvent, stream: HostStream, notify: Notify) -> None:
        record = event.point
        assert isinstance(record, Record)  # recorded just before, and not in a capture
        if not record.listen(notify):  # complete already: an item of its own keeps the report on the worker, in order
            stream.worker.push(lambda: notify(record.fault))

    def ensure_reporting(self, stream: HostStream) -> None:
        """Nothing to do: the worker reports by itself."""

    def reports_here(self, stream: HostStream) -> bool:
        return getattr(here, "worker", None) is stream.worker

    def hold(self, stream: HostStream) -> Callable[[], object]:
        gate = threading.Event()
        stream.enqueue(gate.wait)
        return gate.set

    def begin_capture(self, stream: HostStream) -> None:
        stream.check_usable()
        if stream.capture is not None:
            stream.capture.violate("begin of a capture on a capturing stream", status=900)
        Capture(stream)

    def end_capture(self, stream: HostStream) -> HostGraph:
        if stream.capture is None:
            raise HostRuntimeError(400, "the stream is not capturing")
        return stream.capture.end(stream)

    def is_capturing(self, stream: HostStream) -> bool:
        return stream.capture is not None

    def node_count(self, graph: HostGraph) -> int:
        return len(graph.nodes)

    def launch(self, graph: HostGraph, stream: HostStream) -> None:
        if stream.capture is not None:
            stream.capture.violate("launch of a graph into a capture", status=900)
        stream.enqueue(graph.run)

    def private_memory(self) -> PrivateMemory:
        return _OwnMemory()

    def guarded(self, value: Any, event: HostEvent, label: object) -> Any:
        assert isinstance(event.point, Record)  # a capture's work is not pending: it runs when its graph is launched
        return _guard.guarded(value, event.point, label)

    def bare(self, value: Any) -> Any:
        return _guard.bare(value)

    def import_array(self, source: object, *, name: str) -> HostArray:
        return _arrays.import_array(source, name=name)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
        return np.empty(shape, dtype)

    def copy(self, target: HostArray, source: HostArray, stream: HostStream) -> None:
        stream.enqueue(_arrays.copy, target, source)

    def address(self, array: HostArray) -> int:
        return array.ctypes.data

    def overlaps(self, first: HostArray, second: HostArray) -> bool:
        return _arrays.overlaps(first, second)

    def same_storage(self, first: HostArray, second: HostArray) -> bool:
        return _arrays.same_storage(first, second)

    def staging_buffer(self, size: int) -> HostArray:
        return np.empty(size, np.uint8)

    def copy_from_host(self, target: HostArray, source: HostArray, stream: HostStream) -> None:
        self.copy(target, source, stream)

    def copy_to_host(self, target: HostArray, source: HostArray, stream: HostStream) -> None:
        self.copy(target, source, stream)

    def to_host(self, array: HostArray) -> HostArray:
        return array.copy()

    def from_host(self, target: HostArray, values: HostArray) -> None:
        _arrays.copy(target, values)

    def make_frame(
        self, data: HostArray, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None
    ) -> FrameLike:
        return HostFrame(data=data, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)


def _eager(event: HostEvent, reason: str) -> Record | None:
    """Return the event's record, None where it has none; one made in a capture may not be looked at."""
    check_caller()
    if isinstance(event.point, Snapshot):
        event.point.capture.violate(reason, status=907)
    return event.point


def _sound(record: Record) -> bool:
    if record.fault is not None:
        raise HostRuntimeError(719, f"a task of the stream failed: {record.fault!r}") from record.fault
    return True


RUNTIME = HostRuntime()
"""The one host device."""
