"""The same text on "cpu" and on a CUDA device, with equal pixels; host pixels in and out; enqueue (R1-R4, R15)."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import cupy
import motion_blur
import multi_stream
import numpy as np
import pytest
import two_runtimes
from helpers import WAIT_S, Boom, fail
from onnx_files import write_model

from pixtreme.infer import HostFrame, Pipeline, Stage, StreamContext, StreamPool, bind_onnx, onnx_module, staging
from pixtreme.infer.cuda_graph import CudaGraphSession
from pixtreme.infer.errors import BusyError, ContextError, ContractError
from pixtreme.infer.streams import EventHandle
from pixtreme.infer.testing import Latch

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]
DEVICES = ("cpu", "cuda:0")
PIXELS = np.random.default_rng(5).random((64, 96, 3), np.float32)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``.onnx`` file in the current folder; what runs it is a network of ours."""
    two_runtimes.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "network.onnx")


def bound_submit_sync(context: StreamContext, bound: Any) -> Any:
    return bound.submit_sync(PIXELS).result(WAIT_S)


def bound_submit_async(context: StreamContext, bound: Any) -> Any:
    async def main() -> Any:
        return await (await bound.submit_async(PIXELS))

    return anyio.run(main)


def context_submit_sync(context: StreamContext, bound: Any) -> Any:
    return context.submit_sync(bound, PIXELS).result(WAIT_S)


def context_submit_async(context: StreamContext, bound: Any) -> Any:
    async def main() -> Any:
        return await (await context.submit_async(bound, PIXELS))

    return anyio.run(main, backend="trio")


def pool_submit_sync(context: StreamContext, bound: Any) -> Any:
    return StreamPool([bound]).submit_sync(PIXELS).result(WAIT_S)


def stage(context: StreamContext, bound: Any, *, in_thread: bool = False) -> Any:
    async def main() -> Any:
        async with Pipeline(Stage(context, bound, in_thread=in_thread)) as pipeline:
            (result,) = [result async for result in pipeline.run([PIXELS])]
            return result

    return anyio.run(main)


def stage_in_thread(context: StreamContext, bound: Any) -> Any:
    return stage(context, bound, in_thread=True)


FORMS_THAT_WAIT = (
    bound_submit_sync,
    bound_submit_async,
    context_submit_sync,
    context_submit_async,
    pool_submit_sync,
    stage,
    stage_in_thread,
)


def blocks(file: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def blur(image: Any, *, out: Any) -> None:
    out[...] = image
    out[1:-1] = (image[:-2] + image[1:-1] + image[2:]) / 3


def test_every_readme_block(network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R4: each runs as it stands but for the device, and gives the same pixels on both."""
    seen = {}
    for device in DEVICES:
        names: dict[str, Any] = {"pixels": PIXELS, "blur": blur, "sharpen": blur}
        for block in blocks("README.md"):
            text = block.replace("print(second", "chained = (second")
            exec(compile(text.replace('"auto"', repr(device)), "README.md", "exec"), names)
        opened = partial(StreamContext.open, device)
        names["StreamContext"] = type("Opens", (), {"open": staticmethod(lambda *_, opened=opened, **o: opened(**o))})

        async def serve(names: dict[str, Any] = names) -> list[Any]:
            return [result async for result in names["serve"]([PIXELS * part for part in (1, 0.5, 0.25)])]

        async def video(names: dict[str, Any] = names, device: str = device) -> list[Any]:
            async with StreamContext.open(device) as context:
                bound = bind_onnx(context, "network.onnx", input_hw=(64, 96))
                return [pixels async for pixels in names["upscale_video"]([PIXELS] * 3, bound)]

        assert isinstance(names["result"], HostFrame)
        seen[device] = [names["result"].data, *asyncio.run(serve()), *asyncio.run(video())]
        assert capsys.readouterr().out == ""
    assert len(seen["cpu"]) == 7
    for one, two in zip(seen["cpu"], seen["cuda:0"], strict=True):
        assert isinstance(two, np.ndarray)
        np.testing.assert_array_equal(one, two)
        assert one.shape == (128, 192, 3)


def test_every_block_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: the modules of the guide, one without state and one with, give equal pixels on both devices."""
    results: dict[str, list[Any]] = {}
    for device in DEVICES:
        names: dict[str, Any] = {}
        for block in blocks("docs/writing-a-module.md"):
            if "verify_motion_blur" in block or "EventTimer" in block:
                continue  # the proof and its clock; they stand in a test of their own
            exec(compile(block, "writing-a-module.md", "exec"), names)
        results[device] = names["try_on"](device)
    assert len(results["cpu"]) >= 2
    for one, two in zip(results["cpu"], results["cuda:0"], strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
def test_the_temporal_module(tmp_path: Path, graph: bool) -> None:
    """R2: `examples/motion_blur.py`, with a reset in the middle."""
    artifact = motion_blur.BlurArtifact(motion_blur.write_artifact(tmp_path / "blur.json"))
    factory = motion_blur.FACTORY.graph_factory() if graph else motion_blur.FACTORY
    seen: dict[str, list[Any]] = {}
    for device in DEVICES:
        with StreamContext.open(device) as context:
            bound = context.bind(factory, artifact, precision="fp32", input_hw=(64, 96))
            results = []
            for number in range(5):
                image = HostFrame(data=PIXELS * number, channels="RGB", colorspace="sRGB", gamma="linear")
                weight = context.from_host(PIXELS[..., :1].copy()).result()
                results.append(context.to_host(bound(image, weight=weight, reset=number == 3)))
            seen[device] = [handle.result(WAIT_S).data for handle in results]
    for one, two in zip(seen["cpu"], seen["cuda:0"], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


def test_three_chained_streams() -> None:
    """R1: `examples/multi_stream.py`."""
    one, two = (multi_stream.main(device) for device in DEVICES)
    assert isinstance(two, np.ndarray)
    np.testing.assert_allclose(one, two, rtol=1e-5)


def double(image: Any, *, out: Any) -> None:
    out[...] = image * 2


class TestEnqueue:
    """R1 on the device."""

    def test_is_ordered_and_its_value_is_out(self, context: StreamContext, other: StreamContext) -> None:
        """R1: under a held stream nothing waits, on its own stream and on another; then all is right."""
        with Latch(context):
            source = context.from_host(np.ones(4, np.float32))
            first = context.enqueue(double, source, out=context.empty(4))
            second = other.enqueue(double, first, out=other.empty(4))
            total = other.enqueue(lambda v: v[0].sum(), [second])
            down = other.to_host(total)
            assert not down.done()
        assert float(down.result(WAIT_S)) == 16.0
        assert isinstance(first.result(WAIT_S), cupy.ndarray)

    def test_what_it_raises_comes_straight_out(self, context: StreamContext) -> None:
        """R1: functions are called now; the context stays usable and no slot is lost."""
        with pytest.raises(Boom):
            context.enqueue(fail)
        with pytest.raises(ContractError, match=r"context\.empty"):
            context.enqueue(double, 1, out=3)
        assert context.in_flight == 0
        assert context.submit(int).result(WAIT_S) == 0

    def test_records_while_the_stream_captures(self, context: StreamContext) -> None:
        """R1: an operation of a graph."""
        with context.use():
            source, target = cupy.ones(4, np.float32), cupy.zeros(4, np.float32)
            session = CudaGraphSession({"double": lambda: context.enqueue(double, source, out=target)})
            for value in (1, 5):
                context.enqueue(source.fill, value)
                session.replay("double")
                assert context.to_host(context.record(target)).result(WAIT_S).tolist() == [2 * value] * 4
            session.close()

    def test_what_a_callable_holds(self, context: StreamContext, other: StreamContext) -> None:
        """R15: closures, partials and bound methods whose array was made on another stream and dropped: 60 of 60."""

        class Holder:
            def __init__(self, array: Any) -> None:
                self.array = array

            def copy(self, out: Any) -> None:
                cupy.multiply(self.array, 1, out=out)

        def closure(array: Any, out: Any) -> Callable[[], Any]:
            return lambda: cupy.multiply(array, 1, out=out)

        makers: list[Callable[[Any, Any], Callable[[], Any]]] = [
            closure,
            lambda array, out: partial(cupy.multiply, array, 1, out=out),
            lambda array, out: partial(Holder(array).copy, out),
        ]
        right = 0
        with context.use():
            outs = [cupy.zeros(1000) for _ in range(60)]
        context.synchronize()
        with Latch(context):
            for number, out in enumerate(outs):
                array = other.enqueue(cupy.full, 1000, float(number)).result(WAIT_S)
                handle = context.submit(makers[number % 3](array, out), after=None)
                del array, handle
                other.enqueue(cupy.full, 1000, -1.0).result(WAIT_S)  # takes the block if it is free
        context.synchronize()
        right = sum(bool((out.get() == number).all()) for number, out in enumerate(outs))
        assert right == 60


@pytest.fixture
def bound(context: StreamContext, network: Path) -> Any:
    return bind_onnx(context, network, input_hw=(64, 96))


class TestHostPixels:
    """R4 on the device."""

    def test_a_buffer_may_be_filled_again(self, context: StreamContext, bound: Any) -> None:
        """R4: the pixels are those of the call, with the stream held."""
        buffer = np.empty((64, 96, 3), np.float32)
        handles: list[EventHandle[Any]] = []
        with Latch(context):
            for give in (lambda: HostFrame.rgb(buffer), lambda: buffer):
                for _ in range(3):
                    buffer[...] = len(handles)
                    handles.append(bound(give()))
            buffer[...] = -1
        assert [float(handle.result(WAIT_S).data.max()) for handle in handles] == list(range(6))

    def test_run_and_map_and_their_buffers(self, context: StreamContext, bound: Any) -> None:
        """R4: fifty requests at once on two buffers, in and out through one each; all buffers come back."""
        pool = staging.pool(context)
        limit, pool.limit = pool.limit, 2
        results: dict[int, Any] = {}

        async def one(number: int) -> None:
            results[number] = await bound.run(np.full((64, 96, 3), number, np.float32), host=True)

        async def main() -> None:
            async with anyio.create_task_group() as group:
                for number in range(50):
                    group.start_soon(one, number)
            seen = [result.data.max() async for result in bound.map((PIXELS * n for n in range(9)), host=True)]
            np.testing.assert_allclose(seen, [(PIXELS * n).max() for n in range(9)], rtol=1e-6)

        try:
            for backend in ("asyncio", "trio"):
                anyio.run(main, backend=backend)
                assert {number: result.data.max() for number, result in results.items()} == {n: n for n in range(50)}
                assert all(type(result) is HostFrame for result in results.values())
            context.synchronize()
            assert pool.in_use == 0
        finally:
            pool.limit = limit

    def test_without_a_buffer(self, context: StreamContext, bound: Any) -> None:
        """R4: the forms that do not wait say which do; nothing is enqueued and nothing is lost."""
        pool = staging.pool(context)
        limit, pool.limit = pool.limit, 1
        try:
            with Latch(context):
                handle = bound(PIXELS)
                with pytest.raises(BusyError, match=r"bound\.run"):
                    bound(PIXELS)
            assert handle.result(WAIT_S).data.shape == (128, 192, 3)
            assert bound.run_sync(PIXELS, host=True).data.shape == (128, 192, 3)
            with pytest.raises(ContractError):
                bound.run_sync(PIXELS[:3])
            context.synchronize()
            assert (pool.in_use, context.in_flight) == (0, 0)
        finally:
            pool.limit = limit

    @pytest.mark.parametrize("form", FORMS_THAT_WAIT, ids=lambda form: form.__name__)
    def test_waiting_for_a_buffer(self, context: StreamContext, bound: Any, form: Any) -> None:
        """R4, A12: every form that waits for a slot waits for a page-locked buffer as well."""
        pool = staging.pool(context)
        limit, pool.limit = pool.limit, 1
        try:
            with Latch(context):
                first = bound(PIXELS)
                results: list[Any] = []
                thread = threading.Thread(target=lambda: results.append(form(context, bound)))
                thread.start()
                deadline = time.monotonic() + WAIT_S
                while not pool.slots.queue and time.monotonic() < deadline:
                    os.sched_yield()
                assert pool.slots.queue
            thread.join(WAIT_S)
            assert first.result(WAIT_S).data.shape == (128, 192, 3)
            (result,) = results
            assert result.shape == (128, 192, 3)
            context.synchronize()
            assert (pool.in_use, context.in_flight) == (0, 0)
        finally:
            pool.limit = limit

    @pytest.mark.parametrize("devices", [["cuda:0"] * 2, ["cuda:0", "cpu"]], ids=["one kind", "two kinds"])
    def test_a_pool(self, network: Path, devices: list[str]) -> None:
        """R4: requests and `map`, on members of one device and of both kinds."""
        artifact = onnx_module.OnnxArtifact(network)

        async def main() -> list[float]:
            pool = await StreamPool.open_async(
                devices, onnx_module.FACTORY, artifact, precision="fp32", input_hw=(64, 96), max_in_flight=2
            )
            async with pool:
                images = [np.full((64, 96, 3), number, np.float32) for number in range(12)]
                gathered = await asyncio.gather(*(pool.run(image, host=True) for image in images))
                mapped = [result async for result in pool.map(images, host=True)]
                assert all(isinstance(result, HostFrame) for result in (*gathered, *mapped))
                return [float(result.data.max()) for result in (*gathered, *mapped)]

        assert asyncio.run(main()) == [float(number) for number in (*range(12), *range(12))]

    def test_pixels_of_the_other_device_by_handle(self, context: StreamContext, bound: Any) -> None:
        """R4: a pending handle of the host runtime is no host pixels: await it first, says the error."""
        with StreamContext.open("cpu") as host:
            with Latch(host):
                handle = host.enqueue(np.copy, PIXELS)
                with pytest.raises(ContextError, match="await the handle"):
                    bound(handle)
            assert bound(handle.result(WAIT_S)).result(WAIT_S).data.shape == (128, 192, 3)


@pytest.fixture(autouse=True)
def nothing_is_left(context: StreamContext) -> Iterator[None]:
    yield
    context.synchronize()
    assert staging.pool(context).in_use == 0
