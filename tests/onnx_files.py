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
