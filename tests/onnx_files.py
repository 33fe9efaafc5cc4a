"""ONNX files that tests open: a nearest-neighbour upscaler with one thing or another wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

KEY = "pixtreme.infer.contract"
DECLARED = {"batch": 1, "channels": 3, "spatial_scale": 2, "dtype": "float32", "layout": "NHWC"}

Edit = Callable[[Any], object]


def write_model(
    path: Path,
    *,
    kind: int = TensorProto.FLOAT,
    metadata: Any = DECLARED,
    shape: tuple[Any, ...] = (1, "H", "W", 3),
    names: tuple[str, str] = ("input", "output"),
    factor: int = 2,
    out: tuple[Any, ...] = (1, "2H", "2W", 3),
    edit: Edit | None = None,
) -> Path:
    """Write the upscaler; ``edit`` has the last word on the model."""
    scales = numpy_helper.from_array(np.array([1, factor, factor, 1], np.float32), "scales")
    nodes = [helper.make_node("Resize", [names[0], "", "scales"], [names[1]], mode="nearest")]
    ends = [
        helper.make_tensor_value_info(name, kind, list(dims)) for name, dims in zip(names, (shape, out), strict=True)
    ]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], [scales])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if metadata is not None:
        text = metadata if isinstance(metadata, str) else json.dumps({"output": metadata})
        helper.set_model_props(model, {KEY: text})
    if edit is not None:
        edit(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def put_outside(model: Any, location: str, **place: object) -> None:
    """Say that the model's weights lie in another file."""
    tensor = model.graph.initializer[0]
    content = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": 0, "length": len(content), **place}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def write_external(folder: Path, location: str = "w.bin", **place: object) -> Path:
    """Write the upscaler with its weights outside, and ``w.bin`` with those weights beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "w.bin").write_bytes(np.array([1, 2, 2, 1], np.float32).tobytes())
    return write_model(folder / "m.onnx", edit=lambda model: put_outside(model, location, **place))


def write_brightener(folder: Path, factor: float) -> Path:
    """Write the upscaler with a factor on its output, which lies in ``w.bin`` beside it."""

    def edit(model: Any) -> None:
        model.graph.node[0].output[0] = "large"
        model.graph.node.append(helper.make_node("Mul", ["large", "factor"], ["output"]))
        model.graph.initializer.insert(0, numpy_helper.from_array(np.array([0], np.float32), "factor"))
        put_outside(model, "w.bin")

    written(folder / "w.bin", np.float32(factor).tobytes())
    return write_model(folder / "m.onnx", edit=edit)


def write_linked(folder: Path) -> Path:
    """Write the upscaler with weights behind a link out of its folder."""
    path = write_external(folder / "model", "link.bin")
    (folder / "secret.bin").write_bytes(bytes(16))
    os.symlink(folder / "secret.bin", folder / "model" / "link.bin")
    return path


def with_opsets(*imports: tuple[str, int]) -> Edit:
    """Replace the opset imports."""

    def edit(model: Any) -> None:
        del model.opset_import[:]
        model.opset_import.extend(helper.make_opsetid(*entry) for entry in imports)

    return edit


def with_metadata(*entries: tuple[str, str]) -> Edit:
    """Add metadata entries."""

    def edit(model: Any) -> None:
        for key, value in entries:
            entry = model.metadata_props.add()
            entry.key, entry.value = key, value

    return edit


def with_unknown_operator(model: Any) -> None:
    """Make the model's one node an operator that no installed library implements."""
    model.graph.node[0].domain, model.graph.node[0].op_type = "my.domain", "Unknown"
    model.opset_import.append(helper.make_opsetid("my.domain", 1))


def written(path: Path, content: bytes) -> Path:
    """Write bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def model(**options: Any) -> Callable[[Path], Path]:
    return lambda at: write_model(at / "m.onnx", **options)


def declared(**changes: Any) -> Callable[[Path], Path]:
    return model(metadata=DECLARED | changes)


def outside(*args: Any, **options: Any) -> Callable[[Path], Path]:
    return lambda at: write_external(at, *args, **options)


FILES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "absent": (lambda at: at / "absent.onnx", ("could not be read", "absent.onnx")),
    "folder": (lambda at: at, ("could not be read",)),
    "empty": (lambda at: written(at / "m.onnx", b""), ("without a graph",)),
    "zip": (lambda at: written(at / "m.onnx", b"PK\x03\x04 not a model" * 9), ("could not be read",)),
    "truncated": (
        lambda at: written(at / "cut.onnx", write_model(at / "m.onnx").read_bytes()[:-40]),
        ("could not be read",),
    ),
    "name of 300 characters": (lambda at: at / ("n" * 300 + ".onnx"), ("could not be read",)),
    "input name": (model(names=("x", "output")), ("input names ['x']", "['input']")),
    "output name": (model(names=("input", "y")), ("output names ['y']",)),
    "non-ASCII name": (model(names=("入力", "output")), ("input names ['入力']",)),
    "rank": (model(shape=(1, "H", 3)), ("rank 4", "(1, 'H', 3)")),
    "output rank": (model(out=("H", "W", 3)), ("output shape", "rank 4")),
    "size zero": (model(shape=(1, 0, "W", 3)), ("(1, 0, 'W', 3)", "sizes from 1")),
    "size negative": (model(shape=(1, -1, "W", 3)), ("(1, -1, 'W', 3)",)),
    "fixed size": (model(shape=(1, 8, 8, 3)), ("(1, 8, 8, 3)", "would be 4")),
    "one symbol twice": (
        model(shape=(1, "N", "N", 3)),
        ("axis 2 of 'input' is 'N'", "4 by an earlier axis", "would be 6"),
    ),
    "symbol of the input in the output": (
        model(out=(1, "H", "W", 3)),
        ("axis 1 of 'output' is 'H'", "would be 8"),
    ),
    "bfloat16": (model(kind=TensorProto.BFLOAT16), ("'bfloat16'", "'float32'")),
    "string tensor": (model(kind=TensorProto.STRING), ("'input' ", "'float32'")),
    "no such element type": (model(kind=99), ("element type 99",)),
    "metadata no json": (model(metadata="{"), ("JSON", KEY)),
    "metadata empty": (model(metadata=""), ("holds ''", "JSON")),
    "metadata nan": (model(metadata='{"output": NaN}'), ("NaN",)),
    "metadata no output": (model(metadata="{}"), ("missing", "'layout'")),
    "metadata list": (model(metadata="[]"), ("missing",)),
    "metadata no object": (model(metadata='{"output": 3}'), ("missing",)),
    "metadata deep": (model(metadata="[" * 100_000), ("JSON",)),
    "metadata of 1 MiB": (model(metadata="x" * (1 << 20)), ("JSON",)),
    "metadata missing key": (model(metadata={"batch": 1}), ("missing ['channels'",)),
    "metadata unknown key": (declared(more=1), ("['more']",)),
    "metadata key twice": (
        model(metadata='{"output": {"batch": 1, "batch": 2}}'),
        ("twice", "'batch'"),
    ),
    "metadata entry twice": (
        model(edit=with_metadata((KEY, "{}"))),
        (f"{KEY!r} 2 times",),
    ),
    "metadata bool": (declared(batch=True), ("batch=True", "bool")),
    "metadata zero": (declared(spatial_scale=0), ("spatial_scale=0",)),
    "metadata text": (declared(channels="3"), ("channels='3'",)),
    "metadata float": (declared(channels=3.0), ("channels=3.0",)),
    "metadata layout": (declared(layout="NCHW"), ("'NCHW'", "'NHWC'")),
    "metadata dtype": (declared(dtype="floaty"), ("'floaty'",)),
    "metadata dtype kind": (declared(dtype=3), ("dtype=3", "string")),
    "metadata other dtype": (declared(dtype="uint8"), ("'uint8'", "'float32'")),
    "metadata other channels": (declared(channels=1), ("channels=1",)),
    "weights above the folder": (outside("../w.bin"), ("'scales'", "'../w.bin'", "inside")),
    "weights above, detoured": (outside("sub/../../w.bin"), ("'sub/../../w.bin'",)),
    "weights at a path": (outside("/etc/hostname"), ("'/etc/hostname'",)),
    "weights at a Windows path": (outside("C:\\w.bin"), ("w.bin'", "relative path")),
    "weights behind backslashes": (outside("..\\w.bin"), ("w.bin'", "relative path")),
    "weights with NUL": (outside("w\0.bin"), (r"'w\x00.bin'",)),
    "weights nowhere": (outside(""), ("location ''",)),
    "weights behind a link": (write_linked, ("'link.bin'", "a link out of")),
    "weights absent": (outside("absent.bin"), ("'absent.bin'", "no file")),
    "weights past the end": (outside(offset=8), ("offset '8' and length '16'", "16 bytes")),
    "weights far past the end": (outside(offset=2**63, length=2**63), (str(2**63),)),
    "weights before the start": (outside(offset=-4), ("offset '-4'",)),
    "weights of no length": (outside(length="all"), ("length 'all'",)),
}  # fmt: skip

# What only run_onnx refuses, or only when a session is about to be made.
TO_RUN: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "no metadata": (model(metadata=None), (KEY, "no metadata key")),
    "metadata in other case": (
        model(metadata=None, edit=with_metadata((KEY.upper(), "{}"))),
        (KEY.upper(), "no metadata key"),
    ),
    "float16": (
        model(kind=TensorProto.FLOAT16, metadata=DECLARED | {"dtype": "float16"}),
        ("'float16'", "['float32']"),
    ),
    "other scale than declared": (model(factor=3), ("(1, 12, 18, 3)", "(1, 8, 12, 3)")),
    "opset too new": (model(edit=with_opsets(("", 99))), ("opset 99", "onnxruntime")),
    "opset too old": (model(edit=with_opsets(("", 6))), ("opset 6", "from 7")),
    "no opset": (model(edit=with_opsets()), ("opset imports []",)),
    "second domain too new": (
        model(edit=with_opsets(("", 17), ("ai.onnx.ml", 99))),
        ("opset 99 of the domain 'ai.onnx.ml'",),
    ),
    "file format too new": (
        model(edit=lambda model: setattr(model, "ir_version", 99)),
        ("version 99", "onnxruntime"),
    ),
    "file format missing": (
        model(edit=lambda model: model.ClearField("ir_version")),
        ("version 0", "from 3"),
    ),
    "unknown operator": (model(edit=with_unknown_operator), ("my.domain", "refused by")),
    "many problems at once": (
        model(shape=(1, "H", 3), names=("input", "y"), metadata="{", edit=with_opsets(("", 99))
        ),
        ("rank 4", "output names", "JSON", "opset 99"),),
    "weights of a constant outside": (
        model(edit=lambda model: put_outside(model, "../../w.bin")),
        ("'../../w.bin'",),
    ),
}  # fmt: skip
