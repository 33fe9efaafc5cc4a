"""Waiting on trio. Imported where a task of it waits."""

from __future__ import annotations

import contextvars
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress

import trio

from pixtreme.infer.streams._entry_queue import EntryQueue, EntryQueues, Waiter

CANCELLED: tuple[type[BaseException], ...] = (trio.Cancelled,)


class WakeUpSocket:
    """Wakes one parked task directly.

    What ``run_sync_soon`` runs is itself a task of trio's, which then schedules ours: a second pass of the loop, and
    another look at every file. A task that waits for a socket is resumed in the first one.
    """

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.socket = near
        self._far = far
        for end in (near, far):
            end.setblocking(False)

    def wake(self) -> None:
        """Make the socket readable, from any thread; once is enough."""
        with suppress(BlockingIOError):
            self._far.send(b"\0")

    def drain(self) -> None:
        """Take in what was sent, and what was sent late for an earlier task."""
        with suppress(BlockingIOError):
            self.socket.recv(4096)

    def __del__(self) -> None:
        self.socket.close()
        self._far.close()


class TrioEntryQueue(EntryQueue):
    """An entry queue, and the socket that the first task to park takes instead."""

    def __init__(self) -> None:
        super().__init__()
        self.wake_up: WakeUpSocket | None = _wake_up_socket()


entry_queues = EntryQueues(TrioEntryQueue)


class TrioWaiter:
    """One parked task of trio's."""

    def __init__(self) -> None:
        token = trio.lowlevel.current_trio_token()
        self._task: trio.lowlevel.Task | None = None  # while it is parked without the socket
        self._wake_up: WakeUpSocket | None = None
        self._woken = False
        self._entry_queue = entry_queues.of(token)
        self.post = token.run_sync_soon

    def notify(self) -> None:
        self._woken = True  # before the socket is looked at; `wait` takes the socket before it looks at this
        if (wake_up := self._wake_up) is not None:
            wake_up.wake()
        else:
            self._entry_queue.send(self)

    def loop_is_gone(self, error: Exception) -> bool:
        return isinstance(error, trio.RunFinishedError)

    def wake(self, *, last: bool) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        wake_up, self._entry_queue.wake_up = self._entry_queue.wake_up, None
        self._wake_up = wake_up
        try:
            if self._woken:
                await checkpoint()
            elif wake_up is None:
                self._task = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._give_up)
            else:
                while not self._woken:  # it may have been woken for the task before
                    await trio.lowlevel.wait_readable(wake_up.socket)
                    wake_up.drain()
        finally:
            if wake_up is not None:
                self._entry_queue.wake_up = wake_up

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


def make_waiter() -> Waiter:
    """Return a waiter for the running task."""
    return TrioWaiter()


checkpoint = trio.lowlevel.checkpoint


def shield() -> AbstractContextManager[object]:
    """Keep cancel scopes from interrupting the with-block."""
    return trio.CancelScope(shield=True)


def spawn(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Start a task of trio's own; ``work`` raises nothing."""
    trio.lowlevel.spawn_system_task(work, name=name, context=contextvars.copy_context())


def _wake_up_socket() -> WakeUpSocket | None:
    try:
        return WakeUpSocket(*socket.socketpair())
    except OSError:  # no file is left: everybody is woken the other way
        return None
