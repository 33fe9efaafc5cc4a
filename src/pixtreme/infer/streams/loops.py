"""The one seam to event loops: how a completion, seen on a stream's thread, resumes a task on asyncio or trio.

A completion appends to the waiting loop's inbox and posts one wake-up only if none is under way; the loop then empties
the inbox (S21). On trio the first task to park is woken through a socket of its own instead. Whether the waiter still
waits is checked *on the loop*: it may have been cancelled meanwhile, and a function given to trio's ``run_sync_soon``
must not raise, as that would end the whole run (S23).

No event loop is imported before a task awaits: asyncio and trio are looked up where they already run.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    import contextvars

    import trio as trio_module

    from pixtreme.infer.streams.completion import Flight

logger = logging.getLogger("pixtreme.infer")

Notify = Callable[[], object]
CALLBACK_FAILED = "a completion callback failed"


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

    def wake(self, *, last: bool) -> None:
        """Resume the task, on its loop, if it still waits; inside this call, perhaps, if it is the callback's last."""
        ...

    def wait(self) -> Awaitable[None]:
        """Park the running task until it is woken; a checkpoint in any case."""
        ...


class _Bell:
    """A socket that wakes one parked trio task directly.

    What `run_sync_soon` runs is itself a task of trio's, which then schedules ours: a second pass of the loop, and
    another look at every file. A task that waits for a socket is resumed in the first one.
    """

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.socket = near
        self._far = far
        for end in (near, far):
            end.setblocking(False)

    def ring(self) -> None:
        """Make the socket readable, from any thread; once is enough."""
        with suppress(BlockingIOError):
            self._far.send(b"\0")

    def silence(self) -> None:
        """Take in what was rung, and what was rung late for an earlier task."""
        with suppress(BlockingIOError):
            self.socket.recv(4096)

    def __del__(self) -> None:
        self.socket.close()
        self._far.close()


class _Inbox:
    """Wake-ups on their way to one loop. It does not refer to the loop, whose life it must not prolong."""

    def __init__(self, bell: _Bell | None) -> None:
        self.bell = bell  # of a trio loop: the first task to park has it
        self._queue: deque[Waiter] = deque()
        self._posted = False  # a wake-up is under way

    def send(self, waiter: Waiter) -> None:
        # No lock, which a waiter would notice: what is added before `_posted` is looked at is found by a wake-up that
        # lowers `_posted` before it looks here. Two threads at once may post twice; the second wake-up finds nothing.
        self._queue.append(waiter)
        if self._posted:
            return
        self._posted = True
        try:
            waiter.post(self._empty)
        except Exception as error:
            self._posted = False
            self._queue.clear()
            if not waiter.loop_is_gone(error):
                raise
            logger.debug("a loop ended while a task of it waited: %r", error)

    def _empty(self) -> None:
        self._posted = False
        count = len(self._queue)  # later ones have a wake-up of their own
        with suppress(IndexError):  # emptied by `send`: the loop is ending
            for _ in range(count):
                waiter = self._queue.popleft()
                try:
                    waiter.wake(last=count == 1)
                except Exception:
                    logger.exception("a waiter could not be woken")


@cache
def _asyncio_waiter() -> Callable[[asyncio.AbstractEventLoop], Waiter]:
    """Return the class of asyncio's waiters; asyncio is imported by whoever runs it."""
    import asyncio

    class AsyncioWaiter(asyncio.Future[None]):
        """A future that can resume its task in the callback that completes it.

        A plain future asks the loop for one more turn: another poll of every file, before the task runs. Only
        `until` awaits it, so a task's wake-up is the one callback it ever gets.
        """

        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            super().__init__(loop=loop)
            self.post = loop.call_soon_threadsafe
            self._inbox = _inbox_of(loop, _no_bell)
            self._task: Callable[[asyncio.Future[None]], object] | None = None  # resumes it, once one is parked
            self._context: contextvars.Context | None = None

        @property
        def notify(self) -> Callable[[], object]:
            return partial(self._inbox.send, self)

        def loop_is_gone(self, error: Exception) -> bool:
            return isinstance(error, RuntimeError) and self.get_loop().is_closed()

        def add_done_callback(self, fn: Any, /, *, context: contextvars.Context | None = None) -> None:
            self._task, self._context = fn, context

        def cancel(self, msg: Any | None = None) -> bool:
            cancelled = super().cancel(msg)
            if cancelled:
                self._resume_soon()
            return cancelled

        def wake(self, *, last: bool) -> None:
            if self.done():
                return
            self.set_result(None)
            if last and self._task is not None and self._context is not None:
                self._context.run(self._task, self)
            else:
                self._resume_soon()

        def wait(self) -> Awaitable[None]:
            return self

        def _resume_soon(self) -> None:
            if self._task is not None:
                self.get_loop().call_soon(self._task, self, context=self._context)

    return AsyncioWaiter


class _TrioWaiter:
    def __init__(self, trio: Any) -> None:
        token = trio.lowlevel.current_trio_token()
        self._trio = trio
        self._task: trio_module.lowlevel.Task | None = None  # while it is parked without the bell
        self._bell: _Bell | None = None
        self._woken = False
        self._inbox = _inbox_of(token, _bell_or_none)
        self.post = token.run_sync_soon

    def notify(self) -> None:
        self._woken = True  # before the bell is looked at; `wait` takes the bell before it looks at this
        if (bell := self._bell) is not None:
            bell.ring()
        else:
            self._inbox.send(self)

    def loop_is_gone(self, error: Exception) -> bool:
        return isinstance(error, self._trio.RunFinishedError)

    def wake(self, *, last: bool) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            self._trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        bell, self._inbox.bell = self._inbox.bell, None
        self._bell = bell
        try:
            if self._woken:
                await checkpoint()
            elif bell is None:
                self._task = self._trio.lowlevel.current_task()
                await self._trio.lowlevel.wait_task_rescheduled(self._give_up)
            else:
                while not self._woken:  # it may have been rung for the task before
                    await self._trio.lowlevel.wait_readable(bell.socket)
                    bell.silence()
        finally:
            if bell is not None:
                self._inbox.bell = bell

    def _give_up(self, _: object) -> Any:
        self._task = None
        return self._trio.lowlevel.Abort.SUCCEEDED


_inboxes: weakref.WeakKeyDictionary[Any, _Inbox] = weakref.WeakKeyDictionary()
_inboxes_lock = threading.Lock()


def make_waiter() -> Waiter:
    """Return a waiter for the running task's loop; raises RuntimeError where none runs."""
    if (trio := _running_trio()) is not None:
        return _TrioWaiter(trio)
    import asyncio

    return _asyncio_waiter()(asyncio.get_running_loop())


def call_logged(notify: Notify) -> None:
    """Call what a user or a loop gave us; what it raises is logged and never reaches the reporting thread (S23)."""
    try:
        notify()
    except BaseException:
        logger.exception(CALLBACK_FAILED)


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


def _inbox_of(loop: object, make_bell: Callable[[], _Bell | None]) -> _Inbox:
    inbox = _inboxes.get(loop)
    if inbox is None:
        with _inboxes_lock:
            inbox = _inboxes.setdefault(loop, _Inbox(make_bell()))
    return inbox


def _no_bell() -> None:
    """On asyncio the call that a thread posts resumes the task itself."""


def _bell_or_none() -> _Bell | None:
    try:
        return _Bell(*socket.socketpair())
    except OSError:  # no file is left: everybody is woken the other way
        return None
