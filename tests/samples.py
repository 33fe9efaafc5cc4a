"""Values that several test files use: contracts, pixels, small models, and a way to break a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from helpers import Boom
from onnx_files import write_model

from pixtreme.infer.contracts import (
    Exact,
    FrameContract,
    GpuArrayParamContract,
    StateFootprint,
    StatelessFamilyContract,
    TemporalFamilyContract,
    UnconstrainedWithReference,
)
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import OnnxArtifact
from pixtreme.infer.recipe_identity import RecipeCatalogEntry, RecipeIdentity
from pixtreme.infer.runtimes.host import HostStream

IMAGE = np.zeros((1, 4, 6, 3), np.float32)
RGB = FrameContract(
    channels=Exact(("R", "G", "B")),
    colorspace=UnconstrainedWithReference("sRGB"),
    gamma=UnconstrainedWithReference("sRGB"),
    matrix=Exact(None),
    dtype=Exact("float32"),
)
MV = GpuArrayParamContract("mv", ("H", "W", 2), "float32", "pixel")
FAMILY = StatelessFamilyContract(RGB, RGB, (MV,))
TEMPORAL = TemporalFamilyContract(RGB, RGB, (MV,), 1)
STATE = StateFootprint(64)
CATALOG = (RecipeCatalogEntry(RecipeIdentity("photo", 2), ("fp32",)),)
HW = (48, 64)


def photograph(*, at: int = 100) -> HostFrame:
    """A piece of a real photograph."""
    from sklearn.datasets import load_sample_image  # absent where only the emulated device is tested

    pixels = load_sample_image("china.jpg")[at : at + HW[0], 300 : 300 + HW[1]].astype(np.float32) / 255
    return HostFrame(data=pixels, channels="RGB", colorspace="sRGB", gamma="sRGB")


def small_model(path: Path, **options: Any) -> OnnxArtifact:
    """Write a nearest-neighbour upscaler as an artifact."""
    return OnnxArtifact(write_model(path, **options))


def break_host_stream(stream: HostStream) -> None:
    def task() -> None:
        raise Boom

    stream.enqueue(task)
