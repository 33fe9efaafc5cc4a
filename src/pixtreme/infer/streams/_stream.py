"""`Stream`: a native stream together with the runtime it belongs to.

Everything above orders work with these few verbs, and compares streams with ``==``, which compares identity as the
driver knows it (S33), not Python objects.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pixtreme.infer.errors import ContextError
from pixtreme.infer.runtimes import NOT_PERMITTED, NativeEvent, NativeStream, Notify, Runtime, StreamKey
from pixtreme.infer.streams import _captures

logger = logging.getLogger("pixtreme.infer")


class Stream:
    """One stream of one device.

    ``turn`` is held from a call's first wait to its event, and while a session captures, so that nothing of another
    thread that works through the same context stands between them.
    """

    __slots__ = ("_place", "key", "native", "runtime", "turn")

    def __init__(self, runtime: Runtime, native: NativeStream, place: str | None = None) -> None:
        self.runtime = runtime
        self.native = native
        self.key: StreamKey = runtime.key(native)
        self._place = place
        self.turn = threading.RLock()

    @property
    def place(self) -> str:
        """What messages call it."""
        return self._place or f"stream {self.key.pointer:#x} of {self.key.device}"

    @property
    def is_capturing(self) -> bool:
        """True while the stream is part of a capture, ours or not."""
        return self.runtime.is_capturing(self.native)

    @property
    def is_current(self) -> bool:
        """True where this thread's current stream, on this device, is this one."""
        native = self.runtime.current()
        return native is not None and self.runtime.key(native) == self.key

    def record(self, *, timing: bool = False) -> NativeEvent:
        """Record a new event behind everything enqueued so far."""
        event = self.runtime.create_event(timing=timing)
        self.runtime.record(event, self.native)
        return event

    def report(self, event: NativeEvent, notify: Notify) -> None:
        """Have ``notify`` called, with the fault or None, once an event just recorded here is complete."""
        self.runtime.report(event, self.native, notify)

    def wait(self, event: NativeEvent) -> None:
        """Make later work wait for an event; the host does not."""
        self.runtime.wait(self.native, event)

    def wait_for(self, other: Stream) -> None:
        """Make later work wait for what is enqueued on another stream now."""
        self.wait(other.record())

    def activate(self) -> Callable[[], None]:
        """Make device and stream current for this thread; the returned callable puts back what was found."""
        return self.runtime.activate(self.native)

    def ensure_reporting(self) -> None:
        """Somebody waits: from here on completions are reported without any further call of ours."""
        self.runtime.ensure_reporting(self.native)

    def keep_until_done(self, value: object) -> None:
        """Keep an object alive until what is enqueued now is complete."""
        try:
            event = self.record()
        except Exception as error:
            if getattr(error, "status", None) == NOT_PERMITTED:
                raise  # work may be under way: the caller asks again where calls are taken
            # The owner released the stream first: nothing of it is under way any more.
            logger.debug("an object outlived its stream: %r", error)
            return
        self.report(event, partial(_let_go, value))

    def refuse_while_capturing(self, what: str) -> None:
        """Raise `CaptureError` where a capture of ours is open on the stream."""
        _captures.refuse_while_capturing(self.key, what)

    def refuse_own_thread(self, what: str) -> None:
        """Raise `ContextError` on the thread that reports this stream's completions: it would wait for itself."""
        if self.runtime.reports_here(self.native):
            raise ContextError(
                why="the thread that reports a stream's completions must not wait for that stream",
                what=f"{what} on {self.place} from one of its own tasks or callbacks would never end",
                how="wait from another thread, or chain the next step with submit() or then()",
            )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Stream) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<Stream: {self.place}, {self.native!r}>"


def _let_go(value: object, fault: BaseException | None) -> None:
    """Take part in a report only to hold ``value`` until it comes."""


class Consumer(Protocol):
    """A context, as far as a handle hands values over to it."""

    @property
    def core_stream(self) -> Stream: ...
    def check_usable(self) -> None: ...
    def wait(self, *dependencies: Any) -> None: ...
    def keep_alive(self, *values: object) -> None: ...


#: The open context of each stream; an alias does not displace the context it stands beside.
consumers: weakref.WeakValueDictionary[StreamKey, Consumer] = weakref.WeakValueDictionary()
