"""A network that runs on every runtime, in place of ONNX Runtime, which has no emulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pixtreme.infer import _onnx_header, onnx_module


class TwoRuntimeNetwork:
    """Enlarges by repetition, as the models of `onnx_files` do."""

    def __init__(self, header: Any, contract: Any, threads: int, stream: Any) -> None:
        runtime, frames, scale = stream.runtime, contract.module_contract, contract.scale
        height, width = contract.input_hw
        self._stream = stream
        self._scale = scale
        self.input, self._source = onnx_module._zeros(runtime, (height, width), frames.input_frame)
        self.output, self._target = onnx_module._zeros(runtime, (height * scale, width * scale), frames.output_frame)

    def _run(self) -> None:
        enlarged(self._source, self._scale, self._target)

    def enqueue(self) -> None:
        self._stream.runtime.enqueue(self._stream.native, self._run)


def enlarged(source: Any, scale: int, out: Any = None) -> Any:
    """Repeat every pixel ``scale`` times a side."""
    height, width, channels = source.shape
    out = np.empty((height * scale, width * scale, channels), source.dtype) if out is None else out
    out.reshape(height, scale, width, scale, channels)[...] = source[:, None, :, None, :]
    return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ONNX module run it, and read files without ONNX Runtime."""
    read = _onnx_header.read_header
    monkeypatch.setattr(onnx_module, "read_header", lambda path, runtime: read(path, runtime=False))
    monkeypatch.setattr(onnx_module, "_Network", TwoRuntimeNetwork)
