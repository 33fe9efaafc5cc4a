"""Bad input of contracts, recipes, artifacts and arrays: one table, one test.

A row: what is called, which error comes, and the words its message must hold. What the call could have changed (files,
kept sessions, threads, the array given) is the same before and after.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import (
    DECLARED,
    FILES,
    TO_RUN,
    model,
    write_model,
)
from samples import CATALOG, FAMILY, IMAGE, MV, RGB, STATE, TEMPORAL

from pixtreme.infer import onnx as onnx_sessions
from pixtreme.infer import run_onnx
from pixtreme.infer.contracts import (
    FrameContract,
    GpuArrayParamContract,
    ShapeProfile,
    StateFootprint,
    StatelessFamilyContract,
    StatelessModuleContract,
    StatelessOpenContract,
    TemporalFamilyContract,
    TemporalModuleContract,
    TemporalOpenContract,
    validate_call_params,
)
from pixtreme.infer.errors import ContractError, InferError
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact, OnnxFactory
from pixtreme.infer.recipe_identity import (
    RecipeCatalogEntry,
    RecipeIdentity,
    RecipeIdentityError,
    parse_recipe_identity,
    validate_recipe_reference,
)


@dataclass(frozen=True)
class Row:
    """One bad call."""

    call: Callable[..., object]
    words: tuple[str, ...]
    error: type[Exception] = ContractError
    file: Callable[[Path], Path] | None = None  # writes what the call is given


def bad(call: Callable[..., object], *words: str, error: type[Exception] = ContractError) -> Row:
    return Row(call, words, error)


DECLARATIONS: dict[str, Row] = {
    "param named frame": bad(lambda: GpuArrayParamContract("frame", (1,), "f", "u"), "name='frame'"),
    "param named reset": bad(lambda: GpuArrayParamContract("reset", (1,), "f", "u"), "name='reset'"),
    "param name": bad(lambda: GpuArrayParamContract("a b", (1,), "f", "u"), "name='a b'", "identifier"),
    "param name kind": bad(lambda: GpuArrayParamContract(3, (1,), "f", "u"), "name=3"),  # type: ignore[arg-type]
    "param size zero": bad(lambda: GpuArrayParamContract("a", (0,), "f", "u"), "shape=(0,)"),
    "param size negative": bad(lambda: GpuArrayParamContract("a", (-1,), "f", "u"), "shape=(-1,)"),
    "param size bool": bad(lambda: GpuArrayParamContract("a", (True,), "f", "u"), "shape=(True,)"),
    "param size float": bad(lambda: GpuArrayParamContract("a", (1.0,), "f", "u"), "shape=(1.0,)"),  # type: ignore[arg-type]
    "param shape list": bad(lambda: GpuArrayParamContract("a", [1], "f", "u"), "shape=[1]", "tuple"),  # type: ignore[arg-type]
    "param symbol": bad(lambda: GpuArrayParamContract("a", ("H W",), "f", "u"), "'H W'", "symbols"),
    "param symbol digit": bad(lambda: GpuArrayParamContract("a", ("1",), "f", "u"), "shape=('1',)"),
    "param symbol empty": bad(lambda: GpuArrayParamContract("a", ("",), "f", "u"), "shape=('',)"),
    "param dtype": bad(lambda: GpuArrayParamContract("a", (1,), "", "u"), "dtype=''", "non-empty"),
    "param dtype kind": bad(lambda: GpuArrayParamContract("a", (1,), np.float32, "u"), "dtype="),  # type: ignore[arg-type]
    "param unit": bad(lambda: GpuArrayParamContract("a", (1,), "f", ""), "unit=''"),
    "param unit none": bad(lambda: GpuArrayParamContract("a", (1,), "f", None), "unit=None"),  # type: ignore[arg-type]
    **{
        f"frame field {field}": bad(
            partial(FrameContract, **(vars(RGB) | {field: "x"})), f"{field}='x'", "Exact(value)"
        )
        for field in vars(RGB)
    },
    "duplicate params": bad(lambda: StatelessModuleContract(RGB, RGB, (MV, MV), 1), "['mv', 'mv']", "duplicates"),
    "params list": bad(lambda: StatelessModuleContract(RGB, RGB, [MV], 1), "params=[", "tuple"),  # type: ignore[arg-type]
    "params names": bad(lambda: StatelessModuleContract(RGB, RGB, ("mv",), 1), "params=('mv',)"),  # type: ignore[arg-type]
    "input frame": bad(lambda: StatelessModuleContract("x", RGB, (), 1), "input_frame='x'"),  # type: ignore[arg-type]
    "output frame": bad(lambda: StatelessModuleContract(RGB, None, (), 1), "output_frame=None"),  # type: ignore[arg-type]
    "scale zero": bad(lambda: StatelessModuleContract(RGB, RGB, (), 0), "scale=0"),
    "scale bool": bad(lambda: StatelessModuleContract(RGB, RGB, (), True), "scale=True", "bool"),
    "scale float": bad(lambda: StatelessModuleContract(RGB, RGB, (), 2.0), "scale=2.0"),  # type: ignore[arg-type]
    "scale nan": bad(lambda: StatelessModuleContract(RGB, RGB, (), float("nan")), "scale=nan"),  # type: ignore[arg-type]
    "scale numpy": bad(lambda: StatelessModuleContract(RGB, RGB, (), np.int64(2)), "scale="),  # type: ignore[arg-type]
    "family frame": bad(lambda: StatelessFamilyContract(RGB, 3, ()), "output_frame=3"),  # type: ignore[arg-type]
    "family params": bad(lambda: StatelessFamilyContract(RGB, RGB, None), "params=None"),  # type: ignore[arg-type]
    "open family": bad(lambda: StatelessOpenContract("x", "a", "fp32", (1, 1), 1), "family_contract='x'"),  # type: ignore[arg-type]
    "open temporal family": bad(
        lambda: StatelessOpenContract(TEMPORAL, "a", "fp32", (1, 1), 1),  # type: ignore[arg-type]
        "a StatelessFamilyContract",
    ),
    "open precision": bad(lambda: StatelessOpenContract(FAMILY, "a", "fp64", (1, 1), 1), "precision='fp64'", "'int8'"),  # type: ignore[arg-type]
    "open precision list": bad(lambda: StatelessOpenContract(FAMILY, "a", ["fp32"], (1, 1), 1), "precision="),  # type: ignore[arg-type]
    "open size zero": bad(lambda: StatelessOpenContract(FAMILY, "a", "fp32", (0, 1), 1), "input_hw=(0, 1)"),
    "open size bool": bad(lambda: StatelessOpenContract(FAMILY, "a", "fp32", (True, 1), 1), "input_hw=(True, 1)"),
    "open size list": bad(lambda: StatelessOpenContract(FAMILY, "a", "fp32", [1, 1], 1), "input_hw=[1, 1]"),  # type: ignore[arg-type]
    "open size rank": bad(lambda: StatelessOpenContract(FAMILY, "a", "fp32", (1, 1, 1), 1), "input_hw=(1, 1, 1)"),  # type: ignore[arg-type]
    "open scale": bad(lambda: StatelessOpenContract(FAMILY, "a", "fp32", (1, 1), -1), "scale=-1"),
    "temporal startup": bad(lambda: TemporalFamilyContract(RGB, RGB, (), -1), "startup_frames=-1", "an int from 0"),
    "temporal startup bool": bad(lambda: TemporalFamilyContract(RGB, RGB, (), False), "startup_frames=False", "bool"),
    "temporal startup float": bad(lambda: TemporalFamilyContract(RGB, RGB, (), 0.0), "startup_frames=0.0"),  # type: ignore[arg-type]
    "temporal family frame": bad(lambda: TemporalFamilyContract(None, RGB, (), 0), "input_frame=None"),  # type: ignore[arg-type]
    "temporal family params": bad(lambda: TemporalFamilyContract(RGB, RGB, (MV, MV), 0), "duplicates"),
    "temporal module state": bad(
        lambda: TemporalModuleContract(RGB, RGB, (), 1, 0, 64),  # type: ignore[arg-type]
        "state_footprint=64",
        "a StateFootprint",
    ),
    "temporal module scale": bad(lambda: TemporalModuleContract(RGB, RGB, (), 0, 0, STATE), "scale=0"),
    "temporal module startup": bad(lambda: TemporalModuleContract(RGB, RGB, (), 1, -1, STATE), "startup_frames=-1"),
    "temporal open family": bad(
        lambda: TemporalOpenContract(FAMILY, "a", "fp32", (1, 1), 1, STATE),  # type: ignore[arg-type]
        "a TemporalFamilyContract",
    ),
    "temporal open size": bad(lambda: TemporalOpenContract(TEMPORAL, "a", "fp32", (1,), 1, STATE), "input_hw=(1,)"),  # type: ignore[arg-type]
    "temporal open state": bad(
        lambda: TemporalOpenContract(TEMPORAL, "a", "fp32", (1, 1), 1, None),  # type: ignore[arg-type]
        "state_footprint=None",
    ),
    "state zero": bad(lambda: StateFootprint(0), "amount=0"),
    "state bool": bad(lambda: StateFootprint(True), "amount=True"),
    "state float": bad(lambda: StateFootprint(1.5), "amount=1.5"),  # type: ignore[arg-type]
    "state unit": bad(lambda: StateFootprint(1, ""), "unit=''"),
    "profile order": bad(lambda: ShapeProfile((4, 4), (2, 8), (8, 8)), "(4, 2, 8)", "min <= opt <= max"),
    "profile order of width": bad(lambda: ShapeProfile((4, 4), (4, 9), (8, 8)), "(4, 9, 8)"),
    "profile zero": bad(lambda: ShapeProfile((0, 4), (4, 4), (8, 8)), "min_hw=(0, 4)"),
    "profile bool": bad(lambda: ShapeProfile((1, 1), (1, 1), (1, True)), "max_hw=(1, True)"),
    "profile list": bad(lambda: ShapeProfile((1, 1), [1, 1], (1, 1)), "opt_hw=[1, 1]"),  # type: ignore[arg-type]
    **{
        f"call {names}": bad(
            partial(validate_call_params, StatelessModuleContract(RGB, RGB, (MV,), 1), names), *words, "accepted are"
        )
        for names, words in (
            ((), ("missing ['mv']",)),
            (("reset", "mv"), ("undeclared ['reset']",)),
            (("other",), ("missing ['mv']", "undeclared ['other']")),
        )
    },
    "temporal call": bad(
        partial(validate_call_params, TemporalModuleContract(RGB, RGB, (MV,), 1, 0, STATE), ("reset", "more")),
        "missing ['mv']",
        "undeclared ['more']",
        "['mv', 'reset']",
    ),
    "call of no contract": bad(lambda: validate_call_params("x", ()), "contract='x'"),  # type: ignore[arg-type]
}

RECIPES: dict[str, Row] = {
    name: Row(call, words, RecipeIdentityError)
    for name, call, words in [
        ("name empty", lambda: RecipeIdentity("", 1), ("RecipeIdentity.name: observed ''", "non-empty")),
        ("name kind", lambda: RecipeIdentity(3, 1), ("RecipeIdentity.name: observed 3",)),  # type: ignore[arg-type]
        ("version zero", lambda: RecipeIdentity("a", 0), ("RecipeIdentity.version: observed 0", "from 1")),
        ("version bool", lambda: RecipeIdentity("a", True), ("observed True", "bool")),
        ("version text", lambda: RecipeIdentity("a", "1"), ("observed '1'",)),  # type: ignore[arg-type]
        ("version float", lambda: RecipeIdentity("a", 1.0), ("observed 1.0",)),  # type: ignore[arg-type]
        ("version nan", lambda: RecipeIdentity("a", float("nan")), ("observed nan",)),  # type: ignore[arg-type]
        ("parse list", lambda: parse_recipe_identity(["a", 1], path="m.recipe"), ("m.recipe: observed ['a', 1]",)),
        ("parse none", lambda: parse_recipe_identity(None, path="p"), ("p: observed None",)),
        ("parse missing", lambda: parse_recipe_identity({"name": "a"}, path="p"), ("['name']", "'version'")),
        (
            "parse unknown",
            lambda: parse_recipe_identity({"name": "a", "version": 1, "more": 2}, path="p"),
            ("'more'",),
        ),
        (
            "parse version",
            lambda: parse_recipe_identity({"name": "a", "version": True}, path="p"),
            ("p.version: observed True",),
        ),
        ("parse name", lambda: parse_recipe_identity({"name": "", "version": 1}, path="p"), ("p.name: observed ''",)),
        ("entry identity", lambda: RecipeCatalogEntry(("a", 1), ("fp32",)), ("observed ('a', 1)",)),  # type: ignore[arg-type]
        ("entry empty", lambda: RecipeCatalogEntry(RecipeIdentity("a", 1), ()), ("observed ()",)),
        ("entry precision", lambda: RecipeCatalogEntry(RecipeIdentity("a", 1), ("fp8",)), ("('fp8',)", "'fp16'")),  # type: ignore[arg-type]
        ("entry text", lambda: RecipeCatalogEntry(RecipeIdentity("a", 1), "fp32"), ("observed 'fp32'",)),  # type: ignore[arg-type]
        (
            "not in the catalog",
            lambda: validate_recipe_reference(RecipeIdentity("photo", 1), catalog=CATALOG, path="p"),
            ("p: observed RecipeIdentity(name='photo', version=1)", "[('photo', 2)]"),
        ),
        (
            "an empty catalog",
            lambda: validate_recipe_reference(RecipeIdentity("photo", 1), catalog=(), path="p"),
            ("holds []",),
        ),
        (
            "unsupported precision",
            lambda: validate_recipe_reference(RecipeIdentity("photo", 2), catalog=CATALOG, path="p", precision="fp16"),
            ("precision='fp16'", "('fp32',)"),
        ),
    ]
}

ARRAYS: dict[str, Row] = {
    f"array {name}": Row(
        lambda path, value=value: run_onnx(path, value), words, file=lambda at: write_model(at / "m.onnx")
    )
    for name, value, words in [
        ("list", [[1.0]], ("received a list", "float32 NumPy array")),
        ("none", None, ("received a NoneType",)),
        ("float64", IMAGE.astype(np.float64), ("dtype('float64')",)),
        ("float16", IMAGE.astype(np.float16), ("dtype('float16')",)),
        ("uint8", IMAGE.astype(np.uint8), ("dtype('uint8')",)),
        ("object", IMAGE.astype(object), ("dtype('O')",)),
        ("big endian", IMAGE.astype(">f4"), ("dtype('>f4')", "native")),
        ("rank", IMAGE[0], ("shape (4, 6, 3)", "(1, H, W, 3)")),
        ("batch", np.repeat(IMAGE, 2, 0), ("shape (2, 4, 6, 3)",)),
        ("layout", IMAGE.transpose(0, 3, 1, 2), ("shape (1, 3, 4, 6)",)),
        ("empty", IMAGE[:, :0], ("shape (1, 0, 6, 3)", "from 1")),
        ("channels", np.zeros((1, 4, 6, 4), np.float32), ("shape (1, 4, 6, 4)",)),
    ]
}


def _query(path: Path) -> object:
    return FACTORY.query_contract(OnnxArtifact(path), precision="fp32", input_hw=(4, 6))


MODULE: dict[str, Row] = {
    f"module {name}": Row(call, words, file=model(**(options or {})))
    for name, options, call, words in [
        ("precision", None, lambda at: _call_module(at, precision="int8"), ("precision='int8'", "fp32")),
        ("no precision", None, lambda at: _call_module(at, precision="fp64"), ("precision='fp64'",)),
        ("size", None, lambda at: _call_module(at, input_hw=(0, 6)), ("input_hw=(0, 6)",)),
        ("size list", None, lambda at: _call_module(at, input_hw=[4, 6]), ("input_hw=[4, 6]",)),
        ("artifact", None, lambda at: _call_module("net.onnx"), ("artifact='net.onnx'", "an OnnxArtifact")),
        ("scale", None, lambda at: OnnxArtifact(at, scale=0), ("scale=0",)),
        ("scale bool", None, lambda at: OnnxArtifact(at, scale=True), ("scale=True",)),
        ("path", None, lambda at: OnnxArtifact(3), ("path=3",)),  # type: ignore[arg-type]
        ("threads", None, lambda at: OnnxFactory(threads=0), ("threads=0",)),
        ("threads bool", None, lambda at: OnnxFactory(threads=True), ("threads=True",)),
        ("other scale", None, lambda at: _call_module(OnnxArtifact(at, scale=3)), ("scale=3", "2 as declared")),
        ("channels", {"shape": (1, "H", "W", 5)}, _query, ("5 channels",)),
        ("free channels", {"shape": (1, "H", "W", "C")}, _query, ("'C' channels",)),
        ("batch", {"shape": (2, "H", "W", 3)}, _query, ("axis 0", "would be 1")),
        ("declared batch", {"out": ("N", "H2", "W2", 3), "metadata": DECLARED | {"batch": 2}}, _query, ("batch=2",)),
        ("no scale", {"metadata": None}, _query, ("no scale", "OnnxArtifact(path, scale=N)")),
    ]
}


def _call_module(artifact: Any, **options: Any) -> object:
    if isinstance(artifact, Path):
        artifact = OnnxArtifact(artifact)
    return FACTORY.query_contract(artifact, **({"precision": "fp32", "input_hw": (4, 6)} | options))


def _run(path: Path) -> object:
    return run_onnx(path, IMAGE)


ROWS = {
    **DECLARATIONS,
    **RECIPES,
    **ARRAYS,
    **MODULE,
    **{f"run {name}": Row(_run, words, file=file) for name, (file, words) in (FILES | TO_RUN).items()},
    **{f"query {name}": Row(_query, words, file=file) for name, (file, words) in FILES.items()},
}


def test_the_table_is_long() -> None:
    """At least a hundred rows."""
    assert len(ROWS) >= 100


@pytest.mark.parametrize("name", ROWS)
def test_bad_input(tmp_path: Path, name: str) -> None:
    """C2, C6, C7, C14, O2-O5, O7, O11, C40, C43-C45: why, what was observed and is accepted, how; nothing changed."""
    row = ROWS[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    arguments = (row.file(folder),) if row.file is not None else ()

    def state() -> object:
        files = sorted((str(path), os.lstat(path).st_mtime_ns) for path in tmp_path.rglob("*"))
        return (
            files,
            threading.active_count(),
            IMAGE.tobytes(),
            os.getcwd(),
            set(onnx_sessions._sessions) - {*arguments},
        )

    before = state()
    with pytest.raises(row.error) as raised:
        row.call(*arguments)
    assert state() == before
    assert isinstance(raised.value, InferError)
    assert isinstance(raised.value, ValueError)
    message = str(raised.value)
    message.encode()  # it can be printed, whatever the file's name
    assert all(word in message for word in row.words), message
    assert min(len(raised.value.why), len(raised.value.what), len(raised.value.how)) > 5
