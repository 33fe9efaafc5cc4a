"""Architectures by name (C9-C12), each case in a process of its own with fake distributions on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pixtreme.infer
from pixtreme.infer import dispatch

FACTORY = "FACTORY = 'fake span'\nfrom pixtreme.infer.contracts import Exact\nfrom ..errors import ContractError\n"


SOURCE = Path(pixtreme.infer.__file__).parents[2]
EXTRAS = {"onnx", "onnxruntime", "pynvml", "matplotlib", "rich", "trio", "uvloop", "safetensors", "sklearn", "PIL"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is installed here, without any architecture and without what only extras bring."""
    folder = tmp_path_factory.mktemp("installed")
    packages = Path(np.__file__).parents[1]
    for entry in packages.iterdir():
        if entry.name != "pixtreme" and not entry.name.startswith(("pixtreme_infer", "_editable_impl", *EXTRAS)):
            (folder / entry.name).symlink_to(entry)
    (folder / "pixtreme").mkdir()
    for entry in (packages / "pixtreme").iterdir():
        if entry.name != "infer":
            (folder / "pixtreme" / entry.name).symlink_to(entry)
    return folder


def run(installed: Path, program: str, *folders: Path, site: Path | None = None) -> Any:
    """Run a program that assigns ``result``, with folders first on its path, and return the result."""
    lines = [f"import site; site.addsitedir({str(site)!r})"] if site is not None else []
    lines += [textwrap.dedent(program), "import json; print(json.dumps(result))"]
    path = os.pathsep.join(map(str, (*folders, SOURCE, installed)))
    done = subprocess.run(
        [sys.executable, "-S", "-c", "\n".join(lines)],  # -S: nothing but these folders
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def add_module(folder: Path, *, name: str = "span", source: str = FACTORY) -> Path:
    """Write the files of an architecture's package under ``folder``."""
    package = folder / "pixtreme" / "infer" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return folder


def add_metadata(folder: Path, version: str = "1.2.3") -> Path:
    """Write the metadata of an installed distribution."""
    info = folder / f"pixtreme_infer_span-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pixtreme-infer-span\nVersion: {version}\n")
    return folder


def on_the_path(root: Path) -> tuple[list[Path], Path | None]:
    """A folder of the path."""
    return [add_metadata(add_module(root / "site"))], None


def editable(root: Path) -> tuple[list[Path], Path | None]:
    """As ``pip install -e``: metadata and a .pth file in the site folder, the source elsewhere."""
    add_module(root / "source")
    add_metadata(root / "site")
    (root / "site" / "span.pth").write_text(f"{root / 'source'}\n")
    return [], root / "site"


def from_a_wheel(root: Path) -> tuple[list[Path], Path | None]:
    """A wheel, unpacked by the zip tool as every installer does."""
    add_metadata(add_module(root / "tree"))
    wheel = root / "pixtreme_infer_span-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (root / "tree").rglob("*"):
            archive.write(file, file.relative_to(root / "tree"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    return [], root / "site"


def split_over_two_folders(root: Path) -> tuple[list[Path], Path | None]:
    """Another architecture lies in another folder."""
    second = add_module(root / "second", name="cda_vsr", source="FACTORY = 'fake cda_vsr'")
    return [add_metadata(add_module(root / "first")), second], None


def inside_a_zip(root: Path) -> tuple[list[Path], Path | None]:
    """An archive on the path."""
    add_module(root / "tree")
    with zipfile.ZipFile(root / "span.zip", "w") as archive:
        for file in (root / "tree").rglob("*"):
            archive.write(file, file.relative_to(root / "tree"))
    return [root / "span.zip", add_metadata(root / "site")], None


@pytest.mark.parametrize(
    "install", [on_the_path, editable, from_a_wheel, split_over_two_folders, inside_a_zip], ids=lambda it: it.__name__
)
@pytest.mark.slow
def test_installed(installed: Path, tmp_path: Path, install: Any) -> None:
    """C9, C11, C12: found wherever it is installed, imported when asked for and not before."""
    folders, site = install(tmp_path)
    result = run(
        installed,
        """
        import sys
        import pixtreme.infer
        from pixtreme.infer import dispatch
        before = [name for name in sys.modules if name.startswith(("pixtreme.infer.span", "pixtreme.infer.cda"))]
        known = dispatch.architectures()
        factory = pixtreme.infer.span.FACTORY
        from pixtreme.infer import span
        import pixtreme.infer.span as again
        result = [before, known, factory, span is again is sys.modules["pixtreme.infer.span"]]
        result.append(pixtreme.infer.cda_vsr.FACTORY if "second" in str(sys.path) else 0)
        """,
        *folders,
        site=site,
    )
    before, known, factory, same, other = result
    assert (before, factory, same) == ([], "fake span", True)
    assert known[0] == ["span", "pixtreme-infer-span", "1.2.3"]
    assert other == ("fake cda_vsr" if install is split_over_two_folders else 0)


def test_absent(installed: Path) -> None:
    """C10, C11: the module, the distribution and the exact command; it is known all the same."""
    result = run(
        installed,
        """
        import pixtreme.infer
        result = []
        for ask in (lambda: pixtreme.infer.span, lambda: getattr(pixtreme.infer, "cda_vsr")):
            try:
                ask()
            except ImportError as error:
                result.append([type(error).__name__, str(error), error.name])
        try:
            from pixtreme.infer import span
        except ImportError as error:
            result.append([type(error).__name__, str(error), error.name])
        """,
    )
    for (kind, text, name), (module, distribution) in zip(
        result, [("span", "span"), ("cda_vsr", "cda-vsr"), ("span", "span")], strict=True
    ):
        assert (kind, name) == ("ImportError", f"pixtreme.infer.{module}")
        assert f"'pixtreme-infer-{distribution}'" in text
        assert text.endswith(f"how=pip install pixtreme-infer-{distribution}")


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        ("import not_there_at_all", "ModuleNotFoundError", "No module named 'not_there_at_all'"),
        ("import pixtreme.infer.span.inner", "ModuleNotFoundError", "No module named 'pixtreme.infer.span.inner'"),
        ("raise ImportError('bad ABI')", "ImportError", "bad ABI"),
        ("raise ValueError('no')", "ValueError", "no"),
        ("raise AttributeError('no')", "AttributeError", "no"),
        ("def", "SyntaxError", "invalid syntax"),
        ("import sys; sys.exit(3)", "SystemExit", "3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("from pixtreme.infer import nothing_of_the_kind", "ImportError", "nothing_of_the_kind"),
    ],
)
@pytest.mark.slow
def test_broken_inside(installed: Path, tmp_path: Path, source: str, kind: str, text: str) -> None:
    """C10, C47: the original error, untouched; the other architecture works; so does this one once it is mended."""
    add_module(tmp_path, source=source)
    add_module(tmp_path / "more", name="cda_vsr", source="FACTORY = 1")
    result = run(
        installed,
        f"""
        import os, pathlib, pixtreme.infer
        try:
            pixtreme.infer.span
        except BaseException as error:
            result = [type(error).__name__, str(error), pixtreme.infer.cda_vsr.FACTORY]
        pathlib.Path({str(tmp_path / "pixtreme" / "infer" / "span" / "__init__.py")!r}).write_text("FACTORY = 2222")
        result.append(pixtreme.infer.span.FACTORY)
        """,
        tmp_path,
        tmp_path / "more",
    )
    assert result[0] == kind
    assert text in result[1]
    assert result[2:] == [1, 2222]


def test_unknown() -> None:
    """C9, C10: a name that is not in the table is no architecture, installed or not."""
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        _ = pixtreme.infer.nothing_of_the_kind  # type: ignore[attr-defined]
    assert not hasattr(pixtreme.infer, "esrgan")


def test_table() -> None:
    """C9, C11: two names; architectures() lists both with their distributions, dir() those that are installed."""
    assert dispatch.DISTRIBUTIONS == {"span": "pixtreme-infer-span", "cda_vsr": "pixtreme-infer-cda-vsr"}
    assert {"StreamContext", "dispatch"} <= set(dir(pixtreme.infer))
    installed = {entry.name for entry in dispatch.architectures() if entry.version is not None}
    assert set(dir(pixtreme.infer)) & dispatch.DISTRIBUTIONS.keys() == installed
    assert [(entry.name, entry.distribution) for entry in dispatch.architectures()] == [*dispatch.DISTRIBUTIONS.items()]


def test_base_dependencies_are_enough(installed: Path) -> None:
    """C13, O5: with only the base dependencies everything imports, and run_onnx names the extra."""
    result = run(
        installed,
        """
        import pixtreme.infer, numpy
        from pixtreme.infer import onnx_module, recipe_identity, streams
        names = [getattr(pixtreme.infer, name) for name in pixtreme.infer.__all__]
        try:
            pixtreme.infer.run_onnx("m.onnx", numpy.zeros((1, 1, 1, 3), numpy.float32))
        except ImportError as error:
            result = [str(error), error.name, pixtreme.infer.dispatch.architectures()]
        """,
    )
    assert result[0].endswith("how=pip install 'pixtreme-infer[ort]'")
    assert result[1] == "onnx"
    assert [version for _, _, version in result[2]] == [None, None]


def test_what_importing_brings_in(installed: Path) -> None:
    """C9, C11: no backend, event loop, plot, progress bar or architecture is imported, and no CUDA initialised."""
    result = run(
        installed,
        """
        import pixtreme.core, sys
        before = set(sys.modules)
        import pixtreme.infer
        pixtreme.infer.dispatch.architectures(), dir(pixtreme.infer)
        result = sorted({name.split(".")[0] for name in set(sys.modules) - before} | {
            name for name in sys.modules if name.startswith("pixtreme.infer.")
        })
        """,
    )
    absent = {"onnxruntime", "onnx", "anyio", "trio", "asyncio", "matplotlib", "rich", "safetensors", "tensorrt"}
    assert absent.isdisjoint(result)
    assert not [name for name in result if name.startswith(("pixtreme.infer.span", "pixtreme.infer.cda"))]
