"""The contracts a stateless module needs (C5-C7), and typing of the public surface."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any, assert_type

import pytest
from helpers import frame
from pixtreme.core import Frame

from pixtreme.infer.contracts import (
    CudaGraphFactoryProvider,
    Exact,
    FrameContract,
    GpuArrayParamContract,
    StatelessFamilyContract,
    StatelessInferenceFactory,
    StatelessModuleContract,
    StatelessOpenContract,
    UnconstrainedWithReference,
    check_frame,
)
from pixtreme.infer.errors import ContractError
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact, OnnxFactory
from pixtreme.infer.streams import BoundInference, EventHandle, StreamContext, wait_all

RGB = FrameContract(
    channels=Exact(("R", "G", "B")),
    colorspace=UnconstrainedWithReference("sRGB"),
    gamma=UnconstrainedWithReference("sRGB"),
    matrix=Exact(None),
    dtype=Exact("float32"),
)
MV = GpuArrayParamContract("mv", ("H", "W", 2), "float32", "pixel")
FAMILY = StatelessFamilyContract(RGB, RGB, (MV,))


def test_open_contract_derives_the_module_contract() -> None:
    """C6: one artifact, precision and size; the module contract is the family's with the scale."""
    opened = StatelessOpenContract(FAMILY, "artifact", "fp16", (4, 6), 2)
    assert opened.module_contract == StatelessModuleContract(RGB, RGB, (MV,), 2)
    assert opened.module_contract.temporal is False
    with pytest.raises(FrozenInstanceError):
        opened.scale = 3  # type: ignore[misc]


def test_check_frame() -> None:
    """C3: an Exact field is demanded, an unconstrained one accepted."""
    check_frame(RGB, frame())
    check_frame(RGB, HostFrame(data=frame().data, channels="RGB", colorspace="ACEScg", gamma="linear"))
    with pytest.raises(ContractError, match="'uint8'.*'float32'"):
        check_frame(RGB, frame(dtype="uint8"))
    with pytest.raises(ContractError, match="channels"):
        check_frame(RGB, HostFrame(data=frame().data, channels="YCbCr", colorspace="sRGB", gamma="sRGB"))


class GpuModule:
    """A module as published ones are written: against pixtreme's Frame, without a second type argument."""

    scale = 2

    @property
    def contract(self) -> StatelessOpenContract[str]:
        return StatelessOpenContract(FAMILY, "artifact", "fp16", (4, 6), 2)

    def __call__(self, frame: Frame, /, **params: Any) -> Frame:
        return frame

    def close(self) -> None: ...


class GpuFactory:
    """Its factory."""

    @property
    def family_contract(self) -> StatelessFamilyContract:
        return FAMILY

    def query_contract(
        self, artifact: str, /, *, precision: Any, input_hw: tuple[int, int]
    ) -> StatelessOpenContract[str]:
        return GpuModule().contract

    def open(self, artifact: str, /, *, precision: Any, input_hw: tuple[int, int]) -> GpuModule:
        return GpuModule()

    def graph_factory(self) -> GpuFactory:
        return self


def test_factories_satisfy_the_protocols() -> None:
    """C5: typed with Frame by default; a host module says its frame type. mypy reads this file, negative lines too."""
    gpu: StatelessInferenceFactory[str] = GpuFactory()
    host: StatelessInferenceFactory[OnnxArtifact, FrameLike] = FACTORY
    provider: CudaGraphFactoryProvider[OnnxFactory] = FACTORY
    assert isinstance(GpuFactory(), CudaGraphFactoryProvider)
    assert_type(provider.graph_factory(), OnnxFactory)
    wrong: StatelessInferenceFactory[int] = GpuFactory()  # type: ignore[assignment]
    assert gpu.family_contract is wrong.family_contract is FAMILY
    assert host.family_contract.params == ()
    assert FACTORY.graph_factory() == OnnxFactory(graph=True) != FACTORY


if TYPE_CHECKING:

    async def typing_of_the_public_surface(context: StreamContext, artifact: OnnxArtifact) -> None:
        """Read by mypy only."""
        handle = context.submit(len, "text")
        assert_type(handle, EventHandle[int])
        assert_type(await handle, int)
        assert_type(handle.result(), int)
        assert_type(handle.on(context), int)
        assert_type(handle.then(context, str), EventHandle[str])
        assert_type(await context.submit_async(len, "text"), EventHandle[int])
        assert_type(context.record(), EventHandle[None])
        assert_type(context.record(3), EventHandle[int])
        assert_type(await wait_all([handle]), list[int])
        bound = context.bind(FACTORY, artifact, precision="fp32", input_hw=(1, 1))
        assert_type(bound, BoundInference[FrameLike])
        assert_type(context.bind(GpuFactory(), "a", precision="fp32", input_hw=(1, 1)), BoundInference[Frame])
        context.bind(FACTORY, artifact, precision="fp64", input_hw=(1, 1))  # type: ignore[arg-type]
        context.bind(FACTORY, 3, precision="fp32", input_hw=(1, 1))  # type: ignore[misc]
