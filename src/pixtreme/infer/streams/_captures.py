"""Which streams capture in this process, and what must wait until none does.

Capture state is kept by stream identity (device, pointer, generation), not by Python object: two contexts on one
stream know of each other (S33). Finalisers run whenever the garbage collector likes, and a release in the middle of a
capture would invalidate it; they queue the release here, and it runs at the next safe point (S34).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pixtreme.infer.errors import CaptureError
from pixtreme.infer.runtimes import NOT_PERMITTED, StreamKey

logger = logging.getLogger("pixtreme.infer")

# Re-entrant, as a finaliser may run on this thread while it holds the lock.
_lock = threading.RLock()
open_captures: dict[StreamKey, str] = {}
deferred: deque[tuple[str, Callable[[], object]]] = deque()


def capturer(key: StreamKey) -> str | None:
    """Return the name of what captures on this stream, or None."""
    return open_captures.get(key)


def refuse_while_capturing(key: StreamKey, what: str) -> None:
    """Raise where the stream captures.

    Raises
    ------
    CaptureError
        Names the one that captures; nothing was enqueued.
    """
    if (owner := open_captures.get(key)) is not None:
        raise CaptureError(
            why="while a stream captures, nothing else may run on it, not even through another context",
            what=f"{what} was asked for while {owner} captures on stream {key.pointer:#x} of {key.device}",
            how="call it after the capture has ended; inside an operation enqueue on the stream itself",
        )


@contextmanager
def open_capture(key: StreamKey, owner: str) -> Iterator[None]:
    """Hold the stream's capture for ``owner`` while the block runs."""
    with _lock:
        refuse_while_capturing(key, f"a second capture by {owner}")
        open_captures[key] = owner
    try:
        yield
    finally:
        with _lock:
            del open_captures[key]
        run_deferred()


def release(device: str, action: Callable[[], object]) -> None:
    """Run ``action`` now, or after the captures open on ``device`` have ended. For finalisers: never raises."""
    deferred.append((device, action))
    run_deferred()


def run_deferred() -> None:
    """Run what finalisers left, as far as no capture is open on its device."""
    if not deferred:
        return
    with _lock:
        capturing = {key.device for key in open_captures}
        for _ in range(len(deferred)):
            try:
                device, action = deferred.popleft()
            except IndexError:  # a finaliser that ran inside this loop took it
                return
            if device in capturing:
                deferred.append((device, action))
                continue
            try:
                action()
            except Exception as error:
                if getattr(error, "status", None) == NOT_PERMITTED:  # a finaliser inside a host task: no safe point
                    deferred.append((device, action))
                else:
                    logger.exception("a deferred release failed")
