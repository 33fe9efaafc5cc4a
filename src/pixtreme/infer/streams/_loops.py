"""The one seam to event loops: which one runs here, and what the rest asks of it.

What they differ in is in `_asyncio` and `_trio`. Neither is imported before a task awaits, so that no event loop is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

from pixtreme.infer.streams._entry_queue import Waiter

logger = logging.getLogger("pixtreme.infer")

Notify = Callable[[], object]
CALLBACK_FAILED = "a completion callback failed"


class Loop(Protocol):
    """What a library of event loops offers here: `_asyncio` and `_trio` do."""

    CANCELLED: tuple[type[BaseException], ...]  #: what cancels a task

    def make_waiter(self) -> Waiter: ...
    def checkpoint(self) -> Awaitable[None]: ...
    def shield(self) -> AbstractContextManager[object]: ...


def current() -> Loop:
    """Return the library whose task runs here; asyncio's where no task does."""
    trio = sys.modules.get("trio")
    return _trio() if trio is not None and trio.lowlevel.in_trio_task() else _asyncio()


def checkpoint() -> Awaitable[None]:
    """Let other tasks run and cancellation in."""
    return current().checkpoint()


def runs_here() -> bool:
    """Tell whether this thread is running an event loop, which a blocking call would freeze."""
    if "trio" in sys.modules and sys.modules["trio"].lowlevel.in_trio_run():
        return True
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def call_logged(notify: Notify) -> None:
    """Call what a user or a loop gave us; what it raises is logged and never reaches the reporting thread (S23)."""
    try:
        notify()
    except BaseException:
        logger.exception(CALLBACK_FAILED)


@cache
def _asyncio() -> Loop:
    from pixtreme.infer.streams import _asyncio

    return _asyncio


@cache
def _trio() -> Loop:
    from pixtreme.infer.streams import _trio

    return _trio
