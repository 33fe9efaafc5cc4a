"""Staging on the host runtime (A11), and its pool (A12). tests/cuda/test_cuda_staging.py has the CUDA side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import WAIT_S, Gate, frame

from pixtreme.infer import staging
from pixtreme.infer.errors import ContextError, ContractError
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.runtimes.host import RUNTIME
from pixtreme.infer.streams import StreamContext
from pixtreme.infer.streams._semaphore import FairSemaphore

RGB: dict[str, Any] = {"channels": "RGB", "colorspace": "sRGB", "gamma": "sRGB"}


def image(seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((4, 6, 3), np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "uint16", "uint32"])
def test_there_and_back(context: StreamContext, dtype: str) -> None:
    """A11: upload gives a frame with storage of its own, download an array with storage of its own."""
    pixels = (image() * 200).astype(dtype)
    handle = staging.upload(context, pixels, **RGB, matrix="BT.709")
    uploaded: FrameLike = handle.result(WAIT_S)
    assert isinstance(uploaded, HostFrame)
    assert (uploaded.channels, uploaded.matrix) == (("R", "G", "B"), "BT.709")
    back = staging.download(context, handle).result(WAIT_S)
    np.testing.assert_array_equal(back, pixels)
    assert not np.shares_memory(uploaded.data, pixels)
    assert not np.shares_memory(back, uploaded.data)
    np.testing.assert_array_equal(staging.download(context, uploaded).result(WAIT_S), pixels)


def test_no_host_wait(context: StreamContext, gate: Gate) -> None:
    """A11: both return at once while the stream is held, and strided sources are fine."""
    gate.hold(context)
    pixels = image()[:, ::-1]
    up = staging.upload(context, pixels, **RGB)
    down = staging.download(context, up)
    assert not down.done()
    gate.open()
    np.testing.assert_array_equal(down.result(WAIT_S), pixels)


def test_inside_a_submission(context: StreamContext) -> None:
    """A11: copy_in and copy_out are the same copies for code that runs inside a scope."""
    handle = context.submit(lambda: staging.copy_out(staging.copy_in(image(), **RGB)))
    np.testing.assert_array_equal(handle.result(WAIT_S), image())
    with context.use():
        result = staging.copy_out(frame(3.0))
        context.record(result).result(WAIT_S)
    assert result.max() == 3.0
    for call in (lambda: staging.copy_in(image(), **RGB), lambda: staging.copy_out(frame())):
        with pytest.raises(ContextError, match="inside no scope"):
            call()


@pytest.mark.parametrize("verb", ["upload", "copy_in", "from_host"])
def test_a_refilled_array(context: StreamContext, gate: Gate, verb: str) -> None:
    """R4, A11: the pixels count as they are at the call, on every device: one array serves for every frame."""
    array = np.empty((4, 6, 3), np.float32)
    gate.hold(context)
    handles: list[Any] = []
    for number in range(3):
        array[...] = number
        if verb == "upload":
            handles.append(staging.upload(context, array, **RGB))
        elif verb == "copy_in":
            handles.append(context.submit(staging.copy_in, array, **RGB))
        else:
            handles.append(context.from_host(HostFrame(data=array, **RGB)))
    gate.open()
    assert [handle.result(WAIT_S).data.max() for handle in handles] == [0, 1, 2]


@pytest.mark.anyio
async def test_async_forms(context: StreamContext) -> None:
    """A11, A12: the forms that wait, without blocking and (refused on a loop) with."""
    up = await staging.upload_async(context, image(), **RGB)
    down = await staging.download_async(context, up)
    np.testing.assert_array_equal(await down, image())
    with pytest.raises(ContextError, match="freeze the event loop"):
        staging.upload_sync(context, image(), **RGB)


def test_sync_forms(context: StreamContext) -> None:
    """A12: the blocking forms."""
    handle = staging.download_sync(context, staging.upload_sync(context, image(), **RGB))
    np.testing.assert_array_equal(handle.result(WAIT_S), image())


@pytest.mark.parametrize(
    ("array", "changes", "words"),
    [
        ([[1.0]], {}, "numpy.ndarray"),
        (np.zeros((4, 6), np.float32), {}, "rank 3"),
        (np.zeros((4, 6, 3)), {}, "float32"),
        (np.zeros((4, 6, 3), np.float32), {"channels": "RGBA"}, "channel"),
        (np.zeros((4, 6, 3), np.float32), {"gamma": "nope"}, "gamma"),
    ],
)
def test_malformed_uploads(context: StreamContext, array: Any, changes: Any, words: str) -> None:
    """A11: the frame's rules, before anything is enqueued."""
    with pytest.raises(ContractError, match=words):
        staging.upload(context, array, **(RGB | changes))
    assert context.in_flight == 0


def test_malformed_downloads(context: StreamContext) -> None:
    """A11: what cannot be read here is refused by name."""
    with pytest.raises(ContractError, match="frame"):
        staging.download(context, object())  # type: ignore[arg-type]


def test_a_pools_buffers_are_used_again() -> None:
    """A12: the smallest that fits is taken, a small one makes room for a larger one; the limit is kept."""
    pool = staging.StagingPool(RUNTIME)
    small, large = pool.take(10), pool.take(100)
    for buffer in (large, small):
        assert pool.slots.try_take()
        pool.give_back(buffer)
    assert pool.take(5) is small
    assert pool.take(50) is large
    assert pool.slots.try_take()
    pool.give_back(small)
    assert pool.take(20) is not small
    assert pool._free == []
    pool.limit = 1
    for buffer in (large, small):
        assert pool.slots.limit == 1
        pool.slots._promised += 1
        pool.give_back(buffer)
    assert len(pool._free) == 1
    pool.clear()
    assert pool._free == []
    for limit in (0, -1, True, 1.5, None):
        with pytest.raises(ContractError, match="a positive int"):
            pool.limit = limit
    assert pool.limit == 1
    assert "0 of 1 buffers in use" in repr(pool)


def test_slots_are_given_in_order_of_asking() -> None:
    """A12, S10: first come, first served; a request taken back makes way."""
    slots, order = FairSemaphore(1), []
    assert slots.try_take()
    assert not slots.try_take()
    tickets = [slots.request(lambda number=number: order.append(number)) for number in range(4)]  # type: ignore[misc]
    slots.withdraw(tickets[1])
    for _ in range(3):
        slots.give_back()
    assert order == [0, 2, 3]
    slots.give_back()
    assert slots.out == 0


def test_pools_are_one_a_device(context: StreamContext) -> None:
    """A12: by name or by context."""
    assert staging.pool("cpu") is staging.pool(context)
    with pytest.raises(ContextError, match="available here are"):
        staging.pool("cuda:7")
