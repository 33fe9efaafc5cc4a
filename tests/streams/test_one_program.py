"""One text for every device: storage, host pixels in and out, opening and closing without blocking, dropped work."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from helpers import WAIT_S, Boom, Gate, LogRecords, fail, frame
from samples import small_model

import pixtreme.infer
from pixtreme.infer import HostFrame, StreamContext, StreamPool, bind_onnx, bind_onnx_async
from pixtreme.infer.contracts import GpuArrayParamContract
from pixtreme.infer.errors import (
    BusyError,
    ClosedError,
    ContextError,
    ContractError,
    LoopBlockedWarning,
    StreamFault,
    WorkCancelled,
)
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact, OnnxFactory
from pixtreme.infer.runtimes import _devices
from pixtreme.infer.streams import BoundInference

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> OnnxArtifact:
    return small_model(tmp_path / "small.onnx")


@pytest.fixture
def bound(context: StreamContext, model: OnnxArtifact) -> BoundInference[Any]:
    return context.bind(FACTORY, model, precision="fp32", input_hw=(4, 6))


class TestStorage:
    """R2: what a module author needs instead of a line about devices."""

    def test_memory_and_frames(self, context: StreamContext, gate: Gate) -> None:
        """R2: an array of the device, a frame around it, filled in stream order."""
        gate.hold(context)
        assert context.xp is np
        pixels = context.empty((4, 6, 3))
        image = context.frame(pixels, channels="RGB", colorspace="sRGB", gamma="sRGB")
        assert isinstance(image, HostFrame)
        assert image.data is pixels
        handle = context.enqueue(lambda *, out: out.data.fill(2), out=image)
        gate.open()
        assert handle.result(WAIT_S).data.min() == 2
        assert context.empty(3).shape == (3,)
        assert context.empty((2, 2), np.uint8).dtype == np.uint8

    def test_a_frame_of_pending_pixels_stays_guarded(
        self, context: StreamContext, other: StreamContext, gate: Gate
    ) -> None:
        """R2, R3: wrapping is no way round the guard, and modules take the frame."""
        gate.hold(context)
        handle = context.enqueue(lambda *, out: out.fill(3), out=context.empty((4, 6, 3)))
        framed = other.submit(other.frame, handle, channels="RGB", colorspace="sRGB", gamma="sRGB")
        with pytest.raises(ContextError, match=r"enqueue\("):
            other.submit(lambda f: f.data.mean(), framed)
        with pytest.raises(ContractError, match="fill it"):
            context.frame(handle, channels="RGB", colorspace="sRGB", gamma="sRGB")
        gate.open()
        assert framed.result(WAIT_S).data.mean() == 3

    @pytest.mark.parametrize("value", [None, 3, "pixels", [1.0], object()])
    def test_only_pixels_travel(self, context: StreamContext, value: object) -> None:
        """R2: anything else is refused with what is accepted; nothing is in flight."""
        for move in (context.from_host, context.to_host):
            with pytest.raises(ContractError):
                move(value)
        assert context.in_flight == 0

    def test_there_and_back(self, context: StreamContext, gate: Gate) -> None:
        """R2: pixels count as they were at the call; a handle is taken; metadata travels."""
        gate.hold(context)
        pixels = np.full((4, 6, 3), 1, np.float32)
        handles = [context.from_host(pixels), context.from_host(HostFrame.rgb(pixels))]
        pixels[...] = 9
        back = [context.to_host(handle) for handle in handles]
        gate.open()
        assert back[0].result(WAIT_S).max() == 1
        assert back[1].result(WAIT_S).data.max() == 1
        assert back[1].result().channels == ("R", "G", "B")

    def test_a_closed_context_allocates_nothing(self) -> None:
        """R2: as everything else after close()."""
        context = StreamContext.open("cpu")
        context.close()
        with pytest.raises(ClosedError):
            context.empty(3)

    @pytest.mark.parametrize(
        "file", ["examples/motion_blur.py", "examples/multi_stream.py", "src/pixtreme/infer/onnx_module.py"]
    )
    def test_authors_write_no_line_about_devices(self, file: str) -> None:
        """R2: no CuPy, no underscore name of ours, no comparison with a device's name, no ``stream.enqueue``."""
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not any("cupy" in name for name in names)
                assert file.startswith("src") or not any("._" in name for name in names)
            if isinstance(node, ast.Compare):
                assert not any(
                    isinstance(one, ast.Constant) and one.value in ("cpu", "cuda") for one in node.comparators
                )
            if isinstance(node, ast.Attribute) and node.attr == "enqueue" and isinstance(node.value, ast.Attribute):
                assert node.value.attr != "stream"


class TestHostPixels:
    """R4: host pixels in, host pixels out."""

    def test_a_buffer_may_be_filled_again(self, context: StreamContext, bound: BoundInference[Any], gate: Gate) -> None:
        """R4: the issue's own example gives 0, 1, 2 for a frame, for NumPy pixels, and in every form."""
        gate.hold(context)
        buffer = np.empty((4, 6, 3), np.float32)
        results: list[Any] = []
        for give in (lambda: HostFrame.rgb(buffer), lambda: buffer):
            for call in (
                bound,
                bound.submit_sync,
                lambda f: context.submit(bound, f),
                lambda f: context.enqueue(bound, f),
            ):
                buffer[...] = len(results)
                results.append(call(give()))
        buffer[...] = -1
        gate.open()
        assert [handle.result(WAIT_S).data.max() for handle in results] == list(range(8))

    def test_pixels_get_the_labels_of_the_contract(self, bound: BoundInference[Any]) -> None:
        """R4: NumPy pixels become a frame as the contract says, and what does not fit is refused."""
        result = bound(np.ones((4, 6, 3), np.float32)).result(WAIT_S)
        assert (result.channels, result.colorspace, result.gamma) == (("R", "G", "B"), "sRGB", "sRGB")
        for pixels in (np.ones((4, 6, 4), np.float32), np.ones((4, 6, 3)), np.ones((4, 6), np.float32)):
            with pytest.raises(ContractError):
                bound(pixels)

    @pytest.mark.anyio
    async def test_run(self, context: StreamContext, bound: BoundInference[Any]) -> None:
        """R4: one await from pixels to pixels."""
        result = await bound.run(np.full((4, 6, 3), 0.5, np.float32), host=True)
        assert isinstance(result, HostFrame)
        assert result.data.max() == 0.5
        results: list[Any] = []

        async def one(value: int) -> None:
            results.append((value, (await bound.run(frame(value))).data.max()))

        async with anyio.create_task_group() as group:
            for value in range(20):
                group.start_soon(one, value)
        assert sorted(results) == [(value, value) for value in range(20)]
        with pytest.raises(ContractError, match="host"):
            await bound.run(frame(), host="yes")  # type: ignore[arg-type]

    def test_run_sync(self, bound: BoundInference[Any]) -> None:
        """R4: the same without a loop; refused where one runs."""
        assert bound.run_sync(frame(0.25), host=True).data.max() == 0.25

        async def main() -> None:
            bound.run_sync(frame())

        with pytest.raises(ContextError, match=r"await bound\.run"):
            asyncio.run(main())

    @pytest.mark.anyio
    @pytest.mark.parametrize("asynchronous", [False, True])
    async def test_map(self, model: OnnxArtifact, asynchronous: bool) -> None:
        """R4: in order, as many under way as the bound allows, read no further ahead."""
        read: list[int] = []

        def source() -> Any:
            for number in range(12):
                read.append(number)
                yield np.full((4, 6, 3), number, np.float32)

        async def source_async() -> Any:
            for pixels in source():
                yield pixels

        async with StreamContext.open("cpu", max_in_flight=3) as context:
            bound = await context.bind_async(FACTORY, model, precision="fp32", input_hw=(4, 6))
            seen = []
            async for result in bound.map(source_async() if asynchronous else source(), host=True):
                seen.append(result.data.max())
                assert len(read) <= len(seen) + 3
                assert context.in_flight <= 3
            assert seen == list(range(12))

    @pytest.mark.anyio
    async def test_map_left_early_and_refused(self, context: StreamContext, bound: BoundInference[Any]) -> None:
        """R4: a break leaves nothing behind; a bad item, source or bound is an error where it happens."""
        results = bound.map([frame(1), frame(2), frame(3)])
        async for result in results:
            assert result.data.max() == 1
            break
        await results.aclose()
        seen = []
        with pytest.raises(ContractError, match="shape"):
            async for result in bound.map([frame(1), frame(2), frame(shape=(3, 3, 3))], ahead=1):
                seen.append(result.data.max())
        assert seen == [1, 2]
        for bad in (3, "frames", None):
            with pytest.raises(ContractError, match="source"):
                await anext(bound.map(bad))  # type: ignore[arg-type]
        with pytest.raises(ContractError, match="ahead"):
            await anext(bound.map([], ahead=0))
        await context.record()

    @pytest.mark.parametrize("name", ["host", "ahead", "after", "out"])
    def test_our_names_are_no_parameters(self, name: str) -> None:
        """R12: what run and map take for themselves no contract declares."""
        with pytest.raises(ContractError):
            GpuArrayParamContract(name, ("H", "W", 1), "float32", "pixel")


class SlowFactory(OnnxFactory):
    """Opens a module that takes its time to open."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go = threading.Event(), threading.Event()
        self.closed: list[Any] = []

    def open(self, artifact: OnnxArtifact, /, **options: Any) -> Any:
        self.started.set()
        assert self.go.wait(WAIT_S)
        opened = FACTORY.open(artifact, **options)
        close = opened.close

        def closing() -> None:
            self.closed.append(opened)
            close()

        opened.close = closing  # type: ignore[method-assign]
        return opened


@pytest.mark.anyio
class TestWithoutBlocking:
    """R6: opening and closing on an event loop."""

    async def test_the_loop_goes_on_while_a_module_opens(self, context: StreamContext, model: OnnxArtifact) -> None:
        """R6: other tasks run; the module is the context's, as by bind."""
        factory = SlowFactory()
        bounds: list[Any] = []

        async def opening() -> None:
            bounds.append(await context.bind_async(factory, model, precision="fp32", input_hw=(4, 6)))

        async with anyio.create_task_group() as group:
            group.start_soon(opening)
            while not factory.started.is_set():
                await anyio.lowlevel.checkpoint()
            assert bounds == []
            factory.go.set()
        result = await bounds[0].run(frame(2.0))
        assert result.data.max() == 2.0
        await context.aclose()
        assert len(factory.closed) == 1

    async def test_requests_go_on_while_a_module_opens(self, context: StreamContext, model: OnnxArtifact) -> None:
        """R6: the other modules of the context work meanwhile, in every form."""
        before = await context.bind_async(FACTORY, model, precision="fp32", input_hw=(4, 6))
        factory = SlowFactory()

        async with anyio.create_task_group() as group:
            group.start_soon(partial(context.bind_async, factory, model, precision="fp32", input_hw=(4, 6)))
            while not factory.started.is_set():
                await anyio.lowlevel.checkpoint()
            assert (await before.run(frame(2.0))).data.max() == 2.0
            assert (await before(frame(3.0))).data.max() == 3.0
            with context.use():
                await context.record()
            await anyio.to_thread.run_sync(context.synchronize)
            await before.aclose()
            factory.go.set()

    async def test_closed_while_a_module_opens(self, context: StreamContext, model: OnnxArtifact) -> None:
        """R6, C8: close does not wait for it: the module is closed once it is open, and only then the stream goes."""
        factory = SlowFactory()

        async def opening() -> None:
            with pytest.raises(ClosedError, match="being opened"):
                await context.bind_async(factory, model, precision="fp32", input_hw=(4, 6))

        async with anyio.create_task_group() as group:
            group.start_soon(opening)
            while not factory.started.is_set():
                await anyio.lowlevel.checkpoint()
            await context.aclose()
            assert context.closed
            assert not context.stream.destroyed
            factory.go.set()
        assert len(factory.closed) == 1
        assert context.stream.destroyed

    async def test_cancelled_half_way(self, context: StreamContext, model: OnnxArtifact) -> None:
        """R6: nothing is left half-open: what has opened meanwhile is closed again."""
        factory = SlowFactory()

        async def opening() -> None:
            await context.bind_async(factory, model, precision="fp32", input_hw=(4, 6))
            pytest.fail("it was cancelled")

        async with anyio.create_task_group() as group:
            group.start_soon(opening)
            while not factory.started.is_set():
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
            factory.go.set()
        assert len(factory.closed) == 1
        assert context._lifetime.opened == []
        assert await context.submit(int) == 0

    async def test_a_failure_is_the_factorys_own(self, context: StreamContext, tmp_path: Path) -> None:
        """R6: as bind, and the context stays usable."""
        with pytest.raises(ContractError):
            await context.bind_async(FACTORY, OnnxArtifact(tmp_path / "no.onnx"), precision="fp32", input_hw=(4, 6))
        with pytest.raises(ContractError):
            await StreamPool.open_async(["cpu"], FACTORY, OnnxArtifact("no"), precision="fp32", input_hw=(4, 6))
        assert await context.submit(int) == 0

    async def test_a_pool_cancelled_half_way(self, model: OnnxArtifact) -> None:
        """R6: no member of it stays open (the suite's own guard looks)."""
        factory = SlowFactory()

        async def opening() -> None:
            await StreamPool.open_async(["cpu", "cpu"], factory, model, precision="fp32", input_hw=(4, 6))

        async with anyio.create_task_group() as group:
            group.start_soon(opening)
            while not factory.started.is_set():
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
            factory.go.set()
        assert len(factory.closed) == 2

    async def test_closing_a_module_under_load(
        self, context: StreamContext, bound: BoundInference[Any], gate: Gate
    ) -> None:
        """R6: aclose waits while other tasks run."""
        gate.hold(context)
        handle = bound(frame(1.0))
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while not bound.closed:
                turns += 1
                if turns == 20:
                    gate.open()
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            await bound.aclose()
        assert turns >= 20
        assert (await handle).data.max() == 1.0


BLOCKING: dict[str, tuple[Callable[[StreamContext, Any, OnnxArtifact], object], str]] = {
    "bind": (lambda c, h, m: c.bind(FACTORY, m, precision="fp32", input_hw=(4, 6)), "bind_async"),
    "result": (lambda c, h, m: h.result(), "await handle"),
    "exception": (lambda c, h, m: h.exception(), "await handle"),
    "synchronize": (lambda c, h, m: c.synchronize(), "record"),
    "close": (lambda c, h, m: c.close(), "aclose"),
    "pool": (
        lambda c, h, m: StreamPool.open(["cpu"], FACTORY, m, precision="fp32", input_hw=(4, 6)).close(),
        "open_async",
    ),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("call", "instead"), BLOCKING.values(), ids=BLOCKING.keys())
def test_what_blocks_a_loop_says_so_in_debug_mode(
    gate: Gate, model: OnnxArtifact, call: Any, instead: str, debug: bool
) -> None:
    """R6: a warning that names the form that awaits, at the caller's line; none outside debug mode."""
    context = StreamContext.open("cpu")

    async def main() -> list[warnings.WarningMessage]:
        gate.hold(context)
        handle = context.submit(int)
        threading.Timer(0.05, gate.open).start()  # the call below blocks the only thread there is
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(context, handle, model)
        return list(caught)

    seen = [one for one in asyncio.run(main(), debug=debug) if one.category is LoopBlockedWarning]
    gate.open()
    context.close()
    assert bool(seen) == debug
    assert not debug or (seen[0].filename, instead in str(seen[0].message)) == (__file__, True)


def test_nothing_is_said_where_nothing_blocks(context: StreamContext) -> None:
    """R6: a handle whose work is over, and a thread without a loop, warn of nothing (warnings are errors here)."""
    handle = context.submit(int)
    handle.result(WAIT_S)

    async def main() -> None:
        assert handle.result() == 0

    asyncio.run(main(), debug=True)


class TestWhyNotCuda:
    """R9: the reason CUDA is not used."""

    def test_auto_says_why_once(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        """R9: at INFO, once."""
        monkeypatch.setattr(_devices, "available_devices", lambda: ("cpu",))
        _devices._say_why_cpu.cache_clear()
        with caplog.at_level(logging.INFO, "pixtreme.infer"):
            for _ in range(3):
                StreamContext.open("auto").close()
        (record,) = [one for one in caplog.records if "auto" in one.message]
        assert record.levelno == logging.INFO

    @pytest.mark.parametrize(
        ("situation", "words"),
        [
            ("no driver", "no NVIDIA driver"),
            ("old driver", "driver is too old"),
            ("no device", "finds no device"),
            ("hidden", "CUDA_VISIBLE_DEVICES=''"),
            ("no cupy", "CuPy cannot be imported"),
            ("two cupys", "more than once"),
            ("other", "nvidia-smi"),
        ],
    )
    def test_each_reason(self, monkeypatch: pytest.MonkeyPatch, situation: str, words: str) -> None:
        """R9: CUDA's own reason and the remedy stand in the error of ``open("cuda:0")``."""
        import cupy
        from cupy.cuda.runtime import CUDARuntimeError

        from pixtreme.infer.runtimes.cuda import _driver

        status = {"old driver": 35, "no device": 100, "hidden": 100, "other": 999}.get(situation, 100)

        def count() -> int:
            raise CUDARuntimeError(status)

        monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", count)
        monkeypatch.setattr(_driver, "is_installed", lambda: situation != "no driver")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if situation == "hidden":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        if situation == "no cupy":
            monkeypatch.setattr(_devices, "_cuda", lambda: fail_import())
        if situation == "two cupys":
            two = [type("Found", (), {"name": name})() for name in ("cupy-cuda12x", "cupy-cuda13x", "numpy")]
            monkeypatch.setattr(metadata, "distributions", lambda: two)
        with pytest.raises(ContextError) as raised:
            StreamContext.open("cuda:0")
        assert words in str(raised.value)


def fail_import() -> None:
    raise ImportError("no module named cupy")


class TestDroppedWork:
    """R10: what has not started is dropped when asked, or by Ctrl-C."""

    @pytest.mark.parametrize("how", ["close", "aclose", "interrupt"])
    def test_what_runs_is_waited_for_and_the_rest_dropped(self, gate: Gate, how: str) -> None:
        """R10: the running request ends well, later ones fault, dependants too; nothing is logged."""
        context, other = StreamContext.open("cpu"), StreamContext.open("cpu")
        ran: list[int] = []

        def request(number: int) -> None:
            if number == 0:
                gate.wait()
            ran.append(number)

        handles = [context.enqueue(request, number) for number in range(10)]
        dependant = other.enqueue(len, handles[9])
        gate.wait_until_reached()
        threading.Timer(0.05, gate.open).start()
        if how == "close":
            context.close(cancel_pending=True)
        elif how == "aclose":
            asyncio.run(context.aclose(cancel_pending=True))
        else:
            with pytest.raises(KeyboardInterrupt), context:
                raise KeyboardInterrupt
        assert ran == [0]
        assert handles[0].exception(WAIT_S) is None
        for handle in handles[1:]:
            assert isinstance(handle.exception(WAIT_S), WorkCancelled)
        assert isinstance(dependant.exception(WAIT_S), StreamFault)
        other.close()

    def test_another_error_drops_nothing(self, gate: Gate) -> None:
        """R10: an ordinary exception leaves the block after everything ran."""
        ran: list[int] = []
        with pytest.raises(Boom):
            with StreamContext.open("cpu") as context:
                for number in range(5):
                    context.enqueue(ran.append, number)
                fail()
        assert ran == list(range(5))

    def test_somebody_elses_stream_is_left_alone(self, context: StreamContext, gate: Gate) -> None:
        """R10: closing an alias drops nothing."""
        gate.hold(context)
        handle = context.submit(int)
        alias = StreamContext.adopt(context.stream)
        threading.Timer(0.05, gate.open).start()
        alias.close(cancel_pending=True)
        assert handle.result(WAIT_S) == 0

    @pytest.mark.slow
    def test_ctrl_c_with_a_queue_of_slow_requests(self) -> None:
        """R10: a real SIGINT, ten requests of a second each: out within the one that runs."""
        program = (
            "import time\n"
            "from pixtreme.infer import StreamContext\n"
            "with StreamContext.open('cpu') as context:\n"
            "    handles = [context.enqueue(time.sleep, 1.0) for _ in range(10)]\n"
            "    print('ready', flush=True)\n"
            "    handles[-1].result()\n"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
        assert time.monotonic() - started < 3
        assert process.returncode != 0
        assert errors.splitlines()[-1] == b"KeyboardInterrupt"


def test_a_pool_waits_on_the_host_for_the_first_free_member(model: OnnxArtifact) -> None:
    """R11: member 0 is held and member 1 free; both at the bound, the one that comes free first is taken."""
    with StreamPool.open(["cpu"] * 2, FACTORY, model, precision="fp32", input_hw=(4, 6), max_in_flight=1) as pool:
        gates = [Gate(), Gate()]
        for gate, member in zip(gates, pool.members, strict=True):
            gate.hold(member.context)
        handles = [pool.submit_sync(frame(number)) for number in range(2)]
        with pytest.raises(BusyError):
            pool.submit(frame(2))
        threading.Timer(0.05, gates[1].open).start()
        third = pool.submit_sync(frame(3))
        assert third.context is pool.members[1].context
        assert third.result(WAIT_S).data.max() == 3
        gates[0].open()
        assert sorted(handle.result(WAIT_S).data.max() for handle in handles) == [0, 1]

        async def main() -> None:
            pool.submit_sync(frame())

        with pytest.raises(ContextError, match="submit_async"):
            asyncio.run(main())


def test_what_programs_need_is_at_the_top(log: LogRecords) -> None:
    """R13: the names README uses, the errors, and what annotations need; `dir` lists the lazy ones."""
    names = """After BoundInference Colorspace EventHandle Gamma HandleStatus HostFrame LoopBlockedWarning Matrix
    OnnxArtifact Pipeline PipelineError Stage StreamContext StreamLike StreamPool WorkCancelled bind_onnx
    bind_onnx_async check_frame wait_all as_completed"""
    assert [name for name in names.split() if not hasattr(pixtreme.infer, name)] == []
    assert set(names.split()) <= set(dir(pixtreme.infer))


def test_dir_shows_what_there_is_for_programs(context: StreamContext, bound: BoundInference[Any]) -> None:
    """R13: completion offers no private name and no seam between our own modules; each of those says that it is one."""
    for one in (context, context.record(), bound):
        every = set(object.__dir__(one))
        hidden = every - set(dir(one))
        assert {"__repr__", "context" if one is not context else "submit"} <= set(dir(one))
        seams = {name for name in hidden if not name.startswith("_")}
        for name in every:
            if not name.startswith("_"):
                text = getattr(type(one), name).__doc__
                is_seam = "this library's own modules" in text or "no part of the stable API" in text
                assert is_seam == (name in seams), name
        assert {name for name in hidden if name.startswith("__")} == set()
        assert not any(name.startswith("_") and not name.startswith("__") for name in dir(one))


@pytest.mark.anyio
async def test_short_forms(tmp_path: Path, context: StreamContext) -> None:
    """R14: RGB pixels and an ``.onnx`` file in one call each; the file's own precision is taken."""
    path = small_model(tmp_path / "m.onnx").path
    pixels = np.full((4, 6, 3), 0.5, np.float32)
    image = HostFrame.rgb(pixels)
    assert (image.data is pixels, image.channels, image.colorspace, image.gamma) == (
        True,
        ("R", "G", "B"),
        "sRGB",
        "sRGB",
    )
    bound = await bind_onnx_async(context, path, input_hw=(4, 6))
    assert (await bound.run(image)).data.max() == 0.5
    assert bound.contract.precision == "fp32"
    await context.record()


def test_short_forms_say_what_is_wrong(tmp_path: Path, context: StreamContext) -> None:
    """R14: as the long ones."""
    with pytest.raises(ContractError):
        bind_onnx(context, tmp_path / "absent.onnx", input_hw=(4, 6))
    with pytest.raises(ContractError):
        HostFrame.rgb(np.ones((4, 6, 4), np.float32))
    bound = bind_onnx(context, small_model(tmp_path / "m.onnx").path, input_hw=(4, 6))
    assert bound.run_sync(frame(1.0)).data.max() == 1.0
