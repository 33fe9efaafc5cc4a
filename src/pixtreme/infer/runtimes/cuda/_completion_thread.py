"""`CompletionThread`: reports one device stream's completions, in stream order, from a thread of its own (S21).

The thread starts at the first wait that needs it and blocks in one event's synchronisation after the other, with the
GIL released: no polling, no host function in the driver (S22). Until then, what is complete is found when the next
event is added, so that a program that never waits keeps nothing alive for long and has no thread.

Invariants

1. Reports of a stream are made one at a time, in the order their events were recorded.
2. The thread refers to the queue, never to a context or stream.
3. Adding takes no lock that a finaliser on the same thread could hold: `SimpleQueue.put` is reentrant.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pixtreme.infer.runtimes._protocol import NativeEvent, Notify

logger = logging.getLogger("pixtreme.infer")

_EXIT_GRACE_S = 2.0
_all: weakref.WeakSet[CompletionThread] = weakref.WeakSet()


class Outcome(NamedTuple):
    """What a look at an event, or a wait for it, gave."""

    over: bool
    fault: BaseException | None = None


class Verbs(NamedTuple):
    """What a runtime does with an event here."""

    enter: Callable[[], object]  #: called once on the thread: sets its device
    wait: Callable[[NativeEvent], Outcome]  #: blocks with the GIL released
    look: Callable[[NativeEvent], Outcome]  #: never blocks


class CompletionThread:
    """Reports the completions of one stream, from a thread once somebody waits."""

    def __init__(self, verbs: Verbs, *, blocking: bool) -> None:
        self._verbs = verbs
        self._blocking = blocking
        self._queue: SimpleQueue[tuple[NativeEvent, Notify] | None] = SimpleQueue()
        self._head: tuple[NativeEvent, Notify] | None = None  # looked at, and not over yet
        self._reporting = threading.Lock()  # whoever holds it may report: the thread, for its life, or a look
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._users = 0
        _all.add(self)

    def attach(self) -> None:
        """A context begins to use the stream."""
        with self._starting:
            self._users += 1

    def detach(self) -> None:
        """A context ends; after the last one the thread ends once everything is reported.

        Where nothing was waited for there is no thread yet. What is pending then gets one, as nobody will come by
        again: it refers to the stream, which would otherwise never go.
        """
        with self._starting:
            self._users -= 1
        if self._users == 0 and self._thread is None and (self._head is not None or not self._queue.empty()):
            with suppress(RuntimeError):  # no thread can be started while the interpreter ends
                self.ensure_reporting()
        self._queue.put(None)

    def add(self, event: NativeEvent, notify: Notify) -> None:
        """Report ``event``, just recorded, when it is over."""
        if self._blocking:
            notify(self._verbs.wait(event).fault)
            return
        self._queue.put((event, notify))
        if self._thread is None:
            self._look()
        pending = self._thread is not None or self._head is not None or not self._queue.empty()
        if self._users == 0 and pending:  # nobody will come by again: a thread for what is there, which then ends
            self.ensure_reporting()
            self._queue.put(None)

    def ensure_reporting(self) -> None:
        """From here on reports come by themselves."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pixtreme.infer completion", daemon=True)
                thread.start()
                self._thread = thread

    def reports_here(self) -> bool:
        """Tell whether this thread makes the reports."""
        return self._thread is threading.current_thread()

    def finish(self, deadline: float) -> None:
        """At interpreter exit: give the thread until ``deadline`` to end."""
        if (thread := self._thread) is not None:
            self._users = 0
            self._queue.put(None)
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        """Report what is over already."""
        if not self._reporting.acquire(blocking=False):
            return
        try:
            with suppress(Empty):
                while True:
                    item = self._head or self._queue.get_nowait()
                    self._head = None
                    if item is None:
                        continue
                    outcome = self._verbs.look(item[0])
                    if not outcome.over:
                        self._head = item
                        return
                    _tell(item[1], outcome.fault)
        finally:
            self._reporting.release()

    def _run(self) -> None:
        with self._reporting:
            try:
                self._verbs.enter()
            except Exception as error:  # a broken device: every wait will say so
                logger.debug("a completion thread could not set its device: %r", error)
            get = self._queue.get
            item, self._head = self._head, None
            while True:
                if item is not None:
                    _tell(item[1], self._verbs.wait(item[0]).fault)
                    item = None  # nothing of finished work may stay alive while the thread sleeps
                item = get()
                if item is None and self._ends():
                    return

    def _ends(self) -> bool:
        with self._starting:
            if self._users == 0 and self._queue.empty():
                self._thread = None
                return True
            return False


def _tell(notify: Notify, fault: BaseException | None) -> None:
    try:
        notify(fault)
    except BaseException:  # a defect of ours: it must not cost the others their wake-up
        logger.exception("a completion could not be reported")


@atexit.register
def _finish_all() -> None:
    deadline = time.monotonic() + _EXIT_GRACE_S
    for thread in list(_all):
        thread.finish(deadline)
