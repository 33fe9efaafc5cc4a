"""S21 on trio: the first task to park is woken through a socket of its own, the others together (decision 005)."""

from __future__ import annotations

import gc
import socket
import weakref

import anyio
import anyio.lowlevel
import pytest
import trio
from helpers import Gate, park

from pixtreme.infer.streams import StreamContext, _loops, _trio


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


def _wake_up() -> _trio.WakeUpSocket:
    wake_up = _loops.current().make_waiter()._entry_queue.wake_up  # type: ignore[attr-defined]
    assert isinstance(wake_up, _trio.WakeUpSocket)
    return wake_up


@pytest.mark.anyio
async def test_one_task_at_a_time_has_it(context: StreamContext, gate: Gate) -> None:
    """S14, S21: it goes to the first, nobody else waits for it, and it comes back with the result."""
    gate.hold(context)
    handles = [context.submit(lambda n=n: n) for n in range(3)]
    wake_up = _wake_up()
    async with anyio.create_task_group() as group:
        values = await park(group, handles)
        assert _trio.entry_queues.of(trio.lowlevel.current_trio_token()).wake_up is None
        gate.open()
    assert sorted(values) == [0, 1, 2]
    assert _wake_up() is wake_up


@pytest.mark.anyio
async def test_a_late_ring_wakes_nobody_else(context: StreamContext, gate: Gate) -> None:
    """S15, S23: a wake-up for a wait that was cancelled meanwhile does not end the next one's."""
    wake_up = _wake_up()
    waiter = _loops.current().make_waiter()
    with anyio.move_on_after(0):
        await waiter.wait()
    assert _wake_up() is wake_up
    waiter.notify()
    gate.hold(context)
    handle = context.submit(lambda: "value")
    with anyio.move_on_after(0.01) as scope:
        await handle
    assert scope.cancelled_caught
    gate.open()
    assert await handle == "value"
    assert _wake_up() is wake_up


@pytest.mark.anyio
async def test_ringing_without_end() -> None:
    """S23: a wake_up that nobody hears never blocks or fails the thread that rings it."""
    wake_up = _trio.WakeUpSocket(*socket.socketpair())
    for _ in range(100_000):
        wake_up.wake()
    wake_up.drain()
    wake_up.wake()


def test_no_file_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: without a socket every task is woken the other way."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    async def main() -> list[int]:
        monkeypatch.setattr(socket, "socketpair", refuse)
        async with StreamContext.open("cpu") as context:
            assert _loops.current().make_waiter()._entry_queue.wake_up is None  # type: ignore[attr-defined]
            return [await context.submit(lambda n=n: n) for n in range(10)]

    assert trio.run(main) == list(range(10))


def test_its_files_go_with_the_run() -> None:
    """S23: a run that ended leaves no socket open."""

    async def main() -> None:
        async with StreamContext.open("cpu") as context:
            sockets.append(weakref.ref(_wake_up()))
            await context.submit(lambda: None)

    sockets: list[weakref.ref[_trio.WakeUpSocket]] = []
    for _ in range(3):
        trio.run(main)
    gc.collect()
    assert [wake_up() for wake_up in sockets] == [None] * 3
