"""`FairSemaphore`: a bounded number of things, given in order of asking (S10, A12)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

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
        gate = threading.Lock()
        gate.acquire()
        ticket = self.request(gate.release)
        try:
            if not ticket.granted:
                before()
            gate.acquire()
        except BaseException:  # Ctrl-C
            self.withdraw(ticket)
            raise

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
    tickets: list[Ticket] = []
    taken: int | None = None
    try:
        for semaphore in semaphores:
            tickets.append(semaphore.request(waiter.notify))
            if tickets[-1].granted:
                break
        if tickets[-1].granted:
            await _loops.checkpoint()
        else:
            before()
            await waiter.wait()
        taken = [ticket.granted for ticket in tickets].index(True)
        return taken
    finally:
        for index, ticket in enumerate(tickets):
            if index != taken:
                semaphores[index].withdraw(ticket)
