"""The host runtime: CUDA's stream, event and capture semantics on worker threads and NumPy arrays.

One worker thread a stream takes its items in order. `HostStream.enqueue` is the "kernel launch"; tasks that release
the GIL (ONNX Runtime, most of NumPy) overlap across streams. A task that raises faults its stream: later tasks are
skipped, later events complete as faulted, and a stream that waits for one of them is faulted too (S30).

Invariants

1. Items of a stream run in the order they were pushed, on one thread, one at a time.
2. A record completes exactly once, and its outcome never changes afterwards.
3. A worker waits only for records that existed before the wait was pushed, so workers cannot wait in a circle.
4. A worker refers to its queue, never to the `HostStream`: a dropped stream drains and its thread ends.

Not guaranteed: priorities (threads have none here), and any order between streams without an event.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from pixtreme.infer.frames import FrameLike, HostArray, HostFrame
from pixtreme.infer.streams import host_arrays
from pixtreme.infer.streams.host_capture import Capture, CaptureStatus, HostGraph, HostRuntimeError, Snapshot, Work
from pixtreme.infer.streams.runtime import NOT_PERMITTED, StreamKey

__all__ = ("HostEvent", "HostGraph", "HostRuntime", "HostRuntimeError", "HostStream")

logger = logging.getLogger("pixtreme.infer")

Notify = Callable[[BaseException | None], object]

_EXIT_GRACE_S = 2.0
_pointers = itertools.count(0x1000, 0x10)
_here = threading.local()  # .worker: the worker whose items this thread runs; .stream: the current stream
_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
_exiting = False


class _Record:
    """One record of an event: a point in a stream."""

    __slots__ = ("_listeners", "done", "fault", "time_ns", "worker")

    def __init__(self, worker: _Worker) -> None:
        self.worker = worker
        self.done = False
        self.fault: BaseException | None = None
        self.time_ns = 0
        self._listeners: list[Notify] = []

    def finish(self) -> None:
        self.fault = fault = self.worker.fault
        self.time_ns = time.perf_counter_ns()
        self.done = True
        # No lock: this is the way to every waiter, and list operations are atomic. A listener is added before `done` is
        # looked at, and `done` is set before the list is emptied, so each is called here or told that it came too late.
        while self._listeners:
            notify = self._listeners.pop(0)
            try:
                notify(fault)
            except BaseException:  # a defect of ours: it must not cost the others their wake-up
                logger.exception("a completion could not be reported")

    def listen(self, notify: Notify) -> bool:
        """Call ``notify`` on the worker when the record completes; False if it has."""
        self._listeners.append(notify)
        if self.done:
            try:
                self._listeners.remove(notify)
            except ValueError:
                return True  # `finish` took it
            return False
        return True

    def block(self) -> None:
        """Block this thread until the record completes."""
        gate = threading.Lock()
        gate.acquire()
        if self.listen(lambda _: gate.release()):
            gate.acquire()


class _Worker:
    """The thread of one stream, started by the first item."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fault: BaseException | None = None
        self.in_task = False
        self.blocking = os.environ.get("PIXTREME_INFER_LAUNCH_BLOCKING", "") not in ("", "0")
        self.thread: threading.Thread | None = None
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._turn = threading.RLock()  # blocking mode: one item at a time, in the caller
        _workers.add(self)

    def push(self, item: Callable[[], object]) -> None:
        if self.blocking:
            with self._turn:
                outer = getattr(_here, "worker", None)
                _here.worker = self
                try:
                    item()
                finally:
                    _here.worker = outer
            return
        if self.thread is None:
            self._start()
        self._queue.put(item)

    def run(self, task: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run one task, unless an earlier one faulted the stream."""
        if self.fault is not None or _exiting:
            return
        self.in_task = True
        try:
            task(*args)
        except BaseException as error:  # whatever it is, it must not end the worker
            self.fault = error
            if self.blocking:
                raise
        finally:
            self.in_task = False

    def follow(self, record: _Record) -> None:
        """Wait for a record of another stream; its fault becomes ours, so that no work runs on missing data."""
        record.block()
        if self.fault is None:
            self.fault = record.fault

    def finish(self) -> None:
        """End the thread after what is queued. Safe in a finaliser: SimpleQueue.put is reentrant and never blocks."""
        self._queue.put(None)

    def _start(self) -> None:
        with self.lock:
            if self.thread is None:
                thread = threading.Thread(target=self._loop, name="pixtreme.infer host stream", daemon=True)
                thread.start()
                self.thread = thread

    def _loop(self) -> None:
        _here.worker = self
        get = self._queue.get
        while (item := get()) is not None:
            try:
                item()
            except BaseException:  # a defect of ours, or a MemoryError: never fatal to the stream
                logger.exception("an item of a host stream failed")
            del item  # nothing of a finished task may stay alive while the worker sleeps


@atexit.register
def _finish_workers() -> None:
    """Let running tasks end and skip the rest, so that no worker is inside native code when the interpreter goes."""
    global _exiting
    _exiting = True
    deadline = time.monotonic() + _EXIT_GRACE_S
    started = [(worker, worker.thread) for worker in list(_workers) if worker.thread is not None]
    for worker, _ in started:
        worker.finish()
    for _, thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))


class HostEvent:
    """A point in a host stream, as ``cupy.cuda.Event`` is one in a CUDA stream."""

    __slots__ = ("__weakref__", "point", "timing")

    def __init__(self, *, timing: bool) -> None:
        self.timing = timing
        self.point: _Record | Snapshot | None = None  # the last record; a snapshot where that was in a capture


class HostStream:
    """A queue of host tasks, run in order by a thread of its own.

    Module code meets it as ``context.stream``.
    """

    def __init__(self) -> None:
        self.ptr = next(_pointers)
        self.worker = _Worker()
        self.capture: Capture | None = None
        self.destroyed = False
        weakref.finalize(self, self.worker.finish).atexit = False

    def enqueue(self, task: Callable[..., object], /, *args: Any) -> None:
        """Enqueue ``task(*args)``: the host runtime's kernel launch.

        Stream order
            Runs after everything enqueued before, on the stream's thread. While the stream captures, the task is
            recorded into the graph instead.
        Host synchronization
            None (with ``PIXTREME_INFER_LAUNCH_BLOCKING=1`` the task runs at once, in the caller).
        Lifetime
            Task and arguments are kept alive until it ran.
        """
        if not callable(task):
            raise TypeError(f"a host task must be callable, received {task!r}")
        self.check_usable()
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
        _check_caller()

    def __repr__(self) -> str:
        return f"<HostStream {self.ptr:#x}>"


def _check_caller() -> None:
    # As a CUDA host function may not call CUDA: a task that waits for its own stream would never end.
    worker = getattr(_here, "worker", None)
    if worker is not None and worker.in_task:
        raise HostRuntimeError(NOT_PERMITTED, "a host task may not call the runtime")


class HostRuntime:
    """`runtime.Runtime` on the CPU."""

    device = "cpu"

    def create_stream(self, *, priority: int) -> HostStream:
        return HostStream()

    def destroy_stream(self, stream: HostStream) -> None:
        if not stream.destroyed:
            stream.destroyed = True
            stream.worker.finish()

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

    def current(self) -> HostStream | None:
        return getattr(_here, "stream", None)

    def activate(self, stream: HostStream) -> Callable[[], None]:
        found = self.current()
        _here.stream = stream

        def put_back() -> None:
            _here.stream = found

        return put_back

    def create_event(self, *, timing: bool = False) -> HostEvent:
        return HostEvent(timing=timing)

    def record(self, event: HostEvent, stream: HostStream) -> None:
        stream.check_usable()
        if stream.capture is not None:
            event.point = stream.capture.snapshot(stream)
            return
        worker = stream.worker
        record = _Record(worker)
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
        assert isinstance(record, _Record)  # recorded just before, and not in a capture
        if not record.listen(notify):  # complete already: an item of its own keeps the report on the worker, in order
            stream.worker.push(lambda: notify(record.fault))

    def demand(self, stream: HostStream) -> None:
        """Nothing to do: the worker reports by itself."""

    def reports_here(self, stream: HostStream) -> bool:
        return getattr(_here, "worker", None) is stream.worker

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

    def private_memory(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext  # a NumPy array's memory is its own

    def import_array(self, source: object, *, name: str) -> HostArray:
        return host_arrays.import_array(source, name=name)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
        return np.empty(shape, dtype)

    def copy(self, target: HostArray, source: HostArray, stream: HostStream) -> None:
        stream.enqueue(host_arrays.copy, target, source)

    def overlaps(self, first: HostArray, second: HostArray) -> bool:
        return host_arrays.overlaps(first, second)

    def same_storage(self, first: HostArray, second: HostArray) -> bool:
        return host_arrays.same_storage(first, second)

    def to_host(self, array: HostArray) -> HostArray:
        return array.copy()

    def from_host(self, target: HostArray, values: HostArray) -> None:
        host_arrays.copy(target, values)

    def make_frame(
        self, data: HostArray, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None
    ) -> FrameLike:
        return HostFrame(data=data, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)


def _eager(event: HostEvent, reason: str) -> _Record | None:
    """Return the event's record, None where it has none; one made in a capture may not be looked at."""
    _check_caller()
    if isinstance(event.point, Snapshot):
        event.point.capture.violate(reason, status=907)
    return event.point


def _sound(record: _Record) -> bool:
    if record.fault is not None:
        raise HostRuntimeError(719, f"a task of the stream failed: {record.fault!r}") from record.fault
    return True


RUNTIME = HostRuntime()
"""The one host device."""
