"""Contracts (C5-C8), and typing of the public surface. Bad input is in test_bad_input."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
import pytest
from helpers import frame
from pixtreme.core import Frame
from samples import FAMILY, MV, RGB

from pixtreme.infer.contracts import (
    CudaGraphFactoryProvider,
    ModuleContract,
    OpenedStatelessImageInference,
    Precision,
    ShapeProfile,
    StateFootprint,
    StatefulImageInference,
    StatelessFamilyContract,
    StatelessImageInference,
    StatelessInferenceFactory,
    StatelessModuleContract,
    StatelessOpenContract,
    TemporalFamilyContract,
    TemporalInferenceFactory,
    TemporalModuleContract,
    TemporalOpenContract,
    check_frame,
    validate_call_params,
)
from pixtreme.infer.errors import ClosedError, ContractError
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact, OnnxFactory
from pixtreme.infer.streams import BoundInference, EventHandle, StreamContext, wait_all


def test_open_contract_derives_the_module_contract() -> None:
    """C6: one artifact, precision and size; the module contract is the family's with the scale."""
    opened = StatelessOpenContract(FAMILY, "artifact", "fp16", (4, 6), 2)
    assert opened.module_contract == StatelessModuleContract(RGB, RGB, (MV,), 2)
    assert opened.module_contract.temporal is False
    with pytest.raises(FrozenInstanceError):
        opened.scale = 3  # type: ignore[misc]


def test_temporal_contract() -> None:
    """C6: state and start-up frames are carried over; a module contract is one of the two."""
    family = TemporalFamilyContract(RGB, RGB, (MV,), 0)
    opened = TemporalOpenContract(family, "artifact", "fp32", (4, 6), 2, StateFootprint(64))
    module = opened.module_contract
    assert module == TemporalModuleContract(RGB, RGB, (MV,), 2, 0, StateFootprint(64, "bytes"))
    assert (module.temporal, module.reset_control) == (True, "reset")
    assert isinstance(module, ModuleContract)
    assert ShapeProfile((1, 2), (1, 2), (3, 4)).opt_hw == (1, 2)


def test_reset_is_a_temporal_control() -> None:
    """C7: accepted by a temporal contract, never demanded; a stateless one does not know it."""
    temporal = TemporalModuleContract(RGB, RGB, (MV,), 1, 0, StateFootprint(1))
    for names in ({"mv"}, {"mv", "reset"}, ["mv"], {"mv": 1}.keys()):
        validate_call_params(temporal, names)
    validate_call_params(StatelessModuleContract(RGB, RGB, (MV,), 1), ["mv"])


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


FILM = TemporalFamilyContract(RGB, RGB, (), 1)


class Sum:
    """A temporal host module: the sum of the frames since the last reset, computed on the stream."""

    scale = 1

    def __init__(self, contract: TemporalOpenContract[str]) -> None:
        self.contract = contract
        self._state: Any = np.zeros((*contract.input_hw, 3), np.float32)

    def __call__(self, frame: HostFrame, /, **params: Any) -> HostFrame:
        if self._state is None:
            raise ClosedError(why="a closed module takes no requests", what="called after close()", how="open another")
        validate_call_params(self.contract.module_contract, params)
        check_frame(FILM.input_frame, frame)
        stream = StreamContext.current().stream
        result = HostFrame(data=np.empty_like(frame.data), channels="RGB", colorspace="sRGB", gamma="sRGB")
        if params.get("reset", False):
            stream.enqueue(self._state.fill, 0)
        stream.enqueue(np.add, self._state, frame.data, self._state)
        stream.enqueue(np.copyto, result.data, self._state)
        return result

    def close(self) -> None:
        self._state = None


class SumFactory:
    """Its factory."""

    @property
    def family_contract(self) -> TemporalFamilyContract:
        return FILM

    def query_contract(
        self, artifact: str, /, *, precision: Precision, input_hw: tuple[int, int]
    ) -> TemporalOpenContract[str]:
        height, width = input_hw
        return TemporalOpenContract(FILM, artifact, precision, input_hw, 1, StateFootprint(height * width * 12))

    def open(self, artifact: str, /, *, precision: Precision, input_hw: tuple[int, int]) -> Sum:
        return Sum(self.query_contract(artifact, precision=precision, input_hw=input_hw))


def test_a_temporal_module_on_a_context(context: StreamContext) -> None:
    """C7, C8: bound like any other; results stay as they are after later requests, a reset and close."""
    bound = context.bind(SumFactory(), "artifact", precision="fp32", input_hw=(4, 6))
    assert bound.contract == SumFactory().query_contract("artifact", precision="fp32", input_hw=(4, 6))
    handles = [bound(frame(1)), bound(frame(2)), bound(frame(4), reset=True), bound(frame(8), reset=False)]
    instance = bound.instance
    with pytest.raises(ContractError, match="undeclared"):
        bound(frame(1), mv=1)
    bound.close()
    assert [handle.result().data.max() for handle in handles] == [1, 3, 4, 12]
    with pytest.raises(ClosedError), context.use():
        instance(frame(1))


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
    film: TemporalInferenceFactory[str, HostFrame] = SumFactory()
    not_on_a_gpu: TemporalInferenceFactory[str] = SumFactory()  # type: ignore[assignment]
    not_stateless: StatelessInferenceFactory[str, HostFrame] = SumFactory()  # type: ignore[assignment]
    not_temporal: TemporalInferenceFactory[str] = GpuFactory()  # type: ignore[assignment]
    no_provider: CudaGraphFactoryProvider[SumFactory] = SumFactory()  # type: ignore[assignment]
    assert len({*map(id, (film, not_on_a_gpu, not_stateless, not_temporal))}) == 4  # mypy reads the lines above
    assert not isinstance(no_provider, CudaGraphFactoryProvider)


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
        assert_type(context.bind(SumFactory(), "a", precision="fp32", input_hw=(1, 1)), BoundInference[HostFrame])
        opened: OpenedStatelessImageInference[str] = GpuModule()
        plain: StatelessImageInference = GpuModule()
        stateful: StatefulImageInference[str, HostFrame] = SumFactory().open("a", precision="fp32", input_hw=(1, 1))
        assert_type(opened.contract, StatelessOpenContract[str])
        assert_type(opened.contract.artifact_identity, str)
        assert_type(stateful.contract, TemporalOpenContract[str])
        assert_type(stateful.contract.module_contract, TemporalModuleContract)
        assert_type(plain(Frame.__new__(Frame)), Frame)
        opened = Sum(stateful.contract)  # type: ignore[assignment]
        stateful = GpuModule()  # type: ignore[assignment]
        StatelessOpenContract(FILM, "a", "fp32", (1, 1), 1)  # type: ignore[arg-type]
        FACTORY.query_contract("path", precision="fp32", input_hw=(1, 1))  # type: ignore[arg-type]
        context.bind(FACTORY, artifact, precision="fp64", input_hw=(1, 1))  # type: ignore[arg-type]
        context.bind(FACTORY, 3, precision="fp32", input_hw=(1, 1))  # type: ignore[misc]
