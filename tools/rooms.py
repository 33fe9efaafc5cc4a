"""The imports of `src`, read from the code: the picture in docs/architecture.md, and what the tests check.

python tools/rooms.py            print the two pictures
python tools/rooms.py --write    put them into docs/architecture.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGE = "pixtreme.infer"
PAGE = ROOT / "docs" / "architecture.md"
#: Modules that are one room; the others are a room each, and a package is one with what is in it.
ROOMS = {
    "_staging_buffers": "staging",
    "_cuda_graph_buffers": "cuda_graph",
    "_cuda_graph_verify": "cuda_graph",
    "_runtime_checks": "testing",
    "_onnx_header": "onnx",
    "onnx_module": "onnx",
    "declarations": "contracts",
}

Edge = tuple[str, str]


def modules() -> dict[str, Path]:
    """Return every module by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def edges() -> set[Edge]:
    """Return who imports whom, inside functions and under TYPE_CHECKING as well."""
    known = modules()
    return {(name, target) for name, path in known.items() for target in _targets(path, known) if target != name}


def circles(found: set[Edge]) -> list[list[str]]:
    """Return groups of modules that import one another in a circle (strongly connected components)."""
    reach: dict[str, set[str]] = {}
    for start in {name for edge in found for name in edge}:
        seen: set[str] = set()
        pending = [start]
        while pending:
            for source, target in found:
                if source == pending[0] and target not in seen:
                    seen.add(target)
                    pending.append(target)
            pending.pop(0)
        reach[start] = seen
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in reach}
    return [list(group) for group in sorted(groups) if group]


def pictures() -> str:
    """Return both pictures as Mermaid: the rooms, and the modules of `streams`."""
    found = edges()
    rooms = {(_room(source), _room(target)) for source, target in found}
    inside = {(a, b) for a, b in found if _inside_streams(a) and _inside_streams(b)}
    return f"{_drawn(rooms)}\n\nInside `streams`:\n\n{_drawn({(_short(a), _short(b)) for a, b in inside})}"


def _targets(path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    yield full
                elif node.module in known:
                    yield node.module


def _room(module: str) -> str:
    rest = module.removeprefix(PACKAGE).removeprefix(".").split(".")
    if rest[:2] in (["runtimes", "host"], ["runtimes", "cuda"]):
        return f"runtimes.{rest[1]}"
    if rest[1:] in (["_protocol"], ["_array_checks"]):
        return "runtimes.protocol"
    return ROOMS.get(rest[0], rest[0] or "infer")


def _inside_streams(module: str) -> bool:
    return module.startswith(f"{PACKAGE}.streams.")


def _short(module: str) -> str:
    return module.rpartition(".")[2]


def _drawn(found: set[Edge]) -> str:
    implied = {(a, c) for a, b in found for b2, c in found if b == b2 and b not in (a, c)}  # two steps say it already
    shown = sorted((a, b) for a, b in found if a != b and (a, b) not in implied)
    return "\n".join(["```mermaid", "graph TD", *(f"    {a} --> {b}" for a, b in shown), "```"])


def main() -> None:
    if "--write" in sys.argv:
        page = PAGE.read_text("utf-8")
        marked = r"(<!-- rooms -->\n).*?(\n<!-- /rooms -->)"
        PAGE.write_text(re.sub(marked, lambda match: match[1] + pictures() + match[2], page, flags=re.DOTALL), "utf-8")
    else:
        print(pictures())


if __name__ == "__main__":
    main()
