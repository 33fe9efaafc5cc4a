"""The one seam to event loops: how a completion, seen on a stream's thread, resumes a task on asyncio or trio.

A completion appends to the waiting loop's inbox and posts one wake-up only if none is under way; the loop then empties
the inbox (S21). Whether the waiter still waits is checked *on the loop*: it may have been cancelled meanwhile, and a
function given to trio's ``run_sync_soon`` must not raise, as that would end the whole run (S23).

No event loop is imported before a task awaits: asyncio and trio are looked up where they already run.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    import trio as trio_module

    from pixtreme.infer.streams.completion import Flight

logger = logging.getLogger("pixtreme.infer")


class Waiter(Protocol):
    """One parked task: `notify`, from any thread, ends `wait`."""

    @property
    def notify(self) -> Callable[[], object]: ...

    def post(self, run: Callable[[], object]) -> object:
        """Have the task's loop call ``run`` soon; callable from any thread."""
        ...

    def loop_is_gone(self, error: Exception) -> bool:
        """Tell whether ``error``, raised by `post`, only says that the loop has ended."""
        ...

    def wake(self) -> None:
        """Resume the task, on its loop, if it still waits."""
        ...

    def wait(self) -> Awaitable[None]:
        """Park the running task until it is woken; a checkpoint in any case."""
        ...


class _Inbox:
    """Wake-ups on their way to one loop. It does not refer to the loop, whose life it must not prolong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[Waiter] = []

    def send(self, waiter: Waiter) -> None:
        with self._lock:
            self._queue.append(waiter)
            if len(self._queue) > 1:
                return  # whoever made the queue non-empty has posted the wake-up that will take this one along
        try:
            waiter.post(self._empty)
        except Exception as error:
            with self._lock:
                self._queue.clear()
            if not waiter.loop_is_gone(error):
                raise
            logger.debug("a loop ended while a task of it waited: %r", error)

    def _empty(self) -> None:
        with self._lock:
            batch, self._queue = self._queue, []
        for waiter in batch:
            try:
                waiter.wake()
            except Exception:
                logger.exception("a waiter could not be woken")


class _AsyncioWaiter:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] = loop.create_future()
        self.post = loop.call_soon_threadsafe
        self.notify = partial(_inbox_of(loop).send, self)

    def loop_is_gone(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError) and self._loop.is_closed()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


class _TrioWaiter:
    def __init__(self, trio: Any) -> None:
        token = trio.lowlevel.current_trio_token()
        event: trio_module.Event = trio.Event()
        self._gone: type[Exception] = trio.RunFinishedError
        self.post = token.run_sync_soon
        self.wake = event.set
        self.wait = event.wait
        self.notify = partial(_inbox_of(token).send, self)

    def loop_is_gone(self, error: Exception) -> bool:
        return isinstance(error, self._gone)


_inboxes: weakref.WeakKeyDictionary[Any, _Inbox] = weakref.WeakKeyDictionary()
_inboxes_lock = threading.Lock()


def make_waiter() -> Waiter:
    """Return a waiter for the running task's loop; raises RuntimeError where none runs."""
    if (trio := _running_trio()) is not None:
        return _TrioWaiter(trio)
    import asyncio

    return _AsyncioWaiter(asyncio.get_running_loop())


async def until(flight: Flight) -> None:
    """Park the running task until the flight is over; always a checkpoint. A cancelled wait leaves nothing behind."""
    if flight.done:
        await checkpoint()
        return
    waiter = make_waiter()
    notify = waiter.notify
    if not flight.add_waiter(notify):
        await checkpoint()
        return
    try:
        await waiter.wait()
    finally:
        if not flight.done:
            flight.discard_waiter(notify)


async def until_in_any_case(flight: Flight) -> BaseException | None:
    """Like `until`, but a cancellation only takes effect afterwards: it is returned, for the caller to raise."""
    cancelled: BaseException | None = None
    while not flight.done:
        try:
            with shield():
                await until(flight)
        except cancelled_errors() as error:
            cancelled = error
    return cancelled


async def checkpoint() -> None:
    """Let other tasks run and cancellation in."""
    if (trio := _running_trio()) is not None:
        await trio.lowlevel.checkpoint()
    else:
        import asyncio

        await asyncio.sleep(0)


def loop_runs_here() -> bool:
    """Tell whether this thread is running an event loop, which a blocking call would freeze."""
    if "trio" in sys.modules and sys.modules["trio"].lowlevel.in_trio_run():
        return True
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def cancelled_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that cancel a task here."""
    if (trio := _running_trio()) is not None:
        return (trio.Cancelled,)
    import asyncio

    return (asyncio.CancelledError,)


def shield() -> AbstractContextManager[object]:
    """Keep the cancel scopes of the libraries in use from interrupting the with-block, where they can be kept.

    anyio is looked up, never imported: where it is not loaded nobody can be inside one of its scopes.
    """
    if (trio := _running_trio()) is not None:
        scope: AbstractContextManager[object] = trio.CancelScope(shield=True)
        return scope
    if (anyio := sys.modules.get("anyio")) is not None:
        scope = anyio.CancelScope(shield=True)
        return scope
    return nullcontext()


def _running_trio() -> Any:
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_task() else None


def _inbox_of(loop: object) -> _Inbox:
    inbox = _inboxes.get(loop)
    if inbox is None:
        with _inboxes_lock:
            inbox = _inboxes.setdefault(loop, _Inbox())
    return inbox
