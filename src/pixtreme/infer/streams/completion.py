"""Work under way: when it is over, who waits for it, what it keeps alive, and how much of it there may be.

A `Flight` is one recorded event. Two machines are kept apart: *progress* (pending, then complete or faulted, and never
back), which only the runtime's report moves, and the *waiters*, who come and go without touching progress (S13, S15).

Invariants

1. A flight finishes once; its status is derived from ``done`` and ``fault``, and stored nowhere else.
2. What it keeps alive is owned by the flight, and the flight by the runtime until the report: dropping a handle or
   cancelling a wait frees nothing.
3. A waiter is added under the lock that ``finish`` takes, after ``done`` was looked at: no wake-up is lost.
4. Kept values are released on the reporting thread, outside our locks, before anything later in the stream (S24c).
5. Finishers run once, on the reporting thread, after the device is done and before the flight counts as over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial

from pixtreme.infer.errors import BusyError, StreamFault
from pixtreme.infer.streams.loops import CALLBACK_FAILED, Notify
from pixtreme.infer.streams.runtime import NOT_PERMITTED, NativeStream, Runtime
from pixtreme.infer.streams.slots import Slots

logger = logging.getLogger("pixtreme.infer")


class FlightStatus(Enum):
    """How far the device is."""

    PENDING = "pending"  #: the event has not completed
    COMPLETE = "complete"  #: everything before the event ran
    FAULTED = "faulted"  #: something before the event failed


#: status x event → status; an unknown pair is an error and changes nothing.
TRANSITIONS: dict[tuple[FlightStatus, str], FlightStatus] = {
    (FlightStatus.PENDING, "complete"): FlightStatus.COMPLETE,
    (FlightStatus.PENDING, "fault"): FlightStatus.FAULTED,
}


class Fault:
    """The first failure of a context: every flight it broke refers to it."""

    def __init__(self, cause: BaseException, label: str, place: str) -> None:
        self.cause = cause
        self.label = label
        self.place = place
        self.retrieved = False
        self.delivered = False  # a handle carries it, so somebody can still ask
        self._logged = False

    def retrieve(self) -> StreamFault:
        """Return the error for whoever asked; from now on the fault counts as known."""
        self.retrieved = True
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


class _Unasked:
    """Belongs to a flight that a fault broke, and says so when it goes: then nobody is left who could ask (S18).

    A handle refers to its flight, and so does the runtime until the report; a handle needs no finaliser for this.
    """

    __slots__ = ("_fault", "handed_over")

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.handed_over = False

    def __del__(self) -> None:
        if not self.handed_over:
            self._fault.log_unless_known()


class Finishers:
    """What the host does once the device is done, as the last part of the work (A12)."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self.fill_host = False

    def add(self, call: Callable[[], object], *, fills_host: bool) -> None:
        """Add a call; one that fills host memory makes the value unfit for other streams until the flight is over."""
        self._calls.append(call)
        self.fill_host |= fills_host

    def run(self, cause: BaseException | None) -> BaseException | None:
        """Make every call, whatever the device's outcome; return the first failure."""
        for call in self._calls:
            try:
                call()
            except BaseException as error:
                cause = cause or error
        return cause


class Flight:
    """One recorded event and everything that hangs on it."""

    __slots__ = (
        "_board",
        "_finishers",
        "_handed_over",
        "_keep",
        "_lock",
        "_unasked",
        "_waiters",
        "done",
        "fault",
        "fills_host",
        "has_handle",
        "label",
    )

    def __init__(
        self, board: Board, label: str, keep: object, finishers: Finishers | None = None, *, has_handle: bool
    ) -> None:
        self.label = label
        self.done = False
        self.fault: Fault | None = None
        self.has_handle = has_handle  # it counts as in flight, and somebody may ask for its outcome
        self.fills_host = finishers is not None and finishers.fill_host
        self._finishers = finishers
        self._handed_over = False
        self._unasked: _Unasked | None = None
        self._board = board
        self._keep = keep
        self._lock = threading.Lock()
        self._waiters: dict[Notify, None] = {}

    @property
    def status(self) -> FlightStatus:
        """Progress, derived."""
        if not self.done:
            return FlightStatus.PENDING
        return FlightStatus.COMPLETE if self.fault is None else FlightStatus.FAULTED

    def finish(self, cause: BaseException | None) -> None:
        """Record the outcome, once: the runtime's report."""
        if self._finishers is not None:
            finishers, self._finishers = self._finishers, None  # they refer to buffers, and a handle to this
            cause = finishers.run(cause)
        with self._lock:
            if self.done:
                TRANSITIONS[self.status, "complete" if cause is None else "fault"]  # a second report: KeyError
            if cause is not None:
                self.fault = self._board.first_fault(cause, self.label)
                self.fault.delivered |= self.has_handle
                if self.has_handle and not self._handed_over:
                    self._unasked = _Unasked(self.fault)
            if self.has_handle:
                self._board.landed += 1  # before anyone can see that it is done, who may want the slot
            self.done = True
            waiters, self._waiters = self._waiters, {}
        if self.has_handle and self._board.queue:
            self._board.grant()
        for notify in waiters:
            try:  # call_logged() without its frame: every one counts on the way to a waiter
                notify()
            except BaseException:  # a user's callback, or a loop: it must not cost the others their wake-up (S23)
                logger.exception(CALLBACK_FAILED)
        self._keep = None  # after the waiters: a finaliser, or memory going back to the system, may take its time

    def add_waiter(self, notify: Notify) -> bool:
        """Call ``notify`` when the flight finishes, on the reporting thread; False if it is over already."""
        with self._lock:
            if self.done:
                return False
            self._waiters[notify] = None
            return True

    def discard_waiter(self, notify: Notify) -> None:
        """Forget a waiter that no longer waits; the others are untouched."""
        with self._lock:
            self._waiters.pop(notify, None)

    def block(self, timeout: float | None = None) -> bool:
        """Block this thread until the flight is over; False if ``timeout`` seconds ran out.

        The wait is on a Python lock, never in the driver: Ctrl-C, timeouts and interpreter exit work (S24b).
        """
        gate = threading.Lock()
        gate.acquire()
        if not self.add_waiter(gate.release):
            return True
        try:
            return gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            self.discard_waiter(gate.release)

    def hand_over(self) -> None:
        """Another stream takes the value on, and a fault with it: nobody need ask here."""
        with self._lock:
            self._handed_over = True
            if self._unasked is not None:
                self._unasked.handed_over = True


class Board(Slots):
    """What one context has under way. Flights refer to it, so it does not refer to the context.

    ``max_in_flight`` bounds handles whose event has not completed, together with slots promised to a submission.
    """

    def __init__(self, place: str, max_in_flight: int | None) -> None:
        super().__init__(max_in_flight)
        self.place = place
        self.fault: Fault | None = None
        #: Handles whose flight is over. Only the reporting thread adds to it, so it needs no lock on the way to a
        #: waiter: a request is queued before it looks for room, and a landing counts before it looks at the queue.
        self.landed = 0
        self._launched = 0

    @property
    def in_flight(self) -> int:
        """How many handles are pending."""
        return self._launched - self.landed

    def take(self) -> None:
        """Promise a slot to the caller, or raise `BusyError`."""
        if not self.try_take():
            raise BusyError(
                why="the context bounds the handles that may be in flight",
                what=f"{self.in_flight} are in flight on {self.place} and {len(self.queue)} submissions wait; "
                f"accepted are max_in_flight={self.limit}",
                how="await an earlier handle first, or wait for a slot with submit_async (or submit_sync without a "
                "loop)",
            )

    def launched(self, *, promised: bool) -> None:
        """A handle is about to be published, on a promised slot or (``record``) without one."""
        with self._lock:
            self._launched += 1
            self._promised -= promised

    def first_fault(self, cause: BaseException, label: str) -> Fault:
        """Return the context's fault, made from the first cause that was reported."""
        if self.fault is None:
            self.fault = Fault(cause, label, self.place)
        return self.fault

    @property
    def out(self) -> int:
        """Handles in flight and slots promised."""
        return self.in_flight + self._promised


def keep_until_done(runtime: Runtime, stream: NativeStream, kept: object) -> None:
    """Keep an object alive until what is enqueued on a stream now is complete."""
    try:
        event = runtime.create_event()
        runtime.record(event, stream)
    except Exception as error:
        if getattr(error, "status", None) == NOT_PERMITTED:
            raise  # work may be under way: the caller asks again where calls are taken
        # The owner released the stream first: nothing of it is under way any more.
        logger.debug("an object outlived its stream: %r", error)
        return
    runtime.report(event, stream, partial(_let_go, kept))


def _let_go(kept: object, fault: BaseException | None) -> None:
    """Take part in a report only to hold ``kept`` until it comes."""
