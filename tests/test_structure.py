"""T6, T9: what the code's shape promises, read from the code itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import rooms

from pixtreme.infer.runtimes.host._worker import Worker
from pixtreme.infer.streams import StreamContext

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
SOURCES = sorted((ROOT / "src").rglob("*.py"))
# Circles that a type annotation needs; docs/architecture.md gives the reason.
ANNOTATIONS = {
    ("pixtreme.infer.streams._handle", "pixtreme.infer.streams._context"),
    ("pixtreme.infer.streams._binding", "pixtreme.infer.streams._context"),
}


def _reaches(source: str) -> Iterator[str]:
    """Attributes with one leading underscore of anything but self and cls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
                continue
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield ast.unparse(node)


def test_reaches_are_noticed() -> None:
    """The count below sees what it is meant to see."""
    assert list(_reaches("a._b; self._c; self.d._e; f()._g; super()._h; i.__class__")) == [
        "a._b",
        "self.d._e",
        "f()._g",
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "pixtreme")))
def test_no_module_reaches_into_another_object(path: Path) -> None:
    """T6: attributes with an underscore belong to their object."""
    assert list(_reaches(path.read_text("utf-8"))) == []


def test_imports_have_no_circle() -> None:
    """T6: none, those under TYPE_CHECKING counted, but the two that the page names."""
    found = rooms.edges()
    assert found >= ANNOTATIONS
    assert rooms.circles(found - ANNOTATIONS) == []
    assert rooms.circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [["a", "b", "c"]]
    for module, _ in ANNOTATIONS:
        assert f"`{module.rpartition('.')[2]}`" in PAGE


def test_the_pictures_are_those_of_the_code() -> None:
    """T9: docs/architecture.md shows today's imports (tools/rooms.py --write)."""
    assert rooms.pictures() in PAGE


def test_every_file_of_the_page_exists() -> None:
    """T9: paths in the architecture and the glossary are paths of the package."""
    text = PAGE + (ROOT / "docs" / "glossary.md").read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(named) > 20
    package = ROOT / "src" / "pixtreme" / "infer"
    present = {str(path.relative_to(package)) for path in SOURCES} | {"tools/rooms.py"}
    assert {
        path for path in named if path not in present and not any(one.endswith(f"/{path}") for one in present)
    } == set()


def test_the_way_from_submit_to_the_worker(
    context: StreamContext, other: StreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6: the deepest stack of a submission that reaches the worker passes the files of the page, at most six."""
    written = re.findall(r"`([\w/]+\.py)`", PAGE.partition("<!-- way down -->")[2].partition("<!-- /way down -->")[0])
    package = ROOT / "src" / "pixtreme" / "infer"
    ways: list[list[str]] = []
    push = Worker.push

    def seen(worker: Worker, item: Any) -> None:
        files = [Path(frame.filename) for frame in traceback.extract_stack() if str(package) in frame.filename]
        ways.append(list(dict.fromkeys(str(file.relative_to(package)) for file in files)))
        push(worker, item)

    monkeypatch.setattr(Worker, "push", seen)
    handle = context.submit(context.stream.enqueue, int)
    other.submit(other.stream.enqueue, lambda _: None, handle, after=[context])
    other.synchronize()
    worker = "runtimes/host/_worker.py"
    assert max((*way, worker) for way in ways if len(way) == max(map(len, ways))) == tuple(written)
    assert len(written) <= 6
    found = rooms.edges()
    names = ["pixtreme.infer." + file.removesuffix(".py").replace("/", ".") for file in written]
    protocol = ("pixtreme.infer.streams._stream", "pixtreme.infer.runtimes.host._runtime")
    assert all(step in found or step == protocol for step in pairwise(names))


def test_files_stay_small() -> None:
    """No file is much over 400 lines; of the public face of streams, half of which is its docstrings, no code is."""
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    face = ROOT / "src" / "pixtreme" / "infer" / "streams" / "_context.py"
    docstrings = 0
    for node in ast.walk(ast.parse(face.read_text("utf-8"))):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if "overload" in map(ast.unparse, node.decorator_list):  # a type, not code
            docstrings += (node.end_lineno or 0) - node.lineno + 2
        elif ast.get_docstring(node):
            text = node.body[0]
            docstrings += (text.end_lineno or 0) - text.lineno + 1
    assert lengths.pop(face.name) - docstrings < 300
    assert {name: length for name, length in lengths.items() if length > 420} == {}


def test_no_test_imports_a_test() -> None:
    """T10: shared values are in samples.py and helpers.py."""
    pattern = re.compile(r"^\s*(?:from|import) test_", re.MULTILINE)
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if pattern.search(path.read_text("utf-8"))] == []


def test_only_the_cuda_room_knows_cupy() -> None:
    """S26: CuPy is imported by the files of the CUDA room and by no other, and only when a device is named."""
    imports = re.compile(r"^\s*(import|from) cupy", re.MULTILINE)
    found = {str(path.parent.name) for path in SOURCES if imports.search(path.read_text("utf-8"))}
    assert found == {"cuda"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pixtreme.infer; print('pixtreme.infer.runtimes.cuda' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
