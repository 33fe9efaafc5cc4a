"""`Completion`: one recorded event, when it is over, who waits for it, and what it keeps alive.

Two machines are kept apart: *progress* (pending, then complete or faulted, and never back), which only the runtime's
report moves, and the *waiters*, who come and go without touching progress (S13, S15).

Invariants

1. A completion finishes once; its status is derived from ``done`` and ``fault``, and stored nowhere else.
2. What it keeps alive is owned by the completion, and the completion by the runtime until the report: dropping a handle
   or cancelling a wait frees nothing.
3. A waiter is added under the lock that ``finish`` takes, after ``done`` was looked at: no wake-up is lost.
4. Kept values are released on the reporting thread, outside our locks, before anything later in the stream (S24c).
5. The host epilogue runs once, on the reporting thread, after the device is done and before the work counts as over.
6. Whoever waits has first made sure that reports come by themselves: `add_waiter` is the only way to wait.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Generator
from enum import Enum
from typing import Any

from pixtreme.infer.errors import CaptureError, ContractError
from pixtreme.infer.runtimes import NativeEvent
from pixtreme.infer.streams import _loops
from pixtreme.infer.streams._in_flight import Fault, InFlight
from pixtreme.infer.streams._loops import CALLBACK_FAILED, Notify
from pixtreme.infer.streams._stream import Stream

logger = logging.getLogger("pixtreme.infer")


class HandleStatus(Enum):
    """How far the device is."""

    PENDING = "pending"  #: the event has not completed
    COMPLETE = "complete"  #: everything before the event ran
    FAULTED = "faulted"  #: something before the event failed


class UnretrievedFault:
    """Belongs to a completion that a fault broke, and says so when it goes: then nobody is left who could ask (S18).

    A handle refers to its completion, and so does the runtime until the report; a handle needs no finaliser for this.
    """

    __slots__ = ("_fault", "handed_over")

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.handed_over = False

    def __del__(self) -> None:
        if not self.handed_over:
            self._fault.log_unless_known()


class HostEpilogue:
    """What the host does once the device is done, as the last part of the work (A12)."""

    __slots__ = ("calls", "fills_host")

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.fills_host = False

    def add(self, call: Callable[[], object], *, fills_host: bool) -> None:
        """Add a call; one that fills host memory makes the value unfit for other streams until the work is over."""
        self.calls.append(call)
        self.fills_host |= fills_host

    def run(self, cause: BaseException | None) -> BaseException | None:
        """Make every call, whatever the device's outcome; return the first failure."""
        for call in self.calls:
            try:
                call()
            except BaseException as error:
                cause = cause or error
        return cause


class Completion:
    """One recorded event and everything that hangs on it."""

    __slots__ = (
        "_epilogue",
        "_handed_over",
        "_in_flight",
        "_kept",
        "_lock",
        "_unretrieved",
        "captured",
        "done",
        "event",
        "fault",
        "fills_host",
        "has_handle",
        "label",
        "stream",
        "waiters",
    )

    def __init__(
        self,
        stream: Stream,
        event: NativeEvent | None,
        in_flight: InFlight,
        label: str,
        kept: object = None,
        epilogue: HostEpilogue | None = None,
        *,
        has_handle: bool = False,
        captured: bool = False,
    ) -> None:
        self.stream = stream
        self.event = event  # None where the device took no record: the completion is a fault from the start
        self.label = label
        self.captured = captured  # into a graph: it runs at each launch, and is never over by itself
        self.done = False
        self.fault: Fault | None = None
        self.has_handle = has_handle  # it counts as in flight, and somebody may ask for its outcome
        self.fills_host = epilogue is not None and epilogue.fills_host
        self.waiters: dict[Notify, None] = {}
        self._epilogue = epilogue
        self._handed_over = False
        self._unretrieved: UnretrievedFault | None = None
        self._in_flight = in_flight
        self._kept = kept
        self._lock = threading.Lock()

    @property
    def status(self) -> HandleStatus:
        """Progress, derived."""
        if not self.done:
            return HandleStatus.PENDING
        return HandleStatus.COMPLETE if self.fault is None else HandleStatus.FAULTED

    def __str__(self) -> str:
        return f"{self.label} on {self.stream.place}"

    def finish(self, cause: BaseException | None) -> None:
        """Record the outcome, once: the runtime's report."""
        if self._epilogue is not None:
            epilogue, self._epilogue = self._epilogue, None  # it refers to buffers, and a handle to this
            cause = epilogue.run(cause)
        in_flight = self._in_flight
        with self._lock:
            if self.done:
                raise RuntimeError(f"{self.label} on {self.stream.place} was reported twice")
            if cause is not None:
                self.fault = in_flight.first_fault(cause, self.label)
                self.fault.delivered |= self.has_handle
                if self.has_handle and not self._handed_over:
                    self._unretrieved = UnretrievedFault(self.fault)
            if self.has_handle:
                in_flight.completed += 1  # before anyone can see that it is done, who may want the slot
            self.done = True
            waiters, self.waiters = self.waiters, {}
        if self.has_handle and in_flight.queue:
            in_flight.grant()
        for notify in waiters:
            try:  # call_logged() without its frame: every one counts on the way to a waiter
                notify()
            except BaseException:  # a user's callback, or a loop: it must not cost the others their wake-up (S23)
                logger.exception(CALLBACK_FAILED)
        self._kept = None  # after the waiters: a finaliser, or memory going back to the system, may take its time

    def raise_fault(self) -> None:
        """Raise the `StreamFault` of work known to have failed."""
        if self.fault is not None:
            raise self.fault.retrieve()

    def add_waiter(self, notify: Notify) -> bool:
        """Call ``notify`` when the work is over, on the reporting thread; False if it is over already."""
        if self.captured:
            raise CaptureError(
                why="captured work runs when its graph is launched, and is never over by itself",
                what=f"{self.label} was captured on {self.stream.place} and waited for",
                how="launch the graph and wait for the handle of that launch",
            )
        if not self.done:
            self.stream.ensure_reporting()
        with self._lock:
            if self.done:
                return False
            self.waiters[notify] = None
            return True

    def discard_waiter(self, notify: Notify) -> None:
        """Forget a waiter that no longer waits; the others are untouched."""
        with self._lock:
            self.waiters.pop(notify, None)

    def block(self, timeout: float | None = None) -> bool:
        """Block this thread until the work is over; False if ``timeout`` seconds ran out.

        The wait is on a Python lock, never in the driver: Ctrl-C, timeouts and interpreter exit work (S24b).
        """
        if self.done:
            return True
        self.stream.refuse_own_thread("waiting for a handle")
        gate = threading.Lock()
        gate.acquire()
        if not self.add_waiter(gate.release):
            return True
        try:
            return gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            self.discard_waiter(gate.release)

    def __await__(self) -> Generator[Any, Any, None]:
        """Park the running task until the work is over; always a checkpoint. A cancelled wait leaves nothing behind."""
        loop = _loops.current()
        if self.done:
            yield from loop.checkpoint().__await__()
            return
        waiter = loop.make_waiter()
        notify = waiter.notify
        if not self.add_waiter(notify):
            yield from loop.checkpoint().__await__()
            return
        try:
            yield from waiter.wait().__await__()
        finally:
            if not self.done:
                self.discard_waiter(notify)

    async def wait_in_any_case(self) -> BaseException | None:
        """Wait although the task is cancelled: as `_loops.in_any_case`."""
        return await _loops.in_any_case(lambda: self, lambda: self.done)

    def hand_over(self) -> None:
        """Another stream takes the value on, and a fault with it: nobody need ask here."""
        with self._lock:
            self._handed_over = True
            if self._unretrieved is not None:
                self._unretrieved.handed_over = True


def checked_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not math.isfinite(timeout) or timeout < 0:
        raise ContractError(
            why="a timeout is a number of seconds",
            what=f"received timeout={timeout!r}; accepted are None and finite numbers from 0",
            how="pass seconds, or None to wait as long as it takes",
        )
    return float(timeout)
