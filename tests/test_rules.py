"""The project's own promises: every rule has a test, public calls are documented, README and wheel are true."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pixtreme.infer
from pixtreme.infer import (
    aio,
    contracts,
    cuda_graph,
    dispatch,
    errors,
    frames,
    onnx,
    onnx_module,
    recipe_identity,
    staging,
    streams,
    testing,
    verification,
)

ROOT = Path(__file__).parent.parent

# The rules this version is held to: 10-contracts to 60-onnx, as far as they are built.
RULES = """
C1 C2 C3 C4 C5 C6 C7 C8 C9 C10 C11 C12 C13 C14
S1 S2 S3 S4 S5 S6 S7 S8 S9 S10 S11 S12 S13 S14 S15 S16 S17 S18 S19 S20 S21 S22 S23 S24 S24a S24b S24c S25 S26 S27 S28
S29 S30 S31 S32 S33 S34 S35 S36 S37 S38
G1 G2 G3 G4 G5 G6 G7 G8 G9 G10 G11 G12 G13 G14 G15 G16 G17 G18 G19 G20 G21
O1 O2 O3 O4 O5 O6 O7 O8 O9 O9a O10 O11 O12
A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12
V1 V2 V3 V4 V5 V6 V7 V8 V9 V10 V11 V12 V13 V14
""".split()
# What enqueues on a stream must say all three; what only looks or waits says whether it blocks.
ENQUEUES = [
    streams.StreamContext.submit,
    streams.StreamContext.submit_sync,
    streams.StreamContext.submit_async,
    streams.StreamContext.record,
    streams.StreamContext.bind,
    streams.EventHandle.on,
    streams.EventHandle.__dlpack__,
    streams.BoundInference.__call__,
    cuda_graph.CudaGraphSession,
    cuda_graph.CudaGraphSession.replay,
    cuda_graph.CudaGraphSession.launch,
    cuda_graph.CudaGraphBuffers.copy_inputs,
    cuda_graph.CudaGraphBuffers.copy_output,
    onnx_module.OnnxInference.__call__,
    aio.Pipeline.run,
    aio.StreamPool.submit,
    aio.StreamPool.submit_async,
    aio.StreamPool.map,
    staging.copy_in,
    staging.copy_out,
    staging.upload,
    staging.download,
]
LOOKS_OR_WAITS = [
    testing.check_runtime,
    testing.Latch,
    streams.available_devices,
    streams.StreamContext.open,
    streams.StreamContext.adopt,
    streams.StreamContext.use,
    streams.StreamContext.wait,
    streams.StreamContext.synchronize,
    streams.StreamContext.close,
    streams.StreamContext.aclose,
    streams.EventHandle.done,
    streams.EventHandle.result,
    streams.EventHandle.add_done_callback,
    streams.BoundInference.close,
    cuda_graph.CudaGraphSession.check_context,
    cuda_graph.CudaGraphSession.close,
    cuda_graph.CudaGraphBuffers,
    cuda_graph.CudaGraphBuffers.close,
    onnx.run_onnx,
    onnx_module.OnnxFactory.open,
    onnx_module.OnnxInference.close,
    aio.StreamPool.open,
    aio.StreamPool.close,
    aio.StreamPool.aclose,
    staging.pool,
    staging.upload_sync,
    staging.upload_async,
    staging.download_sync,
    staging.download_async,
    verification.EventTimer,
    verification.WallTimer,
    verification.measure_requests,
    verification.NvidiaTelemetrySource.sample,
]


def _test_docstrings(folder: str = ".") -> str:
    found = []
    for path in (Path(__file__).parent / folder).rglob("test_*.py"):
        found += re.findall(r'def test_\w+\([^"]*?"""(.*?)"""', path.read_text("utf-8"), re.DOTALL)
    return "\n".join(found)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_named_by_a_test(rule: str) -> None:
    """A reader finds each rule of the spec in a test that names it."""
    assert re.search(rf"\b{rule}\b", _test_docstrings()), f"no test names {rule}"


def test_graph_rules_are_tested_on_both_runtimes() -> None:
    """Each of G1-G21 is named by a test on the CUDA runtime as well."""
    on_cuda = _test_docstrings("cuda")
    assert [rule for rule in RULES if rule.startswith("G") and not re.search(rf"\b{rule}\b", on_cuda)] == []


@pytest.mark.parametrize("call", ENQUEUES, ids=lambda call: call.__qualname__)
def test_what_enqueues_says_order_waiting_and_lifetime(call: Any) -> None:
    """Stream order, host synchronization and lifetime stand in the docstring of every call that enqueues."""
    text = (inspect.getdoc(call) or "").lower()
    assert all(heading in text for heading in ("stream order", "host synchronization", "lifetime"))


@pytest.mark.parametrize("call", LOOKS_OR_WAITS, ids=lambda call: call.__qualname__)
def test_what_looks_or_waits_says_whether_it_blocks(call: Any) -> None:
    """Every other public call on a device says whether the host waits."""
    assert "Host synchronization" in (inspect.getdoc(call) or "")


@pytest.mark.parametrize(
    "module",
    [
        pixtreme.infer,
        aio,
        contracts,
        cuda_graph,
        dispatch,
        errors,
        frames,
        onnx,
        onnx_module,
        recipe_identity,
        staging,
        streams,
        testing,
        verification,
        verification.comparison,
        verification.contracts,
        verification.measurement,
        verification.records,
    ],
    ids=lambda module: module.__name__,
)
def test_public_names_exist_and_are_documented(module: Any) -> None:
    """``__all__`` is true, and classes and functions in it, and their public methods, have docstrings."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) and thing.__module__.startswith("pixtreme.infer"):
            members = [member for key, member in vars(thing).items() if not key.startswith("_")]
            functions = [thing, *filter(callable, members)]
            if not getattr(thing, "_is_protocol", False):
                assert all(inspect.getdoc(function) for function in functions), name
        elif inspect.isfunction(thing):
            assert inspect.getdoc(thing), name


def _blocks(language: str, file: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text("utf-8"), re.DOTALL)


def test_module_guide_runs() -> None:
    """The programs of docs/writing-a-module.md run as they stand."""
    blocks = _blocks("python", "docs/writing-a-module.md")
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "writing-a-module.md", "exec"), names)

    class Instance:
        def __call__(self, request: object) -> None:
            raise errors.ClosedError(why="a", what="b", how="c")

        def close(self) -> None:
            pass

    facts = names["after_close"](Instance(), None, lambda: 0)
    assert isinstance(facts.error, errors.ClosedError)
    assert not facts.backend_started


@pytest.mark.network
def test_readme_code_runs(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's programs run as they stand, and are at most fifteen lines each."""
    (tmp_path / "network.onnx").write_bytes(network.read_bytes())
    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(0).random((64, 96, 3), np.float32)

    def enqueue_copy(pixels: Any) -> Any:
        result = np.empty_like(pixels)
        streams.StreamContext.current().stream.enqueue(np.copyto, result, pixels)
        return result

    names: dict[str, Any] = {"pixels": image, "image": image, "blur": enqueue_copy, "sharpen": enqueue_copy}
    blocks = _blocks("python")
    assert len(blocks) == 4
    for block in blocks:
        assert len(block.splitlines()) <= 15
        exec(compile(block, "README.md", "exec"), names)
    assert names["result"].shape == (256, 384, 3)

    async def consume() -> list[tuple[int, ...]]:
        return [result.shape async for result in names["serve"]([names["frame"]] * 3)]

    assert asyncio.run(consume()) == [(256, 384, 3)] * 3

    async def upscale_video() -> list[tuple[int, ...]]:
        async with streams.StreamContext.open("cpu") as context:
            network = context.bind(
                onnx_module.FACTORY, onnx_module.OnnxArtifact("network.onnx"), precision="fp32", input_hw=(64, 96)
            )
            return [pixels.shape async for pixels in names["upscale_video"]([image] * 3, network)]

    assert asyncio.run(upscale_video()) == [(256, 384, 3)] * 3


def test_readme_commands() -> None:
    """The README gives exactly two commands; the second is the one .ci/run calls."""
    commands = [line for block in _blocks("console") for line in block.splitlines()]
    assert len(commands) == 2
    assert "examples/upscale_photo.py" in commands[0]
    assert commands[1] == "CUDA_VISIBLE_DEVICES='' python3.12 -m uv run --no-sync python -m pytest -q"
    assert (ROOT / ".python-version").read_text().strip() == "3.12"


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wheel_check_notices_what_is_wrong(tmp_path: Path) -> None:
    """tools/check_wheel.py accepts a right wheel and names what does not belong or is missing."""
    check = _load(ROOT / "tools" / "check_wheel.py")
    right = ["pixtreme/infer/py.typed", "pixtreme/infer/__init__.py", "pixtreme/infer/streams/host.py"]
    right += ["pixtreme_infer-1.dist-info/licenses/LICENSE"]
    for number, (names, problem) in enumerate(
        [(right, None), ([*right, "pixtreme/__init__.py"], "does not belong"), (right[1:], "py.typed is missing")]
    ):
        with zipfile.ZipFile(tmp_path / f"{number}.whl", "w") as wheel:
            for name in names:
                wheel.writestr(name, "")
        found = check.problems(tmp_path / f"{number}.whl")
        assert (not found) if problem is None else any(problem in text for text in found)


@pytest.mark.network
def test_benchmarks_run_at_a_tiny_size(tmp_path: Path) -> None:
    """The benchmark runs, compares every way in one run and writes JSON."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "run.py", "--quick", "--json", str(tmp_path / "figures.json")],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    figures = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    assert {"raw thread to loop", "await handle", "anyio.to_thread"} <= figures[
        "hand-off on asyncio after computing work, us"
    ].keys()
    assert all(value > 0 for table in figures.values() for value in table.values())
    assert "await handle" in done.stdout


def test_only_the_cuda_adapter_knows_cupy() -> None:
    """S26: CuPy is imported by the files of the CUDA runtime and by no other, and only when a device is named."""
    imports = re.compile(r"^\s*(import|from) cupy", re.MULTILINE)
    found = {path.name for path in (ROOT / "src").rglob("*.py") if imports.search(path.read_text("utf-8"))}
    assert found == {"cuda.py", "cuda_arrays.py", "cuda_memory.py"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pixtreme.infer; print('pixtreme.infer.streams.cuda' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_files_stay_small() -> None:
    """No source file is much over 400 lines."""
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 420} == {}


def test_only_aio_imports_anyio() -> None:
    """A1: the core, staging and verification work where no event loop and no anyio is ever loaded."""
    program = (
        "import sys, pixtreme.infer.staging, pixtreme.infer.verification, pixtreme.infer.onnx_module\n"
        "print([name for name in ('anyio', 'asyncio', 'trio', 'uvloop') if name in sys.modules])\n"
        "import pixtreme.infer.aio\n"
        "print('anyio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]
