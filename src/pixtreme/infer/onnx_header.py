"""What an ONNX file says of itself: its signature and its declared output, read without creating a session."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pixtreme.infer.contracts import is_positive_int
from pixtreme.infer.dependencies import require_optional
from pixtreme.infer.errors import ContractError

METADATA_KEY = "pixtreme.infer.contract"
INPUT_NAME = "input"
OUTPUT_NAME = "output"

Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class OnnxOutput:
    """The output an artifact declares in its metadata (O3)."""

    batch: int
    channels: int
    spatial_scale: int
    dtype: str
    layout: str


@dataclass(frozen=True)
class OnnxTensor:
    """One end of the signature. A dimension is an int, a symbol, or None where the file says nothing."""

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class OnnxHeader:
    """What a model file says before any session is made."""

    path: Path
    input: OnnxTensor
    output: OnnxTensor
    declared: OnnxOutput | None


def read_header(path: str | PathLike[str]) -> OnnxHeader:
    """Read a model's signature and metadata; its weights in external files are not touched.

    Raises
    ------
    ContractError
        The file cannot be read, is no ONNX model, or has another signature than one rank-4 ``input`` and one rank-4
        ``output``; the parser's exception is the cause.
    ImportError
        The extra ``ort`` is not installed.
    """
    onnx = require_optional("onnx", extra="ort")
    where = Path(fspath(path))
    try:
        model = onnx.load_model(where, load_external_data=False)
    except Exception as error:  # OSError, or whatever the protobuf in use raises
        raise ContractError(
            why="an artifact is a readable ONNX file",
            what=f"{str(where)!r} could not be read: {error}; accepted is a file written by onnx.save_model",
            how="check the path and export the model again",
        ) from error
    if not model.graph.output:
        _refuse(where, "a file without a graph", "an ONNX model")
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    return OnnxHeader(
        path=where,
        input=_tensor(onnx, where, inputs, INPUT_NAME),
        output=_tensor(onnx, where, list(model.graph.output), OUTPUT_NAME),
        declared=_declared(where, [entry.value for entry in model.metadata_props if entry.key == METADATA_KEY]),
    )


def _tensor(onnx: Any, where: Path, values: list[Any], name: str) -> OnnxTensor:
    names = [value.name for value in values]
    if names != [name]:
        _refuse(where, f"{name} names {names!r}", f"exactly [{name!r}]")
    kind = values[0].type.tensor_type
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    except Exception as error:
        raise ContractError(
            why="an artifact's tensors have dtypes NumPy knows",
            what=f"{name!r} of {str(where)!r} has the ONNX element type {kind.elem_type}",
            how="export the model with float32 or float16 tensors",
        ) from error
    shape = tuple(_dimension(dim) for dim in kind.shape.dim)
    if len(shape) != 4:
        _refuse(where, f"{name} shape {shape!r}", "rank 4, (batch, height, width, channels)")
    return OnnxTensor(name, dtype, shape)


def _dimension(dim: Any) -> int | str | None:
    kind = dim.WhichOneof("value")
    if kind == "dim_value":
        return int(dim.dim_value)
    return str(dim.dim_param) or None if kind == "dim_param" else None


def _declared(where: Path, values: list[str]) -> OnnxOutput | None:
    if not values:
        return None
    if len(values) > 1:
        _refuse(where, f"the metadata key {METADATA_KEY!r} {len(values)} times", "one entry")
    accepted = '{"output": {"batch": 1, "channels": 3, "spatial_scale": 4, "dtype": "float32", "layout": "NHWC"}}'
    try:
        output = json.loads(values[0], parse_constant=_no_constant)["output"]
        declared = OnnxOutput(**output)
    except (ValueError, KeyError, TypeError) as error:
        raise ContractError(
            why=f"the metadata key {METADATA_KEY!r} declares the artifact's output as JSON",
            what=f"{str(where)!r} holds {values[0][:200]!r} ({error}); accepted is the form {accepted}",
            how="write the metadata again",
        ) from error
    for field in fields(declared):
        value = getattr(declared, field.name)
        if field.type == "int":
            if not is_positive_int(value):
                _refuse(where, f"{field.name}={value!r} in its metadata", "a positive int (not a bool)")
        elif not isinstance(value, str):
            _refuse(where, f"{field.name}={value!r} in its metadata", "a string")
    if declared.layout != "NHWC":
        _refuse(where, f"layout={declared.layout!r} in its metadata", "'NHWC'")
    try:
        np.dtype(declared.dtype)
    except TypeError:
        _refuse(where, f"dtype={declared.dtype!r} in its metadata", "the name of a NumPy dtype such as 'float32'")
    return declared


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse(where: Path, observed: str, accepted: str) -> NoReturn:
    raise ContractError(
        why="an artifact is one graph with an NHWC 'input', an NHWC 'output' and a declared output",
        what=f"{str(where)!r} has {observed}; accepted is {accepted}",
        how="export the model again through a wrapper graph of that form",
    )
