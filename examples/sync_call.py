"""A plain synchronous module call: open, call, block for the result."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import realesr
from sklearn.datasets import load_sample_image

from pixtreme.infer import HostFrame, StreamContext, bind_onnx


def main(device: str = "auto") -> HostFrame:
    frame = HostFrame.rgb(load_sample_image("flower.jpg")[100:196, 250:378].astype(np.float32) / 255)
    with tempfile.TemporaryDirectory() as folder, StreamContext.open(device) as context:
        network = realesr.write_onnx(Path(folder) / "realesr.onnx")
        upscale = bind_onnx(context, network, input_hw=(frame.height, frame.width))
        result: HostFrame = upscale.run_sync(frame, host=True)
    print(f"{frame!r} became {result!r}")
    return result


if __name__ == "__main__":
    main()
