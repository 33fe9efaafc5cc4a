"""Waiting on asyncio, uvloop included. Imported where a task of it waits."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from pixtreme.infer.streams._entry_queue import EntryQueue, EntryQueues, Waiter

CANCELLED: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
entry_queues = EntryQueues(EntryQueue)
_tasks: set[asyncio.Task[None]] = set()


class AsyncioWaiter(asyncio.Future[None]):
    """A future that can resume its task in the callback that completes it.

    A plain future asks the loop for one more turn: another poll of every file, before the task runs. Only a completion
    and a semaphore await it, so a task's wake-up is the one callback it ever gets.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.post = loop.call_soon_threadsafe
        self._entry_queue = entry_queues.of(loop)
        self._task: Callable[[asyncio.Future[None]], object] | None = None  # resumes it, once one is parked
        self._context: contextvars.Context | None = None

    @property
    def notify(self) -> Callable[[], object]:
        return partial(self._entry_queue.send, self)

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


def make_waiter() -> Waiter:
    """Return a waiter for the running task; raises RuntimeError where none runs."""
    return AsyncioWaiter(asyncio.get_running_loop())


def checkpoint() -> Awaitable[None]:
    """Let other tasks run and cancellation in."""
    return asyncio.sleep(0)


def shield() -> AbstractContextManager[object]:
    """Keep anyio's cancel scopes, where there can be any, from interrupting the with-block.

    anyio is looked up, never imported: where it is not loaded nobody can be inside one of its scopes.
    """
    anyio = sys.modules.get("anyio")
    if anyio is None:
        return nullcontext()
    scope: AbstractContextManager[object] = anyio.CancelScope(shield=True)
    return scope


def spawn(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Start a task of the loop's own; ``work`` raises nothing but what ends the loop."""
    task = asyncio.get_running_loop().create_task(work(), name=name)
    _tasks.add(task)  # a loop holds its tasks weakly
    task.add_done_callback(_tasks.discard)
