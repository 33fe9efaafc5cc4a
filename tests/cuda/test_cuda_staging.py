"""Staging on CUDA: page-locked buffers and asynchronous copies (A11, A12); pipelines and pools there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import cupy
import numpy as np
import pytest
from helpers import WAIT_S

from pixtreme.infer import staging
from pixtreme.infer.aio import Pipeline, Stage
from pixtreme.infer.errors import BusyError, ContextError, PipelineError
from pixtreme.infer.runtimes import pci_bus_id
from pixtreme.infer.streams import StreamContext

pytestmark = pytest.mark.cuda
RGB: dict[str, Any] = {"channels": "RGB", "colorspace": "sRGB", "gamma": "sRGB"}


def image(seed: int, *, hw: tuple[int, int] = (32, 48)) -> Any:
    return np.random.default_rng(seed).random((*hw, 3), np.float32)


@pytest.fixture
def two_buffers(context: StreamContext) -> Iterator[staging.StagingPool]:
    """The device's pool, with two buffers."""
    pool = staging.pool(context)
    limit, pool.limit = pool.limit, 2
    yield pool
    pool.limit = limit


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_there_and_back(context: StreamContext, dtype: str) -> None:
    """A11: pixels go through page-locked memory, in stream order; a strided frame comes back packed."""
    pixels = (image(1) * 200).astype(dtype)
    up = staging.upload(context, pixels, **RGB)
    np.testing.assert_array_equal(staging.download(context, up).result(WAIT_S), pixels)
    frame = up.result(WAIT_S)
    assert isinstance(frame.data, cupy.ndarray)
    flipped = context.submit(lambda: cupy.from_dlpack(frame)[:, ::-1])
    np.testing.assert_array_equal(staging.download(context, flipped).result(WAIT_S), pixels[:, ::-1])
    assert staging.pool(context).in_use == 0


def test_no_host_wait_and_a_source_that_changes(context: StreamContext, emulator: Any) -> None:
    """A11: both return while the stream is held; the upload has its own copy of the pixels by then."""
    emulator.hold(context.stream)
    pixels = image(2)
    kept = pixels.copy()
    up = staging.upload(context, pixels, **RGB)
    down = staging.download(context, up)
    pixels[...] = -1
    assert not down.done()
    emulator.release()
    np.testing.assert_array_equal(down.result(WAIT_S), kept)


def test_a_buffer_comes_back_with_its_event_and_not_before(
    context: StreamContext, emulator: Any, two_buffers: staging.StagingPool
) -> None:
    """A12: while copies are under way their buffers are out; the pool refuses a third; then all come back."""
    emulator.hold(context.stream)
    handles = [staging.upload(context, image(seed), **RGB) for seed in (1, 2)]
    assert two_buffers.in_use == 2
    with pytest.raises(BusyError, match="2 of 2 buffers"):
        staging.upload(context, image(3), **RGB)
    assert context.in_flight == 2
    del handles  # nobody waits for them, and nobody holds them
    emulator.release()
    context.synchronize()
    assert two_buffers.in_use == 0


def test_waiting_for_a_buffer(context: StreamContext, emulator: Any, two_buffers: staging.StagingPool) -> None:
    """A12: the blocking form waits in a thread, the async one on the loop; both go on when a copy is over."""
    emulator.hold(context.stream)
    first = [staging.upload(context, image(seed), **RGB) for seed in (1, 2)]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(staging.upload_sync(context, image(3), **RGB)))
    thread.start()

    async def main() -> Any:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, emulator.release)
            frame = await (await staging.upload_async(context, image(4), **RGB))
            return await (await staging.download_async(context, frame))

    np.testing.assert_array_equal(anyio.run(main), image(4))
    thread.join(WAIT_S)
    np.testing.assert_array_equal(results[0].result(WAIT_S).data.get(), image(3))
    assert len(first) == 2
    context.synchronize()
    assert two_buffers.in_use == 0


def test_a_failed_copy_gives_its_buffer_back(context: StreamContext, two_buffers: staging.StagingPool) -> None:
    """A12, S6: a submission that raises after a copy keeps the buffer until the copy is over, then returns it."""

    def call() -> None:
        staging.copy_in(image(1), **RGB)
        raise LookupError

    for _ in range(5):
        with pytest.raises(LookupError):
            context.submit(call)
        context.synchronize()
    with context.use():
        staging.copy_in(image(1), **RGB)
    context.synchronize()
    assert two_buffers.in_use == 0


def test_a_faulted_copy_gives_its_buffer_back(emulator: Any) -> None:
    """A12, S18: on a broken device the buffers come back, too, and the handle says what broke."""
    context = StreamContext.open("cuda:0")
    emulator.hold(context.stream)
    emulator.fault(context.stream)
    handle = staging.download(context, staging.upload(context, image(1), **RGB))
    emulator.release()
    assert handle.exception(WAIT_S) is not None
    emulator.reset()
    context.close()
    assert staging.pool("cuda:0").in_use == 0


def test_a_pending_download_is_not_handed_over(context: StreamContext, other: StreamContext, emulator: Any) -> None:
    """A11: its value is filled by the host: no stream can wait for that, so it is refused until it is complete."""
    emulator.hold(context.stream)
    down = staging.download(context, staging.upload(context, image(1), **RGB))
    for target in (other, context):
        with pytest.raises(ContextError, match="not filled yet"):
            target.submit(lambda array: None, down)
    for stream in (other, other.stream, cupy.cuda.Stream(non_blocking=True)):
        with pytest.raises(ContextError, match="not filled yet"):
            down.on(stream)
    emulator.release()
    down.result(WAIT_S)
    again = staging.upload(other, down.on(other), **RGB)
    np.testing.assert_array_equal(again.result(WAIT_S).data.get(), image(1))


def _scaled(frame: Any, factor: float) -> Any:
    data = cupy.from_dlpack(frame) * np.float32(factor)
    return StreamContext.current().core_stream.runtime.make_frame(data, **RGB)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_pipeline_across_runtimes(backend: str, in_thread: bool, two_buffers: staging.StagingPool) -> None:
    """A1, A7, A12: host decode, upload, compute, download, host encode: bridged by awaiting the host side, in order;
    with fewer buffers than items on their way a stage waits for one."""

    async def main() -> list[Any]:
        host = StreamContext.open("cpu", name="decode")
        contexts = [host, *(StreamContext.open("cuda:0", name=name) for name in ("in", "compute", "out"))]

        def decode(seed: int) -> Any:
            pixels = np.empty((32, 48, 3), np.float32)
            host.stream.enqueue(lambda: np.copyto(pixels, image(seed)))
            return pixels

        def encode(pixels: Any) -> Any:
            result = np.empty(1)
            host.stream.enqueue(lambda: np.copyto(result, pixels.sum(dtype=np.float64)))
            return result

        async with Pipeline(
            Stage(host, decode),
            Stage(contexts[1], staging.Upload(**RGB), in_thread=in_thread),
            Stage(contexts[2], lambda frame: _scaled(frame, 2.0)),
            Stage(contexts[3], staging.Download()),
            Stage(host, encode),
            depth=5,
        ) as pipeline:
            results = [float(result[0]) async for result in pipeline.run(range(40))]
        for context in contexts:
            await context.aclose()
        return results

    expected = [float((image(seed) * np.float32(2)).sum(dtype=np.float64)) for seed in range(40)]
    assert anyio.run(main, backend=backend) == expected
    assert two_buffers.in_use == 0


@pytest.mark.parametrize("buffers", [4, 3])
def test_copies_inside_a_stage_of_ones_own(context: StreamContext, emulator: Any, buffers: int) -> None:
    """A12: two copies an item and two items at once want four buffers; with fewer such a stage meets BusyError."""
    pool = staging.pool(context)
    limit, pool.limit = pool.limit, buffers
    calls: list[int] = []

    def there_and_back(number: int) -> Any:
        try:
            return staging.copy_out(staging.copy_in(image(number), **RGB))
        finally:
            calls.append(number)
            if len(calls) == 2:  # until then nothing of the first item is over
                emulator.release()

    async def main() -> list[Any]:
        async with Pipeline(Stage(context, there_and_back), depth=2) as pipeline:
            return [pixels async for pixels in pipeline.run(range(6))]

    emulator.hold(context.stream)
    try:
        if buffers == 4:
            np.testing.assert_array_equal(anyio.run(main), [image(number) for number in range(6)])
        else:
            with pytest.raises(PipelineError) as caught:
                anyio.run(main)
            assert caught.value.index == 1
            assert isinstance(caught.value.__cause__, BusyError)
    finally:
        pool.limit = limit
    assert pool.in_use == 0


STORM = """
import random, sys
from functools import partial
import anyio, cupy, numpy as np
from pixtreme.infer import staging
from pixtreme.infer.aio import Pipeline, Stage
from pixtreme.infer.streams import StreamContext, _scopes
backend, mode = sys.argv[1:]
if mode == "early":  # a buffer is given back when its copy is enqueued, not when it is over
    _scopes.add_epilogue = lambda stream, call, fills_host=False: call()
generator, rgb = random.Random(6), dict(channels="RGB", colorspace="sRGB", gamma="sRGB")
wrong = delivered = left = 0

def image(number):
    return np.full((16, 16, 3), number + 1, np.float32)

def double(frame):
    return StreamContext.current().core_stream.runtime.make_frame(cupy.from_dlpack(frame) * np.float32(2), **rgb)

async def main():
    global wrong, delivered, left
    contexts = [StreamContext.open("cuda:0") for _ in range(3)]
    calls = (staging.Upload(**rgb), double, staging.Download())
    stages = [Stage(context, call) for context, call in zip(contexts, calls)]
    for _ in range(100):
        expected = 0
        with anyio.move_on_after(generator.choice([None, None, 0.0, 0.005, 0.02])):
            async with Pipeline(*stages, depth=generator.randint(1, 8)) as pipeline:
                run, leave = pipeline.run(image(number) for number in range(30)), generator.choice([1, 5, 100, 100])
                while expected < leave:
                    with anyio.move_on_after(generator.choice([None, None, 0.0, 0.001])):
                        try:
                            result = await anext(run)
                        except StopAsyncIteration:
                            break
                        wrong += int((result != 2 * image(expected)).any())
                        expected += 1
                        delivered += 1
        left += sum(context.in_flight for context in contexts) + staging.pool("cuda:0").in_use
    for context in contexts:
        await context.aclose()

anyio.run(main, backend=backend)
print(wrong, delivered, left)
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancel_storm_on_the_device(backend: str, emulator: Any) -> None:
    """A5, A12: cancelled, timed out and left early at random, with random delays and poisoned memory: no result is
    wrong, doubled or out of order, every buffer comes back; with buffers given back early, results are wrong."""
    found = {}
    for mode in ("keep", "early"):
        done = subprocess.run(
            [sys.executable, "-c", STORM, backend, mode],
            env=os.environ | {"EMU_DELAY_US": "300", "EMU_POISON": "1", "EMU_SEED": "6"},
            capture_output=True,
            text=True,
            timeout=55,
        )
        assert (done.returncode, done.stderr) == (0, "")
        found[mode] = [int(number) for number in done.stdout.split()]
    wrong, delivered, left = found["keep"]
    assert (wrong, left) == (0, 0)
    assert delivered > 500
    assert found["early"][0] > 0


def test_current_on_another_device(emulator: Any) -> None:
    """S5: the caller's current stream is waited for although it is on another device than the context."""
    program = """
import ctypes, cupy
from pixtreme.infer.streams import StreamContext
library = ctypes.CDLL("libcudart.so.12")
flag = ctypes.c_int(0)
with StreamContext.open("cuda:0") as context:
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        assert library.emu_block(ctypes.c_void_p(stream.ptr), ctypes.byref(flag)) == 0
        with stream:
            ordered = context.submit(lambda: None)
            free = StreamContext.open("cuda:0")
            alone = free.submit(lambda: None, after=None)
    alone.result(20)
    print(ordered.done())
    flag.value = 1
    ordered.result(20)
    free.close()
"""
    environment = os.environ | {"EMU_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, env=environment)
    assert (done.stdout.split(), done.stderr) == (["False"], "")


def test_a_device_has_a_pci_address() -> None:
    """V13: what NVML finds the board by."""
    address = pci_bus_id("cuda:0")
    assert len(address.split(":")) == 3
