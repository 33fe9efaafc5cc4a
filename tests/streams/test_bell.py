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

from pixtreme.infer.streams import StreamContext, loops


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


def _bell() -> loops._Bell:
    bell = loops.make_waiter()._inbox.bell  # type: ignore[attr-defined]
    assert isinstance(bell, loops._Bell)
    return bell


@pytest.mark.anyio
async def test_one_task_at_a_time_has_it(context: StreamContext, gate: Gate) -> None:
    """S14, S21: it goes to the first, nobody else waits for it, and it comes back with the result."""
    gate.hold(context)
    handles = [context.submit(lambda n=n: n) for n in range(3)]
    bell = _bell()
    async with anyio.create_task_group() as group:
        values = await park(group, handles)
        assert loops._inboxes[trio.lowlevel.current_trio_token()].bell is None
        gate.open()
    assert sorted(values) == [0, 1, 2]
    assert _bell() is bell


@pytest.mark.anyio
async def test_a_late_ring_wakes_nobody_else(context: StreamContext, gate: Gate) -> None:
    """S15, S23: a wake-up for a wait that was cancelled meanwhile does not end the next one's."""
    bell = _bell()
    waiter = loops.make_waiter()
    with anyio.move_on_after(0):
        await waiter.wait()
    assert _bell() is bell
    waiter.notify()
    gate.hold(context)
    handle = context.submit(lambda: "value")
    with anyio.move_on_after(0.01) as scope:
        await handle
    assert scope.cancelled_caught
    gate.open()
    assert await handle == "value"
    assert _bell() is bell


@pytest.mark.anyio
async def test_ringing_without_end() -> None:
    """S23: a bell that nobody hears never blocks or fails the thread that rings it."""
    bell = loops._Bell(*socket.socketpair())
    for _ in range(100_000):
        bell.ring()
    bell.silence()
    bell.ring()


def test_no_file_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: without a socket every task is woken the other way."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    async def main() -> list[int]:
        monkeypatch.setattr(socket, "socketpair", refuse)
        async with StreamContext.open("cpu") as context:
            assert loops.make_waiter()._inbox.bell is None  # type: ignore[attr-defined]
            return [await context.submit(lambda n=n: n) for n in range(10)]

    assert trio.run(main) == list(range(10))


def test_its_files_go_with_the_run() -> None:
    """S23: a run that ended leaves no socket open."""

    async def main() -> None:
        async with StreamContext.open("cpu") as context:
            bells.append(weakref.ref(_bell()))
            await context.submit(lambda: None)

    bells: list[weakref.ref[loops._Bell]] = []
    for _ in range(3):
        trio.run(main)
    gc.collect()
    assert [bell() for bell in bells] == [None] * 3
