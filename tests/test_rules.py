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
from itertools import pairwise
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
    runtimes,
    staging,
    streams,
    testing,
    verification,
)

ROOT = Path(__file__).parent.parent

# Those of docs/rules.md, except the cases.
PAGE = (ROOT / "docs" / "rules.md").read_text("utf-8")
RULES = re.findall(r"^- \*\*(\w+)\*\*", PAGE.partition("## Cases")[0], re.MULTILINE)
CASES = re.findall(r"^- \*\*(\w+)\*\*", PAGE.partition("## Cases")[2], re.MULTILINE)
FACES = [aio, cuda_graph, onnx_module, staging, streams, testing]


def _public_calls() -> dict[str, Any]:
    """Every public function of the faces on a device, and every public method of their classes."""
    calls: dict[str, Any] = {}
    for face in FACES:
        for name in face.__all__:
            thing = getattr(face, name)
            if inspect.isfunction(thing):
                calls[name] = thing
            elif inspect.isclass(thing):
                members = {key: member for kind in reversed(thing.__mro__[:-1]) for key, member in vars(kind).items()}
                for key, member in members.items():
                    function = getattr(member, "__func__", member)  # of a class or static method
                    if inspect.isfunction(function) and (not key.startswith("_") or key in ("__call__", "__dlpack__")):
                        calls[f"{name}.{key}"] = function
    return calls


CALLS = _public_calls()
# What returns something that work is still to fill enqueues; and these, which return nothing.
UNDER_WAY = re.compile(r"EventHandle|Run\[|FrameLike|Pixels")
NOT_UNDER_WAY = ("StagingPool.take", "as_completed", "bind_onnx", "bind_onnx_async")
ENQUEUES = [
    name
    for name, call in CALLS.items()
    if UNDER_WAY.search(str(call.__annotations__.get("return"))) and name not in NOT_UNDER_WAY
] + ["EventHandle.__dlpack__", "EventHandle.on", "CudaGraphBuffers.copy_inputs", "CudaGraphSession.replay"]


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


@pytest.mark.parametrize("name", ENQUEUES)
def test_what_enqueues_says_order_waiting_and_lifetime(name: str) -> None:
    """Stream order, host synchronization and lifetime are sections of every call that enqueues."""
    assert _sections(CALLS[name]) >= {"Stream order", "Host synchronization", "Lifetime"}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_says_whether_it_blocks(name: str) -> None:
    """Every public call on a device says whether the host waits."""
    assert "Host synchronization" in _sections(CALLS[name])


def _sections(call: Any) -> set[str]:
    """The sections of a docstring, underlined as numpydoc reads them."""
    lines = (inspect.getdoc(call) or "").splitlines()
    return {line for line, under in pairwise(lines) if under == "-" * len(line) and line}


def test_names_tell_who_waits() -> None:
    """S12a: what blocks is result, exception, synchronize, close, or has sync (not async) in its name."""
    blocking = set()
    for name, call in CALLS.items():
        text = (inspect.getdoc(call) or "").partition("Host synchronization\n")[2].partition("\n")[2]
        if re.match(r"Blocks|As `(result|upload_sync)`", text):
            blocking.add(name.rpartition(".")[2])
    assert {"result", "exception", "submit_sync", "synchronize", "close"} <= blocking
    allowed = re.compile(r"result|exception|close|check_runtime|(?!.*async).*sync.*")
    assert [name for name in blocking if not allowed.fullmatch(name)] == []


def test_every_rule_has_its_sentence() -> None:
    """T9: each id that code or tests mention stands in docs/rules.md."""
    known = {*RULES, *CASES}
    found = set()
    for folder in ("src", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if "cudaemu" not in path.parts:
                found |= set(re.findall(r"\b(?:C0\d|[ACGORSTV][1-9]\d?[abc]?)\b", path.read_text("utf-8")))
    assert found - known - {"V100"} == set()


def test_public_docstrings_say_the_rule_not_its_number() -> None:
    """T9: a user who reads a docstring meets no id."""
    faces = [*FACES, contracts, dispatch, errors, frames, onnx, recipe_identity, runtimes, verification, pixtreme.infer]
    texts = {face.__name__: face.__doc__ for face in faces} | {name: call.__doc__ for name, call in CALLS.items()}
    for face in faces:
        texts |= {f"{face.__name__}.{name}": getattr(face, name).__doc__ for name in face.__all__}
    assert {name for name, text in texts.items() if re.search(r"\b[ACGOSTV][1-9]\d?[abc]?\b", text or "")} == set()


def test_the_package_can_be_inspected() -> None:
    """C11: what `dir` lists can be looked at; an architecture that is not installed is listed by `architectures`."""
    members = dict(inspect.getmembers(pixtreme.infer))
    assert {"StreamContext", "run_onnx"} <= members.keys()
    for architecture in dispatch.architectures():
        assert (architecture.name in members) == (architecture.version is not None)


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
        verification.suites,
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


@pytest.mark.slow
def test_module_guide_runs() -> None:
    """R2: the programs of docs/writing-a-module.md run as they stand, and its modules have no line about devices."""
    blocks = _blocks("python", "docs/writing-a-module.md")
    assert len(blocks) == 6
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

    names: dict[str, Any] = {"pixels": image, "blur": _copy, "sharpen": _copy}
    blocks = _blocks("python")
    assert len(blocks) == 4
    for block in blocks:
        assert len(block.splitlines()) <= 15
        exec(compile(block, "README.md", "exec"), names)
    assert names["result"].shape == (256, 384, 3)

    async def consume() -> list[tuple[int, ...]]:
        return [result.shape async for result in names["serve"]([image] * 3)]

    assert asyncio.run(consume()) == [(256, 384, 3)] * 3

    async def upscale_video() -> list[tuple[int, ...]]:
        async with streams.StreamContext.open("cpu") as context:
            network = await onnx_module.bind_onnx_async(context, "network.onnx", input_hw=(64, 96))
            return [pixels.shape async for pixels in names["upscale_video"]([image] * 3, network)]

    assert asyncio.run(upscale_video()) == [(256, 384, 3)] * 3


def _copy(image: Any, *, out: Any) -> None:
    out[...] = image


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
    right = ["pixtreme/infer/py.typed", "pixtreme/infer/__init__.py", "pixtreme/infer/runtimes/host/_runtime.py"]
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
@pytest.mark.slow
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
