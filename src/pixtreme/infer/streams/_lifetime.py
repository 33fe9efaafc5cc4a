"""`Lifetime`: how long a context takes work, the modules it closes, and the release of its stream."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any

from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import ClosedError, ContextError, refuse_argument
from pixtreme.infer.streams import _captures, _scopes
from pixtreme.infer.streams._binding import Opened
from pixtreme.infer.streams._completion import Completion
from pixtreme.infer.streams._recorder import Recorder
from pixtreme.infer.streams._stream import Consumer, Stream


class ContextStatus(Enum):
    """How long a context still lives."""

    OPEN = "open"  #: takes work
    CLOSING = "closing"  #: refuses work and drains what it has
    CLOSED = "closed"  #: its stream is released


_TRANSITIONS: dict[tuple[ContextStatus, str], ContextStatus] = {
    (ContextStatus.OPEN, "close"): ContextStatus.CLOSING,
    (ContextStatus.CLOSING, "close"): ContextStatus.CLOSING,  # an interrupted close goes on
    (ContextStatus.CLOSING, "drained"): ContextStatus.CLOSED,
    (ContextStatus.CLOSED, "close"): ContextStatus.CLOSED,
    (ContextStatus.CLOSED, "drained"): ContextStatus.CLOSED,  # two threads closed at once
}


def fire(status: ContextStatus, event: str) -> ContextStatus:
    """Return the status after an event; an unknown pair is a KeyError and changes nothing."""
    return _TRANSITIONS[status, event]


class Lifetime:
    """The life of one context, ``owner``. It does not refer to it, so that a dropped context goes at once."""

    def __init__(self, owner: object, recorder: Recorder, *, owned: bool) -> None:
        self.status = ContextStatus.OPEN
        self.opened: list[Opened[Any]] = []  # in the order of binding
        self._opening = 0  # modules being opened, which use the stream
        self._recorder = recorder
        self._owned = owned
        self._pid = os.getpid()
        stream = recorder.stream
        stream.runtime.attach(stream.native)
        self.finalizer = weakref.finalize(owner, _dropped, stream, owned)
        self.finalizer.atexit = False

    @property
    def takes_work(self) -> bool:
        """True in the process that opened the context, until it is told to close."""
        return self.status is ContextStatus.OPEN and os.getpid() == self._pid

    def check_open(self, owner: object) -> None:
        """Raise where no more work is taken."""
        self._check_process()
        if self.status is not ContextStatus.OPEN:
            raise ClosedError(
                why="a closed context takes no more work",
                what=f"{owner!r} was used after close()",
                how="open a new context",
            )

    def begin_close(self, owner: object, *, cancel_pending: bool = False) -> Completion | None:
        """Refuse new work and return what to wait for; None where the context is closed already."""
        with self._recorder.stream.turn:
            if self.status is ContextStatus.CLOSED:
                return None
            self._check_process()
            if _scopes.is_entered_here(owner):
                raise ContextError(
                    why="a context cannot close while its stream is current",
                    what=f"this thread is inside a use() scope of {owner!r}",
                    how="leave the scope first",
                )
            completion = self._recorder.drain("close()")
            if cancel_pending and self._owned:
                self._recorder.stream.runtime.cancel_pending(self._recorder.stream.native)
            self.status = fire(self.status, "close")
            return completion

    def finish_close(self, owner: object) -> None:
        """Close what is bound and release the stream, once.

        A module whose ``close`` raises does not keep the rest from closing; the first error is raised at the end.
        """
        errors: list[BaseException] = []
        recorder = self._recorder
        stream = recorder.stream
        with stream.turn:
            if self.status is ContextStatus.CLOSED:
                return
            closed = fire(self.status, "drained")
            while self.opened:
                try:
                    self._close_inside(self.opened.pop(), owner)
                except Exception as error:
                    errors.append(error)
            self.status = closed
            self.finalizer.detach()
            self._release_stream()
            fault = recorder.in_flight.fault
            if fault is not None and not fault.delivered:
                fault.log_unless_known()
        if errors:
            for further in errors[1:]:
                errors[0].add_note(f"while closing another module of {stream.place}: {further!r}")
            raise errors[0]

    def open_module(self, owner: Consumer, scope: AbstractContextManager[None], call: Callable[[], Any]) -> Opened[Any]:
        """Open a module inside ``scope``; other calls of the context go on meanwhile.

        Where it closes meanwhile, the module is closed as well, and only then the stream released.
        """
        stream = self._recorder.stream
        with stream.turn:
            owner.check_usable()
            stream.refuse_while_capturing("bind()")
            self._opening += 1
        try:
            with scope:
                opened = Opened(call())
            with stream.turn:
                if self.status is ContextStatus.OPEN:
                    self.opened.append(opened)
                    return opened
            self._close_inside(opened, owner)
            raise ClosedError(
                why="a closed context owns no modules",
                what=f"{owner!r} was closed while {type(opened.instance).__qualname__} was being opened",
                how="await bind_async() before the context is closed",
            )
        finally:
            with stream.turn:
                self._opening -= 1
                if self.status is ContextStatus.CLOSED:
                    self._release_stream()

    def drain_for_module(self) -> Completion | None:
        """Return what a module's close waits for (C8); None where the context closes, which has drained already."""
        return self._recorder.drain("close() of a module") if self.status is ContextStatus.OPEN else None

    def close_opened(self, opened: Opened[Any], owner: object) -> None:
        """Close one module, whose outstanding work is over."""
        with self._recorder.stream.turn:
            if opened in self.opened:
                self.opened.remove(opened)
                self._close_inside(opened, owner)

    def _release_stream(self) -> None:
        """Let go of the stream, unless a module is being opened on it, which comes here again."""
        if not self._opening:
            stream = self._recorder.stream
            stream.runtime.detach(stream.native)
            if self._owned:
                stream.runtime.destroy_stream(stream.native)

    def _close_inside(self, opened: Opened[Any], owner: object) -> None:
        entry = _scopes.enter(self._recorder.stream, owner)
        try:
            opened.close()
        finally:
            _scopes.leave_entry(entry)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ContextError(
                why="streams and their threads do not survive a fork",
                what=f"{self._recorder.stream.place} was opened in process {self._pid} and used in its child "
                f"{os.getpid()}",
                how="open contexts after the fork, or start the process with the spawn method",
            )


def _dropped(stream: Stream, owned: bool) -> None:
    """A context was garbage-collected open: release its stream when no capture is under way (S34)."""
    stream.runtime.detach(stream.native)
    if owned:
        _captures.release(stream.key.device, partial(stream.runtime.destroy_stream, stream.native))
    warnings.warn(f"{stream.place} was dropped without close()", ResourceWarning, stacklevel=2)


def check_options(*, name: object, priority: object, timing: object, max_in_flight: object) -> None:
    """Check what `StreamContext.open` and ``adopt`` take beside the device."""
    owner = "a stream context"
    if name is not None and (not isinstance(name, str) or not name):
        refuse_argument(owner, "name", name, "None or a non-empty string")
    if not isinstance(priority, int) or isinstance(priority, bool):
        refuse_argument(owner, "priority", priority, "an int (lower is more urgent)")
    if not isinstance(timing, bool):
        refuse_argument(owner, "timing", timing, "True or False")
    if max_in_flight is not None and not is_positive_int(max_in_flight):
        refuse_argument(owner, "max_in_flight", max_in_flight, "None or a positive int")
