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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    import trio

    from pixtreme.infer.streams.completion import Flight

logger = logging.getLogger("pixtreme.infer")


class Waiter(Protocol):
    """One parked task."""

    def notify(self) -> None:
        """Say, from any thread, that the wait is over."""
        ...

    async def wait(self) -> None:
        """Park the running task until `notify`; a checkpoint in any case."""
        ...


class _Inbox:
    """Wake-ups on their way to one loop."""

    def __init__(self, post: Callable[[Callable[[], object]], object], is_gone: Callable[[Exception], bool]) -> None:
        self._post = post
        self._is_gone = is_gone
        self._lock = threading.Lock()
        self._queue: list[Callable[[], None]] = []

    def send(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(wake)
            if len(self._queue) > 1:
                return  # whoever made the queue non-empty has posted the wake-up that will take this one along
        try:
            self._post(self._empty)
        except Exception as error:
            with self._lock:
                self._queue.clear()
            if not self._is_gone(error):
                raise
            logger.debug("a loop ended while a task of it waited: %r", error)

    def _empty(self) -> None:
        with self._lock:
            batch, self._queue = self._queue, []
        for wake in batch:
            try:
                wake()
            except Exception:
                logger.exception("a waiter could not be woken")


class _AsyncioWaiter:
    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: _Inbox) -> None:
        self._future: asyncio.Future[None] = loop.create_future()
        self._inbox = inbox

    def notify(self) -> None:
        self._inbox.send(self._wake)

    async def wait(self) -> None:
        await self._future

    def _wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


class _TrioWaiter:
    def __init__(self, event: trio.Event, inbox: _Inbox) -> None:
        self._event = event
        self._inbox = inbox

    def notify(self) -> None:
        self._inbox.send(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()


_inboxes: weakref.WeakKeyDictionary[Any, _Inbox] = weakref.WeakKeyDictionary()
_inboxes_lock = threading.Lock()


def make_waiter() -> Waiter:
    """Return a waiter for the running task's loop; raises RuntimeError where none runs."""
    if (trio := _running_trio()) is not None:
        token = trio.lowlevel.current_trio_token()
        return _TrioWaiter(trio.Event(), _inbox_of(token, lambda: _trio_inbox(token)))
    import asyncio

    loop = asyncio.get_running_loop()
    return _AsyncioWaiter(loop, _inbox_of(loop, lambda: _asyncio_inbox(loop)))


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


def _inbox_of(loop: object, make: Callable[[], _Inbox]) -> _Inbox:
    inbox = _inboxes.get(loop)
    if inbox is None:
        with _inboxes_lock:
            inbox = _inboxes.get(loop)
            if inbox is None:
                inbox = _inboxes[loop] = make()
    return inbox


def _asyncio_inbox(loop: asyncio.AbstractEventLoop) -> _Inbox:
    # The inbox must not keep its own key in the weak table alive: it reaches the loop through a weak reference.
    ref = weakref.ref(loop)

    def post(run: Callable[[], object]) -> None:
        if (target := ref()) is not None:
            target.call_soon_threadsafe(run)

    def is_gone(error: Exception) -> bool:
        target = ref()
        return isinstance(error, RuntimeError) and (target is None or target.is_closed())

    return _Inbox(post, is_gone)


def _trio_inbox(token: trio.lowlevel.TrioToken) -> _Inbox:
    ref = weakref.ref(token)
    gone = sys.modules["trio"].RunFinishedError

    def post(run: Callable[[], object]) -> None:
        if (target := ref()) is not None:
            target.run_sync_soon(run)

    return _Inbox(post, lambda error: isinstance(error, gone))
