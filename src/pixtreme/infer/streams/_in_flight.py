"""`InFlight`: how much one context has under way, how much there may be, and the first fault among it.

Completions refer to it, so it does not refer to the context.
"""

from __future__ import annotations

import logging

from pixtreme.infer.errors import BusyError, StreamFault, WorkCancelled
from pixtreme.infer.streams._semaphore import FairSemaphore

logger = logging.getLogger("pixtreme.infer")


class Fault:
    """The first failure of a context: every completion it broke refers to it."""

    def __init__(self, cause: BaseException, label: str, place: str) -> None:
        self.cause = cause
        self.label = label
        self.place = place
        self.retrieved = isinstance(cause, WorkCancelled)  # whoever closed the context knows
        self.delivered = False  # a handle carries it, so somebody can still ask
        self._logged = False

    def retrieve(self) -> StreamFault:
        """Return the error for whoever asked; from now on the fault counts as known."""
        self.retrieved = True
        if isinstance(self.cause, WorkCancelled):
            return WorkCancelled(
                why=self.cause.why, what=f"{self.label} on {self.place}: {self.cause.what}", how=self.cause.how
            )
        error = StreamFault(
            why="work enqueued on a stream failed on the device, so nothing after it on that stream ran",
            what=f"{self.label} on {self.place}: {self.cause!r}",
            how="look at the cause; then close the context and open a new one, as a faulted context takes no more work",
        )
        error.__cause__ = self.cause
        return error

    def log_unless_known(self) -> None:
        """Say so once, if nobody ever asked (S18)."""
        if not (self.retrieved or self._logged):
            self._logged = True
            logger.error(
                "%s on %s failed, and its handle went without anybody asking: %r",
                self.label,
                self.place,
                self.cause,
                exc_info=self.cause,
            )


class InFlight(FairSemaphore):
    """What one context has under way.

    ``limit`` bounds handles whose event has not completed, together with slots promised to a submission.
    """

    def __init__(self, place: str, limit: int | None) -> None:
        super().__init__(limit)
        self.place = place
        self.fault: Fault | None = None
        #: Handles whose work is over. Only the reporting thread adds to it, so it needs no lock on the way to a waiter:
        #: a request is queued before it looks for room, and a completion counts before it looks at the queue.
        self.completed = 0
        self._published = 0

    @property
    def count(self) -> int:
        """How many handles are pending."""
        return self._published - self.completed

    def take(self) -> None:
        """Promise a slot to the caller, or raise `BusyError`."""
        if not self.try_take():
            raise BusyError(
                why="the context bounds the handles that may be in flight",
                what=f"{self.count} are in flight on {self.place} and {len(self.queue)} submissions wait; "
                f"accepted are max_in_flight={self.limit}",
                how="await an earlier handle first, or wait for a slot with submit_async (or submit_sync without a "
                "loop)",
            )

    def publish(self, *, promised: bool) -> None:
        """A handle is about to be published, on a promised slot or (``record``) without one."""
        with self._lock:
            self._published += 1
            self._promised -= promised

    def first_fault(self, cause: BaseException, label: str) -> Fault:
        """Return the context's fault, made from the first cause that was reported."""
        if self.fault is None:
            self.fault = Fault(cause, label, self.place)
        return self.fault

    @property
    def out(self) -> int:
        """Handles in flight and slots promised."""
        return self.count + self._promised
