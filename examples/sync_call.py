"""A plain synchronous module call: open, call, block for the result."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import realesr
from sklearn.datasets import load_sample_image

from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact
from pixtreme.infer.streams import StreamContext


def main() -> None:
    pixels = load_sample_image("flower.jpg")[100:196, 250:378].astype(np.float32) / 255
    frame = HostFrame(data=pixels, channels="RGB", colorspace="sRGB", gamma="sRGB")
    with tempfile.TemporaryDirectory() as folder, StreamContext.open("cpu") as context:
        artifact = OnnxArtifact(realesr.write_onnx(Path(folder) / "realesr.onnx"))
        upscale = context.bind(FACTORY, artifact, precision="fp32", input_hw=pixels.shape[:2])
        result = upscale(frame).result()
    print(f"{frame!r} became {result!r}")


if __name__ == "__main__":
    main()
