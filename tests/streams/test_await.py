"""Awaiting: asyncio, uvloop and trio (S14, S15, S20, S21, S22, S23, S25, S36, S37)."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio
from helpers import WAIT_S, Boom, Gate, LogRecords, fail, park, run_quietly

from pixtreme.infer.errors import ContractError, StreamFault
from pixtreme.infer.runtimes.host import HostStream
from pixtreme.infer.streams import EventHandle, StreamContext, _entry_queue, _loops, as_completed, wait_all

pytestmark = pytest.mark.anyio

Run = Callable[[Callable[[], Awaitable[Any]]], Any]
RUNS: list[Run] = [lambda main: asyncio.run(main()), trio.run]  # type: ignore[arg-type]


async def test_a_waiter_nobody_awaits() -> None:
    """S23: a wake-up that comes before the task has parked, or twice, or after a cancelled wait, does nothing."""
    waiter = _loops.current().make_waiter()
    for last in (True, False):
        waiter.notify()
        waiter.wake(last=last)
    with anyio.fail_after(WAIT_S):
        await waiter.wait()
    for last in (True, False):
        waiter.wake(last=last)
    cancelled = _loops.current().make_waiter()
    with anyio.move_on_after(0) as scope:
        await cancelled.wait()
    assert scope.cancelled_caught
    cancelled.wake(last=True)
    await anyio.lowlevel.checkpoint()


async def test_a_task_resumes_in_its_own_context(context: StreamContext) -> None:
    """S14: context variables and the current task are the awaiting task's own, alone or one of several resumed."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=-1)
    seen: list[tuple[int, bool]] = []

    async def wait(number: int, handle: EventHandle[None]) -> None:
        variable.set(number)
        task = anyio.get_current_task()
        await handle
        seen.append((variable.get(), anyio.get_current_task() == task))
        await anyio.lowlevel.checkpoint()

    for count in (1, 3):
        held = Gate()
        held.hold(context)
        handle = context.submit(lambda: None)
        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(wait, number, handle)
            await anyio.wait_all_tasks_blocked()
            held.open()
    assert sorted(seen) == [(0, True), (0, True), (1, True), (2, True)]
    assert variable.get() == -1


class StubWaiter:
    """A waiter of no loop, for what a broken one does."""

    def __init__(self, post: Callable[[Callable[[], object]], object], wake: Callable[[], object]) -> None:
        self.post = post
        self._wake = wake
        self.notify = wake

    def wake(self, *, last: bool) -> None:
        self._wake()

    def loop_is_gone(self, error: Exception) -> bool:
        return False

    async def wait(self) -> None:
        raise NotImplementedError


async def test_await_gives_the_value(context: StreamContext, gate: Gate) -> None:
    """S14: any number of times, from several tasks at once."""
    gate.hold(context)
    handle = context.submit(lambda: "value")
    values: list[str] = []

    async def take() -> None:
        values.append(await handle)

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(take)
        await anyio.lowlevel.checkpoint()
        assert values == []
        gate.open()
    assert values == ["value"] * 10
    assert await handle == "value"
    assert handle.completion.waiters == {}


async def test_awaiting_a_done_handle_is_a_checkpoint(context: StreamContext) -> None:
    """S14: no thread hop, but others run and cancellation comes in."""
    handle = context.submit(lambda: 1)
    handle.result(0) if handle.done() else await handle
    ran: list[int] = []

    async def other_task() -> None:
        ran.append(1)

    async with anyio.create_task_group() as group:
        group.start_soon(other_task)
        for _ in range(3):
            await handle
        assert ran == [1]
    with anyio.CancelScope() as scope:
        scope.cancel()
        while True:
            await handle
    assert scope.cancelled_caught


async def test_cancelling_stops_the_wait_not_the_work(context: StreamContext, gate: Gate) -> None:
    """S15: the work goes on, the handle can be awaited again, and nothing of the wait stays behind."""
    gate.hold(context)
    ran = threading.Event()
    handle = context.submit(lambda: context.stream.enqueue(ran.set) or "value")
    with anyio.move_on_after(0.01) as scope:
        await handle
    assert scope.cancelled_caught
    assert handle.completion.waiters == {}
    assert not handle.done()
    gate.open()
    assert await handle == "value"
    assert ran.is_set()


async def test_a_cancelled_waiter_does_not_take_others_along(context: StreamContext, gate: Gate) -> None:
    """S23: one of many waits is cancelled, the others resolve."""
    gate.hold(context)
    handle = context.submit(lambda: 1)
    values: list[int] = []

    async def take(scope: anyio.CancelScope) -> None:
        with scope:
            values.append(await handle)

    scopes = [anyio.CancelScope() for _ in range(20)]
    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(take, scope)
        await anyio.lowlevel.checkpoint()
        for scope in scopes[::2]:
            scope.cancel()
        gate.open()
    assert len(values) >= 10


async def test_fault_reaches_every_waiter(context: StreamContext, gate: Gate) -> None:
    """S18: await raises StreamFault with the task's exception as cause, in each task."""
    gate.hold(context)
    handle = context.submit(context.stream.enqueue, fail)
    errors: list[StreamFault] = []

    async def take() -> None:
        try:
            await handle
        except StreamFault as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(take)
        await anyio.lowlevel.checkpoint()
        gate.open()
    assert len(errors) == 5
    assert len({id(error.__cause__) for error in errors}) == 1
    assert isinstance(errors[0].__cause__, Boom)
    assert len(set(map(id, errors))) == 5  # each task its own exception: tracebacks do not mix


async def test_wait_all(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """S20: results in order, whatever order they finish in."""
    gate.hold(context)
    handles = [target.submit(lambda n=n: n) for n in range(5) for target in (context, other)]
    await handles[1]
    timer = threading.Timer(0.01, gate.open)
    timer.start()
    assert await wait_all(handles) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert await wait_all([]) == []
    timer.join()


async def test_wait_all_with_faults(context: StreamContext, other: StreamContext) -> None:
    """S20: one fault is raised itself, several as an ExceptionGroup; everything was waited for."""
    good = other.submit(lambda: 1)
    broken = [context.submit(context.stream.enqueue, fail)]
    with pytest.raises(StreamFault):
        await wait_all([*broken, good])
    async with StreamContext.open("cpu") as third:
        broken.append(third.submit(third.stream.enqueue, fail, "second"))
        with pytest.raises(ExceptionGroup) as raised:
            await wait_all([*broken, good])
    assert [str(error.__cause__) for error in raised.value.exceptions] == ["boom", "second"]


async def test_as_completed(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """S20: handles come in the order in which they finish, faulted and repeated ones too."""
    gate.hold(context)
    slow = context.submit(lambda: "slow")
    quick = other.submit(lambda: "quick")
    broken = other.submit(other.stream.enqueue, fail)
    seen: list[EventHandle[Any]] = []
    async for handle in as_completed([slow, quick, broken, quick]):
        seen.append(handle)
        if len(seen) == 3:
            gate.open()
    assert set(seen[:3]) == {quick, broken}
    assert seen[3] is slow
    assert isinstance(broken.exception(), StreamFault)


async def test_as_completed_left_early(context: StreamContext, gate: Gate) -> None:
    """S20, S15: leaving the loop leaves no waiter behind."""
    done = context.submit(lambda: 1)
    await done
    gate.hold(context)
    pending = context.submit(lambda: 2)
    results = as_completed([done, pending])
    async for handle in results:
        assert handle is done
        break
    await results.aclose()  # type: ignore[attr-defined]
    assert pending.completion.waiters == {}
    gate.open()


async def test_only_handles_are_waited_for(context: StreamContext) -> None:
    """S20: anything else is refused with its position, before the first wait."""
    wrong: Any = [context.record(), 3]
    with pytest.raises(ContractError, match="position 1"):
        await wait_all(wrong)
    with pytest.raises(ContractError, match="position 1"):
        await anext(as_completed(wrong))


async def test_awaiting_enqueues_nothing(context: StreamContext, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """S22: no host function is put on the stream to wake a waiter."""
    gate.hold(context)
    handle = context.submit(lambda: 1)
    enqueued: list[object] = []
    monkeypatch.setattr(HostStream, "enqueue", lambda *work: enqueued.append(work))
    with anyio.move_on_after(0.01):
        await handle
    gate.open()
    await handle
    assert enqueued == []


async def test_many_completions_post_one_wake_up(context: StreamContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """S21, S25: while the loop is busy, completions gather in its entry queue behind one posted wake-up."""
    posts: list[int] = []
    send = _entry_queue.EntryQueue.send

    class Counted:
        """A waiter whose posts are counted."""

        def __init__(self, waiter: _entry_queue.Waiter) -> None:
            self.waiter = waiter
            self.wake = waiter.wake

        def post(self, run: Callable[[], object]) -> None:
            posts.append(1)
            self.waiter.post(run)

    monkeypatch.setattr(_entry_queue.EntryQueue, "send", lambda self, waiter: send(self, Counted(waiter)))  # type: ignore[arg-type]
    gate = Gate()
    gate.hold(context)
    handles = [context.submit(lambda n=n: n) for n in range(500)]
    async with anyio.create_task_group() as group:
        values = await park(group, handles)
        gate.open()
        while not handles[-1].done():  # the loop does not run meanwhile
            pass
        assert posts == [1]
    assert sorted(values) == list(range(500))


async def test_pending_handles_cost_nothing(context: StreamContext, gate: Gate) -> None:
    """S25: while everything waits, the process uses next to no CPU time and nothing wakes up."""

    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("pixtreme.infer")}

    gate.hold(context)
    handles = [context.submit(lambda: None) for _ in range(2000)]
    async with anyio.create_task_group() as group:
        await park(group, handles)
        gate.wait_until_reached()
        threads = ours()
        wall, cpu = time.perf_counter(), time.process_time()
        await anyio.sleep(0.3)  # the span over which idleness is measured, not a synchronisation
        used = (time.process_time() - cpu) / (time.perf_counter() - wall)
        assert not ours() - threads  # one of an earlier test may end meanwhile
        gate.open()
    assert used < 0.2, f"{used:.0%} of a core while idle"


async def test_full_default_limiter(context: StreamContext, gate: Gate) -> None:
    """S37, C29: awaits complete although every slot of anyio's default thread limiter is taken."""
    gate.hold(context)
    handle = context.submit(lambda: 1)
    limiter = anyio.to_thread.current_default_thread_limiter()
    release = threading.Event()
    async with anyio.create_task_group() as group:
        for _ in range(int(limiter.total_tokens)):
            group.start_soon(anyio.to_thread.run_sync, lambda: release.wait())
        while limiter.available_tokens:
            await anyio.lowlevel.checkpoint()
        gate.open()
        with anyio.fail_after(WAIT_S):
            assert await handle == 1
            async with StreamContext.open("cpu") as second:
                assert await second.submit(lambda: 2) == 2
        release.set()


async def test_race_of_completion_and_timeout(context: StreamContext, caplog: pytest.LogCaptureFixture) -> None:
    """S23, C25: completion and timeout race; the task sees one of them, and nothing is logged by the loop."""
    outcomes = {"value": 0, "timeout": 0}
    for number in range(300):
        release = threading.Event()
        handle = context.submit(lambda release=release: context.stream.enqueue(release.wait))
        timer = threading.Timer(0.0002 * (number % 4), release.set)
        timer.start()
        with anyio.move_on_after(0.0005) as scope:
            await handle
        outcomes["timeout" if scope.cancelled_caught else "value"] += 1
        timer.join()
        assert await handle is None
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert sum(outcomes.values()) == 300


class TestLoops:
    """S14, S23, S36: loops come and go; a handle holds none."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"  # these tests run loops themselves

    def test_several_loops(self, context: StreamContext) -> None:
        """S36, C24: made without a loop, awaited in asyncio, again in a second run, and in trio."""
        handle = context.submit(lambda: "value")

        async def main() -> str:
            return await handle

        assert [run(main) for run in (*RUNS, *RUNS)] == ["value"] * 4

    def test_loops_at_once(self, context: StreamContext, gate: Gate) -> None:
        """S14, C24: one pending handle awaited from two asyncio loops and a trio run at the same time."""
        gate.hold(context)
        handle = context.submit(lambda: "value")
        waiting = threading.Barrier(4, timeout=WAIT_S)
        values: list[str] = []

        async def main() -> None:
            waiting.wait()
            values.append(await handle)

        threads = [threading.Thread(target=run, args=[main]) for run in (RUNS[0], RUNS[0], RUNS[1])]
        for thread in threads:
            thread.start()
        waiting.wait()
        gate.open()
        for thread in threads:
            thread.join(WAIT_S)
        assert values == ["value"] * 3

    @pytest.mark.parametrize("run", RUNS)
    def test_loop_that_ended_meanwhile(
        self, context: StreamContext, gate: Gate, run: Run, caplog: pytest.LogCaptureFixture
    ) -> None:
        """S23, C26, C30: a loop that closes with a wait pending costs nobody else anything."""
        gate.hold(context)
        handle = context.submit(lambda: 1)

        async def main() -> None:
            waiter = _loops.current().make_waiter()
            handle.completion.add_waiter(waiter.notify)  # as a wait does whose task is torn down with its loop

        run(main)
        gate.open()
        assert handle.result(WAIT_S) == 1
        context.synchronize()
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

        async def again() -> int:
            return await handle

        assert run(again) == 1

    def test_only_a_closed_loop_is_forgiven(self, context: StreamContext, gate: Gate, log: LogRecords) -> None:
        """S23, C26: another error while waking a loop is logged, not hidden, and the next waiter is woken."""
        gate.hold(context)
        handle = context.submit(lambda: 1)
        woken = threading.Event()
        queue = _entry_queue.EntryQueue()
        handle.completion.add_waiter(lambda: queue.send(StubWaiter(lambda run: fail("wake"), int)))
        handle.completion.add_waiter(woken.set)
        gate.open()
        assert woken.wait(WAIT_S)
        context.synchronize()
        assert log.take() == ["a completion callback failed"]
        assert not queue.waiters

    def test_a_waiter_that_cannot_be_woken(self, log: LogRecords) -> None:
        """S23: on the loop a raising waiter loses no other one; nothing escapes into trio's entry queue."""
        runs: list[Callable[[], object]] = []
        queue = _entry_queue.EntryQueue()
        woken: list[int] = []
        queue.send(StubWaiter(runs.append, fail))
        queue.send(StubWaiter(runs.append, lambda: woken.append(1)))
        (run,) = runs
        run()
        assert woken == [1]
        assert log.take() == ["a waiter could not be woken"]

    def test_no_wake_up_is_lost(self) -> None:
        """S21: what is sent just after the loop looked into its queue has a wake-up of its own."""
        runs: list[Callable[[], object]] = []
        woken: list[int] = []
        queue = _entry_queue.EntryQueue()

        class Raced(deque[_entry_queue.Waiter]):
            """Another thread sends right after the first look."""

            def __len__(self) -> int:
                seen = super().__len__()
                if late:
                    queue.send(late.pop())
                return seen

        late = [StubWaiter(runs.append, lambda: woken.append(2))]
        queue.waiters = Raced()
        queue.send(StubWaiter(runs.append, lambda: woken.append(1)))
        for run in runs:  # grows meanwhile
            run()
        assert woken == [1, 2]

    def test_result_on_no_loop(self) -> None:
        """S14: awaiting needs a running loop, and says so in the loop's own words."""
        with pytest.raises(RuntimeError, match="no running event loop"):
            _loops.current().make_waiter()

    def test_asyncio_exit_with_a_wait_pending(self) -> None:
        """S23, C26, C28: main returns while a task awaits; exit code 0, no traceback, no hang."""
        program = (
            "import asyncio, threading\nfrom pixtreme.infer.streams import StreamContext\n"
            "gate = threading.Event()\ncontext = StreamContext.open('cpu')\n"
            "handle = context.submit(context.stream.enqueue, gate.wait)\n"
            "async def main():\n    asyncio.ensure_future(wait())\n    await asyncio.sleep(0.01)\n"
            "async def wait():\n    await handle\n"
            "asyncio.run(main())\ngate.set()\nhandle.result(10)\nasyncio.run(wait())\n"
        )
        run_quietly(program)


@pytest.mark.slow
async def test_ten_thousand_handles() -> None:
    """S14, S25: 10,000 pending handles on 8 contexts, a task each: all resolve, in stream order per context."""
    contexts = [StreamContext.open("cpu", name=f"lane {number}") for number in range(8)]
    gate = Gate()
    finished: dict[StreamContext, list[int]] = {context: [] for context in contexts}
    values: dict[StreamContext, list[int]] = {context: [] for context in contexts}
    threads = threading.active_count()
    for context in contexts:
        gate.hold(context)
    numbers = {context: itertools.count() for context in contexts}

    async def take(context: StreamContext) -> None:
        number = next(numbers[context])  # in the order of submission; trio starts tasks in any order
        handle = context.submit(lambda: number)
        handle.call_when_done(lambda _: finished[context].append(number))
        values[context].append(await handle)

    async with anyio.create_task_group() as group:
        for _ in range(1250):
            for context in contexts:
                group.start_soon(take, context)
        while sum(context.in_flight for context in contexts) < 10_000:
            await anyio.lowlevel.checkpoint()
        assert threading.active_count() <= threads + 2 * len(contexts)
        gate.open()
    for context in contexts:
        assert finished[context] == list(range(1250))
        assert sorted(values[context]) == list(range(1250))
        await context.aclose()
