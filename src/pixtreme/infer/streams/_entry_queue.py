"""How a completion, seen on a stream's thread, reaches the tasks of one event loop.

A completion appends the task's waiter to the loop's entry queue and posts one wake-up only if none is under way; the
loop then empties the queue (S21). Whether the waiter still waits is checked *on the loop*: it may have been cancelled
meanwhile, and a function given to trio's ``run_sync_soon`` must not raise, as that would end the whole run (S23).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

logger = logging.getLogger("pixtreme.infer")


class Waiter(Protocol):
    """One parked task: `notify`, from any thread, ends `wait`."""

    @property
    def notify(self) -> Callable[[], object]: ...

    def post(self, run: Callable[[], object]) -> object:
        """Have the task's loop call ``run`` soon; callable from any thread."""
        ...

    def loop_is_gone(self, error: Exception) -> bool:
        """Tell whether ``error``, raised by `post`, only says that the loop has ended."""
        ...

    def wake(self, *, last: bool) -> None:
        """Resume the task, on its loop, if it still waits; inside this call, perhaps, if it is the callback's last."""
        ...

    def wait(self) -> Awaitable[None]:
        """Park the running task until it is woken; a checkpoint in any case."""
        ...


class EntryQueue:
    """Wake-ups on their way to one loop. It does not refer to the loop, whose life it must not prolong."""

    def __init__(self) -> None:
        self.waiters: deque[Waiter] = deque()
        self._posted = False  # a wake-up is under way

    def send(self, waiter: Waiter) -> None:
        """Have the loop resume ``waiter``; from any thread."""
        # No lock, which a waiter would notice: what is added before `_posted` is looked at is found by a wake-up that
        # lowers `_posted` before it looks here. Two threads at once may post twice; the second wake-up finds nothing.
        self.waiters.append(waiter)
        if self._posted:
            return
        self._posted = True
        try:
            waiter.post(self._empty)
        except Exception as error:
            self._posted = False
            self.waiters.clear()
            if not waiter.loop_is_gone(error):
                raise
            logger.debug("a loop ended while a task of it waited: %r", error)

    def _empty(self) -> None:
        self._posted = False
        count = len(self.waiters)  # later ones have a wake-up of their own
        with suppress(IndexError):  # emptied by `send`: the loop is ending
            for _ in range(count):
                waiter = self.waiters.popleft()
                try:
                    waiter.wake(last=count == 1)
                except Exception:
                    logger.exception("a waiter could not be woken")


class EntryQueues[Q: EntryQueue]:
    """The entry queue of each loop, or of each token that stands for one; made by ``make`` when first asked for."""

    def __init__(self, make: Callable[[], Q]) -> None:
        self._make = make
        self._by_loop: weakref.WeakKeyDictionary[Any, Q] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, loop: object) -> Q:
        """Return the queue of ``loop``."""
        queue = self._by_loop.get(loop)
        if queue is None:
            with self._lock:
                queue = self._by_loop.setdefault(loop, self._make())
        return queue
