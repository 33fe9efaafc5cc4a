"""The one seam to event loops: which one runs here, and what the rest asks of it.

What they differ in is in `_asyncio` and `_trio`. Neither is imported before a task awaits, so that no event loop is.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pixtreme.infer.errors import ContextError, LoopBlockedWarning
from pixtreme.infer.streams._entry_queue import Waiter

logger = logging.getLogger("pixtreme.infer")

Notify = Callable[[], object]
_PACKAGE = str(Path(__file__).parents[1])
CALLBACK_FAILED = "a completion callback failed"


class Loop(Protocol):
    """What a library of event loops offers here: `_asyncio` and `_trio` do."""

    CANCELLED: tuple[type[BaseException], ...]  #: what cancels a task

    def make_waiter(self) -> Waiter: ...
    def checkpoint(self) -> Awaitable[None]: ...
    def shield(self) -> AbstractContextManager[object]: ...
    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None: ...


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


def refuse_to_block(call: str, instead: str) -> None:
    """Raise where a blocking wait would freeze the event loop of this thread."""
    if runs_here():
        raise ContextError(
            why="a blocking wait would freeze the event loop of this thread",
            what=f"{call} was called where an event loop runs; accepted is a thread without one",
            how=f"use {instead}",
        )


def warn_of_blocking(call: str, instead: str) -> None:
    """Warn, in Python's development mode and asyncio's debug mode, where a call freezes the event loop."""
    if runs_here() and (sys.flags.dev_mode or _debugs()):
        warnings.warn(
            f"{call} blocks the event loop of this thread; use {instead}",
            LoopBlockedWarning,
            stacklevel=2,
            skip_file_prefixes=(_PACKAGE,),
        )


async def in_any_case(wait: Callable[[], Awaitable[object]], is_over: Callable[[], bool]) -> BaseException | None:
    """Wait although the task is cancelled: the cancellation is returned, for the caller to raise afterwards."""
    loop = current()
    cancelled: BaseException | None = None
    while not is_over():
        try:
            with loop.shield():
                await wait()
        except loop.CANCELLED as error:
            cancelled = error
    return cancelled


class Opened(Protocol):
    """What can be closed again."""

    async def aclose(self) -> None: ...


async def open_in_thread[T: Opened](call: Callable[[], T]) -> T:
    """Open something in a thread of its own. A cancellation takes effect once it is open, and closes it again."""
    loop = current()
    outcome: list[T | BaseException] = []
    ended = threading.Lock()
    waiters: list[Notify] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)
        with ended:
            woken, waiters[:] = list(waiters), ()
        for notify in woken:
            call_logged(notify)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="pixtreme.infer opening").start()

    async def wait() -> None:
        waiter = loop.make_waiter()
        with ended:
            if not outcome:
                waiters.append(waiter.notify)
        await (loop.checkpoint() if outcome else waiter.wait())

    cancelled = await in_any_case(wait, lambda: bool(outcome))
    try:
        await loop.checkpoint()  # the shield held back a scope's cancellation
    except loop.CANCELLED as error:
        cancelled = error
    opened = outcome[0]
    if isinstance(opened, BaseException):
        raise opened
    if cancelled is not None:
        await opened.aclose()
        raise cancelled
    return opened


def _debugs() -> bool:
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio is not None and bool(asyncio.get_running_loop().get_debug())
    except RuntimeError:  # trio's
        return False


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
