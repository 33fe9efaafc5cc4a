"""Pools on the host runtime (A8-A10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import motion_blur
import pytest
from helpers import WAIT_S, Boom, Gate, fail, frame
from motion_blur import BlurArtifact
from samples import small_model

from pixtreme.infer.aio import StreamPool
from pixtreme.infer.errors import BusyError, ClosedError, ContextError, ContractError, PipelineError, StreamFault
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact
from pixtreme.infer.streams import StreamContext

pytestmark = pytest.mark.anyio


@pytest.fixture
def artifact(tmp_path: Path) -> OnnxArtifact:
    return small_model(tmp_path / "small.onnx")


def opened(artifact: OnnxArtifact, members: int = 3, **options: Any) -> StreamPool[Any]:
    return StreamPool.open(["cpu"] * members, FACTORY, artifact, precision="fp32", input_hw=(4, 6), **options)


@pytest.fixture
def pool(artifact: OnnxArtifact) -> StreamPool[Any]:
    """Three members, for an `async with` of the test's own (opening reads files, which no loop may do)."""
    return opened(artifact)


@pytest.fixture
def bounded(artifact: OnnxArtifact) -> StreamPool[Any]:
    """Two members that take one request each."""
    return opened(artifact, 2, max_in_flight=1)


def value(result: Any) -> float:
    return float(result.data.max())


async def test_requests_go_to_the_idlest_member(pool: StreamPool[Any], gate: Gate) -> None:
    """A8, A9: one context and instance a device entry; a held member gets no more than its turn."""
    async with pool:
        assert [member.context.device for member in pool.members] == ["cpu"] * 3
        assert len({member.context for member in pool.members}) == 3
        gate.hold(pool.members[0].context)
        handles = [pool.submit(frame(float(number))) for number in range(9)]
        busiest = pool.members[0].context.in_flight
        for handle in handles:
            if handle.context is not pool.members[0].context:
                await handle
        later = []
        for number in range(8):
            later.append(pool.submit(frame(float(number))))
            if later[-1].context is pool.members[0].context:
                break  # the assertion below fails, and nothing waits at the gate
            await later[-1]
        still = pool.members[0].context.in_flight
        gate.open()
        assert 1 <= still == busiest <= 3
        assert pool.members[0].context not in [handle.context for handle in later]
        assert [value(await handle) for handle in handles] == [float(number) for number in range(9)]
    assert all(member.context.closed for member in pool.members)


async def test_map_keeps_order_and_bounds_what_is_under_way(pool: StreamPool[Any], gate: Gate) -> None:
    """A9: results in source order although one member is held; no more than two a member are under way."""
    read = 0

    def source() -> Any:
        nonlocal read
        for number in range(30):
            read += 1
            yield frame(float(number))

    async with pool:
        gate.hold(pool.members[1].context)
        run = pool.map(source())
        with anyio.move_on_after(0.1):
            while True:
                await anext(run)
        assert read <= 6 + 3  # what was delivered before the held one, and the bound
        gate.open()
        rest = [value(result) async for result in run]
        assert rest == [float(number) for number in range(30 - len(rest), 30)]


async def test_at_the_bound(bounded: StreamPool[Any], gate: Gate) -> None:
    """A9, S10: at every member's bound submit refuses, submit_async and map wait."""
    async with bounded:
        for member in bounded.members:
            gate.hold(member.context)
        first = [bounded.submit(frame(1.0)) for _ in bounded.members]
        with pytest.raises(BusyError):
            bounded.submit(frame())
        with anyio.move_on_after(0.02) as scope:
            await bounded.submit_async(frame())
        assert scope.cancelled_caught
        gate.open()
        assert value(await (await bounded.submit_async(frame(2.0)))) == 2.0
        assert [value(await handle) for handle in first] == [1.0, 1.0]
        results = [value(result) async for result in bounded.map(frame(float(number)) for number in range(20))]
        assert results == [float(number) for number in range(20)]


def _break(context: StreamContext) -> None:
    context.submit(context.stream.enqueue, fail).exception(WAIT_S)


async def test_a_faulted_member_is_taken_out(pool: StreamPool[Any]) -> None:
    """A10: its items fail with the cause, the others go on; with none left submission fails at once."""
    async with pool:
        broken = pool.members[1].context
        await anyio.to_thread.run_sync(_break, broken)
        assert len(pool.live) == 2
        handles = [pool.submit(frame(float(number))) for number in range(10)]
        assert broken not in {handle.context for handle in handles}
        assert [value(await handle) for handle in handles] == [float(number) for number in range(10)]
        for member in pool.live:
            await anyio.to_thread.run_sync(_break, member.context)
        with pytest.raises(StreamFault) as caught:
            pool.submit(frame())
        assert isinstance(caught.value.__cause__, Boom)
        with pytest.raises(PipelineError) as failed:
            async for _ in pool.map([frame()]):
                pass
        assert isinstance(failed.value.__cause__, StreamFault)


async def test_an_item_on_a_member_that_faults(pool: StreamPool[Any], gate: Gate) -> None:
    """A10: what was under way on the member fails, by index and with the cause."""
    async with pool:
        for member in pool.members:
            gate.hold(member.context)
        pool.members[2].context.stream.enqueue(fail)
        run = pool.map(frame(float(number)) for number in range(6))
        with anyio.move_on_after(0.05):
            await anext(run)
        gate.open()
        results = []
        with pytest.raises(PipelineError) as caught:
            async for result in run:
                results.append(value(result))
        assert results == [float(number) for number in range(caught.value.index)]
        assert caught.value.stage == pool.members[2].context.name
        assert isinstance(caught.value.__cause__.__cause__, Boom)  # type: ignore[union-attr]
        assert len([result async for result in pool.map(frame() for _ in range(8))]) == 8  # the others go on


async def test_a_frames_own_fault_takes_no_member_out(pool: StreamPool[Any], context: StreamContext) -> None:
    """A10: a handle that faulted elsewhere is refused, and every member stays."""
    bad = context.submit(context.stream.enqueue, fail)
    async with pool:
        with pytest.raises(StreamFault):
            await bad
        with pytest.raises(StreamFault):
            pool.submit(bad)
        assert len(pool.live) == 3


async def test_after_closing(pool: StreamPool[Any]) -> None:
    """A8: a closed pool takes nothing; map needs the block."""
    with pytest.raises(ClosedError, match="not entered"):
        pool.map([frame()])
    async with pool:
        assert value(await pool.submit(frame(1.0))) == 1.0
    with pytest.raises(ClosedError, match="closed pool"):
        pool.submit(frame())
    await pool.aclose()


def test_a_synchronous_program(artifact: OnnxArtifact) -> None:
    """A8: without an event loop: with, submit, result."""
    with opened(artifact, 2) as pool:
        handles = [pool.submit(frame(float(number))) for number in range(6)]
        assert [value(handle.result(WAIT_S)) for handle in handles] == [float(number) for number in range(6)]
        assert "2 live members of 2" in repr(pool)
    pool.close()


def test_temporal_factories_are_refused(tmp_path: Path) -> None:
    """A8: a temporal factory is refused with the reason, and nothing is opened."""
    blur = BlurArtifact(motion_blur.write_artifact(tmp_path / "blur.json"))
    with pytest.raises(ContractError, match="lives in one instance"):
        StreamPool.open(["cpu"], motion_blur.FACTORY, blur, precision="fp32", input_hw=(4, 6))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "error"),
    [([], ContractError), ("cpu", ContractError), (None, ContractError), (["cpu", "cuda:9"], ContextError)],
)
def test_malformed_devices(artifact: OnnxArtifact, devices: Any, error: Any) -> None:
    """A8: nothing is left open where a device cannot be used (the guard of the suite looks)."""
    with pytest.raises(error):
        StreamPool.open(devices, FACTORY, artifact, precision="fp32", input_hw=(4, 6))


async def test_a_waiting_request_takes_the_first_free_member(bounded: StreamPool[Any]) -> None:
    """R11: members 0 and 1 are full; whichever is freed takes the request, and the other's queue is left empty."""
    async with bounded:
        for freed in (1, 0):
            gates = Gate(), Gate()
            full = []
            for member, gate in zip(bounded.members, gates, strict=True):
                gate.hold(member.context)
                full.append(member(frame(1.0)))
            results: list[Any] = []

            async def ask(results: list[Any] = results) -> None:
                results.append(await bounded.submit_async(frame(5.0)))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                assert results == []
                gates[freed].open()
                await full[freed]
            assert results[0].context is bounded.members[freed].context
            assert value(await results[0]) == 5.0
            gates[1 - freed].open()
            await full[1 - freed]
            assert [member.context.slots.out for member in bounded.members] == [0, 0]


async def test_a_member_that_is_closed_while_a_request_waits(bounded: StreamPool[Any]) -> None:
    """R11: the request goes to the other member, and the slot that the closed one had promised is given back."""
    async with bounded:
        gates = Gate(), Gate()
        full = []
        for member, gate in zip(bounded.members, gates, strict=True):
            gate.hold(member.context)
            full.append(member(frame(1.0)))
        results: list[Any] = []

        async def ask() -> None:
            results.append(await bounded.submit_async(frame(5.0)))

        first, second = bounded.members
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            first._close(first._opened)  # its work is held: close() itself would wait for that
            gates[0].open()
            await full[0]
            await anyio.wait_all_tasks_blocked()
            gates[1].open()
        assert results[0].context is second.context
        assert value(await results[0]) == 5.0
        assert [member.context.slots.out for member in bounded.members] == [0, 0]


async def test_a_cancelled_request_leaves_no_queue(bounded: StreamPool[Any], gate: Gate) -> None:
    """R11: it gives back what it was promised on any member."""
    async with bounded:
        for member in bounded.members:
            gate.hold(member.context)
            member(frame())
        with anyio.move_on_after(0.01) as scope:
            await bounded.submit_async(frame())
        assert scope.cancelled_caught
        assert [len(member.context.slots.queue) for member in bounded.members] == [0, 0]
        gate.open()
        for _ in range(4):
            assert value(await (await bounded.submit_async(frame(2.0)))) == 2.0
