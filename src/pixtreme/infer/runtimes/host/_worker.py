"""The worker thread of one host stream, and records: points in a stream that complete (S27, S30).

Invariants

1. Items of a stream run in the order they were pushed, on one thread, one at a time.
2. A record completes exactly once, and its outcome never changes afterwards.
3. A worker waits only for records that existed before the wait was pushed, so workers cannot wait in a circle.
4. A worker refers to its queue, never to the `HostStream`: a dropped stream drains and its thread ends.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from pixtreme.infer.errors import WorkCancelled
from pixtreme.infer.runtimes._protocol import NOT_PERMITTED, Notify, enqueueing_blocks
from pixtreme.infer.runtimes.host._capture import HostRuntimeError

logger = logging.getLogger("pixtreme.infer")

_EXIT_GRACE_S = 2.0
here = threading.local()  # .worker: the worker whose items this thread runs; .stream: the current stream
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_exiting = False


class Record:
    """One record of an event: a point in a stream."""

    __slots__ = ("_listeners", "done", "fault", "time_ns", "worker")

    def __init__(self, worker: Worker) -> None:
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


class Worker:
    """The thread of one stream, started by the first item."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fault: BaseException | None = None
        self.in_task = False
        self.cancelled = False  # no further task starts
        self.blocking = enqueueing_blocks()
        self.thread: threading.Thread | None = None
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._turn = threading.RLock()  # blocking mode: one item at a time, in the caller
        _workers.add(self)

    def push(self, item: Callable[[], object]) -> None:
        if self.blocking:
            with self._turn:
                outer = getattr(here, "worker", None)
                here.worker = self
                try:
                    item()
                finally:
                    here.worker = outer
            return
        if self.thread is None:
            self._start()
        self._queue.put(item)

    def run(self, task: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run one task, unless an earlier one faulted the stream."""
        if self.cancelled and self.fault is None:
            self.fault = WorkCancelled(
                why="the context was closed with what it had not started dropped",
                what=f"{task!r} had not started",
                how="submit it again to an open context, or close without cancel_pending to have it done",
            )
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

    def follow(self, record: Record) -> None:
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
        here.worker = self
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


def check_caller() -> None:
    # As a CUDA host function may not call CUDA: a task that waits for its own stream would never end.
    worker = getattr(here, "worker", None)
    if worker is not None and worker.in_task:
        raise HostRuntimeError(NOT_PERMITTED, "a host task may not call the runtime")
