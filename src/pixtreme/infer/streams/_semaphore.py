"""`FairSemaphore`: a bounded number of things, given in order of asking (S10, A12)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from pixtreme.infer.streams import _loops
from pixtreme.infer.streams._loops import Notify, call_logged


class Ticket:
    """A request for a slot."""

    __slots__ = ("granted", "notify")

    def __init__(self, notify: Notify) -> None:
        self.notify = notify
        self.granted = False


class FairSemaphore:
    """At most ``limit`` slots are out; None for no bound.

    What is out is what was promised here, and what a subclass counts besides.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.queue: deque[Ticket] = deque()
        self._lock = threading.Lock()
        self._promised = 0

    def try_take(self) -> bool:
        """Promise a slot to the caller, unless none is free or others asked first."""
        with self._lock:
            if self.queue or not self._has_room():
                return False
            self._promised += 1
            return True

    def take_blocking(self, before: Callable[[], object]) -> None:
        """Block this thread until a slot is promised to the caller; ``before`` is called if that takes a wait."""
        take_first_blocking([self], before)

    async def take_waiting(self, before: Callable[[], object]) -> None:
        """Like `take_blocking`, but wait on the event loop; always a checkpoint."""
        await take_first([self], before)

    def request(self, notify: Notify) -> Ticket:
        """Ask for a slot; ``notify`` is called when it is granted, perhaps before this returns."""
        ticket = Ticket(notify)
        with self._lock:
            self.queue.append(ticket)
        self.grant()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take a request back, granted or not."""
        with self._lock:
            if ticket.granted:
                self._promised -= 1
            else:
                self.queue.remove(ticket)
        self.grant()

    def give_back(self) -> None:
        """Return a promised slot."""
        with self._lock:
            self._promised -= 1
        self.grant()

    def grant(self) -> None:
        """Give free slots to those who asked first."""
        granted = []
        with self._lock:
            while self.queue and self._has_room():
                ticket = self.queue.popleft()
                ticket.granted = True
                self._promised += 1
                granted.append(ticket)
        for ticket in granted:
            call_logged(ticket.notify)

    @property
    def out(self) -> int:
        """How many are out."""
        return self._promised

    def _has_room(self) -> bool:
        return self.limit is None or self.out < self.limit


async def take_first(semaphores: Sequence[FairSemaphore], before: Callable[[], object]) -> int:
    """Wait on the event loop until one of several promises a slot to the caller; return which. Always a checkpoint.

    The first in the list that has room is taken; where none has, the caller waits in every queue at once.
    """
    waiter = _loops.current().make_waiter()
    with _Requests(semaphores, waiter.notify) as requests:
        if requests.granted:
            await _loops.checkpoint()
        else:
            before()
            await waiter.wait()
        return requests.take()


def take_first_blocking(semaphores: Sequence[FairSemaphore], before: Callable[[], object]) -> int:
    """Like `take_first`, but block this thread; Ctrl-C interrupts it."""
    wake_up = threading.Semaphore(0)  # which may be woken by several
    with _Requests(semaphores, wake_up.release) as requests:
        if not requests.granted:
            before()
            wake_up.acquire()
        return requests.take()


class _Requests:
    """Requests in several queues, of which one is to be granted; leaving withdraws the others."""

    def __init__(self, semaphores: Sequence[FairSemaphore], notify: Notify) -> None:
        self._semaphores = semaphores
        self._notify = notify
        self._tickets: list[Ticket] = []
        self._taken: int | None = None

    def __enter__(self) -> Self:
        for semaphore in self._semaphores:
            self._tickets.append(semaphore.request(self._notify))
            if self.granted:
                break
        return self

    @property
    def granted(self) -> bool:
        return self._tickets[-1].granted

    def take(self) -> int:
        self._taken = [ticket.granted for ticket in self._tickets].index(True)
        return self._taken

    def __exit__(self, *_: object) -> None:
        for index, ticket in enumerate(self._tickets):
            if index != self._taken:
                self._semaphores[index].withdraw(ticket)
