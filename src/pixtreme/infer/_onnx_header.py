"""What an ONNX file says of itself, looked at before any session is made: every problem at once (O3, O11)."""

from __future__ import annotations

import json
import ntpath
import os
import posixpath
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.dependencies import require_optional
from pixtreme.infer.errors import ContractError

METADATA_KEY = "pixtreme.infer.contract"
INPUT_NAME = "input"
OUTPUT_NAME = "output"
LEAST_OPSET = 7  # what ONNX Runtime promises to support

Shape = tuple[int | str | None, ...]
AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


@dataclass(frozen=True)
class OnnxOutput:
    """The output an artifact declares in its metadata (O3)."""

    batch: int
    channels: int
    spatial_scale: int
    dtype: str
    layout: str


_ACCEPTED = '{"output": {"batch": 1, "channels": 3, "spatial_scale": 4, "dtype": "float32", "layout": "NHWC"}}'


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
    external: tuple[Path, ...]  #: files beside it that hold its weights

    def misfits(self, hw: tuple[int, int], channels: int, scale: int) -> list[str]:
        """Tell where the signature contradicts an input of this size; a symbol stands for one number everywhere."""
        height, width = hw
        bound: dict[str, int] = {}
        found = []
        out = (height * scale, width * scale)
        for tensor, sizes in ((self.input, (1, *hw, channels)), (self.output, (1, *out))):
            for axis, (dim, size) in enumerate(zip(tensor.shape, sizes, strict=False)):
                expected = bound.setdefault(dim, size) if isinstance(dim, str) else dim
                if expected not in (None, size):
                    found.append(
                        f"axis {axis} of {tensor.name!r} is {dim!r} in the signature {tensor.shape!r}"
                        f"{f', {expected} by an earlier axis,' if isinstance(dim, str) else ''} and would be {size}"
                    )
        return found


def read_header(
    path: AnyPath, *, dtypes: Collection[str] = ("float32", "float16"), metadata: bool = False, runtime: bool = False
) -> OnnxHeader:
    """Read a model's signature and metadata, and check them; weights in external files are not opened.

    Parameters
    ----------
    path
        The file.
    dtypes
        Accepted names of the input's dtype.
    metadata
        The declared output must be there.
    runtime
        Also check the file-format and opset versions against the installed onnxruntime.

    Raises
    ------
    ContractError
        The file cannot be read (the parser's exception is the cause), or what it says has problems: all are listed.
    ImportError
        The extra ``ort`` is not installed.
    """
    onnx = require_optional("onnx", extra="ort")
    where = Path(os.fsdecode(path))
    model = _load(onnx, where)
    problems: list[str] = []
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    source = _tensor(onnx, problems, inputs, INPUT_NAME)
    target = _tensor(onnx, problems, list(model.graph.output), OUTPUT_NAME)
    if source is not None and source.dtype not in dtypes:
        problems.append(f"{INPUT_NAME!r} of dtype {source.dtype!r}; accepted is one of {sorted(dtypes)!r}")
    entries = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
    declared = _declared(problems, [entry.value for entry in entries])
    if metadata and not entries:
        keys = [entry.key for entry in model.metadata_props]
        problems.append(f"no metadata key {METADATA_KEY!r} among {keys[:12]!r}; accepted is the form {_ACCEPTED}")
    if declared is not None and target is not None:
        _compare(problems, declared, target)
    external = _external(problems, model, where)
    if runtime:
        problems += _unsupported(model.ir_version, [(entry.domain, entry.version) for entry in model.opset_import])
    if problems or source is None or target is None:
        _refuse(where, problems)
    return OnnxHeader(where, source, target, declared, external)


def _load(onnx: Any, where: Path) -> Any:
    try:
        model = onnx.load_model(where, load_external_data=False)
    except Exception as error:  # OSError, or whatever the protobuf in use raises
        raise ContractError(
            why="an artifact is a readable ONNX file",
            what=f"{str(where)!r} could not be read: {error}; accepted is a file written by onnx.save_model",
            how="check the path and export the model again",
        ) from error
    if not model.graph.output:
        _refuse(where, ["a file without a graph; accepted is an ONNX model"])
    return model


def _tensor(onnx: Any, problems: list[str], values: list[Any], name: str) -> OnnxTensor | None:
    names = [value.name for value in values]
    if names != [name]:
        problems.append(f"{name} names {names!r}; accepted is exactly [{name!r}]")
        return None
    kind = values[0].type.tensor_type
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    except Exception:  # KeyError, or what another version of onnx raises
        problems.append(f"{name!r} with the ONNX element type {kind.elem_type}; accepted are dtypes NumPy knows")
        return None
    shape = tuple(_dimension(dim) for dim in kind.shape.dim)
    if len(shape) != 4:
        problems.append(f"{name} shape {shape!r}; accepted is rank 4, (batch, height, width, channels)")
        return None
    if any(isinstance(dim, int) and dim < 1 for dim in shape):
        problems.append(f"{name} shape {shape!r}; accepted are sizes from 1, symbols and free axes")
    return OnnxTensor(name, dtype, shape)


def _dimension(dim: Any) -> int | str | None:
    kind = dim.WhichOneof("value")
    if kind == "dim_value":
        return int(dim.dim_value)
    return str(dim.dim_param) or None if kind == "dim_param" else None


def _declared(problems: list[str], values: list[str]) -> OnnxOutput | None:
    if not values:
        return None
    if len(values) > 1:
        problems.append(f"the metadata key {METADATA_KEY!r} {len(values)} times; accepted is one entry")
        return None
    accepted = f"accepted is JSON of the form {_ACCEPTED}"
    held = f"metadata {METADATA_KEY!r} that holds {values[0][:200]!r}"
    try:
        parsed = json.loads(values[0], parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        problems.append(f"{held} ({error}); {accepted}")
        return None
    output = parsed.get("output") if isinstance(parsed, dict) else None
    names = {field.name for field in fields(OnnxOutput)}
    if not isinstance(output, dict) or set(output) != names:
        keys = set(output) if isinstance(output, dict) else set()
        problems.append(f"{held}, missing {sorted(names - keys)!r}, unknown {sorted(keys - names)!r}; {accepted}")
        return None
    declared = OnnxOutput(**output)
    before = len(problems)
    for field in fields(declared):
        value = getattr(declared, field.name)
        if field.type == "int" and not is_positive_int(value):
            problems.append(f"{field.name}={value!r} in its metadata; accepted is a positive int (not a bool)")
    if declared.layout != "NHWC":
        problems.append(f"layout={declared.layout!r} in its metadata; accepted is 'NHWC'")
    if not (isinstance(declared.dtype, str) and _names_a_dtype(declared.dtype)):
        problems.append(f"dtype={declared.dtype!r} in its metadata; accepted is a string, the name of a NumPy dtype")
    return declared if len(problems) == before else None


def _names_a_dtype(text: str) -> bool:
    try:
        return np.dtype(text).name == text
    except (TypeError, ValueError):  # what NumPy says of a name it does not know, or cannot parse
        return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError(f"a key stands twice in {[key for key, _ in pairs]!r}")
    return dict(pairs)


def _compare(problems: list[str], declared: OnnxOutput, target: OnnxTensor) -> None:
    if declared.dtype != target.dtype:
        problems.append(f"dtype={declared.dtype!r} in its metadata; accepted is that of its output, {target.dtype!r}")
    for name, axis in (("batch", 0), ("channels", 3)):
        value, dim = getattr(declared, name), target.shape[axis]
        if isinstance(dim, int) and value != dim:
            problems.append(f"{name}={value!r} in its metadata; accepted is that of its output {target.shape!r}")


def _external(problems: list[str], model: Any, where: Path) -> tuple[Path, ...]:
    """Check where weights outside the model file lie; none of them is opened (C40)."""
    folder = Path(os.path.realpath(where.parent))
    found = set()
    for tensor in _tensors(model):
        if tensor.data_location != tensor.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        location = place.get("location", "")
        name = f"tensor {tensor.name!r} with external location {location!r}"
        parts = location.replace("\\", "/").split("/")
        absolute = posixpath.isabs(location) or ntpath.isabs(location) or ntpath.splitdrive(location)[0]
        if not location or "\0" in location or absolute or ".." in parts:
            problems.append(f"{name}; accepted is a relative path inside the model's folder")
            continue
        file = Path(os.path.realpath(folder / location))
        if not file.is_relative_to(folder):
            problems.append(f"{name}, a link out of the model's folder; accepted is a file inside")
        elif not file.is_file():
            problems.append(f"{name}, which is no file; accepted is a file inside the model's folder")
        else:
            found.add(file)
            _check_range(problems, name, place, file.stat().st_size)
    return tuple(sorted(found))


def _check_range(problems: list[str], name: str, place: dict[str, str], size: int) -> None:
    offset, length = place.get("offset", "0"), place.get("length", "0")
    if not (offset.isdecimal() and length.isdecimal()) or int(offset) + int(length) > size:
        problems.append(f"{name}, offset {offset!r} and length {length!r}; accepted is a range of its {size} bytes")


def _tensors(model: Any) -> Iterator[Any]:
    graphs, nodes = [model.graph], [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes.extend(graph.node)
            continue
        for attribute in nodes.pop().attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            graphs += [graph for graph in (attribute.g, *attribute.graphs) if graph.node or graph.initializer]


def _unsupported(ir_version: int, opsets: list[tuple[str, int]]) -> list[str]:
    """Tell which versions the installed onnxruntime does not take; it publishes no list, so it is asked (C45)."""
    names = [domain for domain, _ in opsets]
    default = [version for domain, version in opsets if domain in ("", "ai.onnx")]
    found = []
    if len(default) != 1 or len(set(names)) != len(names):
        found.append(f"opset imports {opsets!r}; accepted is one version for each domain, the default one included")
    if default and default[0] < LEAST_OPSET:
        found.append(f"opset {default[0]} of the default domain; accepted are those from {LEAST_OPSET}")
    found += [f"file-format (IR) version {ir_version}; {answer}" for answer in _refusal(ir_version, "", 17)]
    for domain, version in opsets:
        if domain not in ("", "ai.onnx") or version >= LEAST_OPSET:
            answers = _refusal(8, "" if domain == "ai.onnx" else domain, version)
            found += [f"opset {version} of the domain {domain or 'ai.onnx'!r}; {answer}" for answer in answers]
    return found


@cache
def _refusal(ir_version: int, domain: str, version: int) -> tuple[str, ...]:
    """Return what the installed onnxruntime says against a one-node model of these versions; nothing if it takes it."""
    ort = require_optional("onnxruntime", extra="ort")
    onnx = require_optional("onnx", extra="ort")
    if not ir_version >= 3:
        return ("accepted are those from 3, the first with opsets",)
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, kind, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", ends[:1], ends[1:])
    imports = {"": 17} | {domain: version}
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*entry) for entry in imports.items()])
    model.ir_version = ir_version
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes share no public base
        return (f"accepted is what onnxruntime {ort.__version__} takes: {error}",)
    return ()


def _refuse(where: Path, problems: list[str]) -> NoReturn:
    raise ContractError(
        why="an artifact is one graph with an NHWC 'input', an NHWC 'output' and a declared output",
        what=f"{str(where)!r} has {'; and it has '.join(problems)}",
        how="export the model again through a wrapper graph of that form",
    )
