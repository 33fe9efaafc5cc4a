"""What module authors write against: declarations, protocols, and checks of a call.

Protocols are generic in the artifact identity and in the frame type, which is ``pixtreme.core.Frame`` unless a host
module says ``HostFrame``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

import numpy as np
from pixtreme.core import Frame
from typing_extensions import TypeVar

from pixtreme.infer.declarations import (
    ArtifactIdentity,
    CheckpointContainer,
    Exact,
    FrameContract,
    FrameField,
    GpuArrayParamContract,
    ModuleContract,
    Precision,
    ShapeProfile,
    StateFootprint,
    StatelessFamilyContract,
    StatelessModuleContract,
    StatelessOpenContract,
    TemporalFamilyContract,
    TemporalModuleContract,
    TemporalOpenContract,
    UnconstrainedWithReference,
)
from pixtreme.infer.errors import ContractError, actionable_error
from pixtreme.infer.frames import FrameLike

__all__ = (
    "Precision",
    "CheckpointContainer",
    "Exact",
    "UnconstrainedWithReference",
    "FrameField",
    "FrameContract",
    "FrameMetadataWarning",
    "GpuArrayParamContract",
    "StateFootprint",
    "ShapeProfile",
    "StatelessModuleContract",
    "TemporalModuleContract",
    "ModuleContract",
    "StatelessFamilyContract",
    "TemporalFamilyContract",
    "StatelessOpenContract",
    "TemporalOpenContract",
    "StatelessImageInference",
    "OpenedStatelessImageInference",
    "StatefulImageInference",
    "StatelessInferenceFactory",
    "TemporalInferenceFactory",
    "CudaGraphFactoryProvider",
    "validate_call_params",
    "actionable_error",
)

FrameT = TypeVar("FrameT", bound=FrameLike, default=Frame)
Factory_co = TypeVar("Factory_co", covariant=True)


class FrameMetadataWarning(UserWarning):
    """A frame's metadata is accepted, but differs from the reference the module was made with."""


def validate_call_params(contract: ModuleContract, observed_names: Collection[str]) -> None:
    """Reject missing and undeclared keywords of a call, before any frame or backend access.

    Parameters
    ----------
    contract
        The opened module's contract.
    observed_names
        Names of the keywords the caller passed.

    Raises
    ------
    ContractError
        Names both lists. ``reset`` is accepted only by a temporal contract.
    """
    if not isinstance(contract, ModuleContract):
        raise ContractError(
            why="a call is checked against the contract of an opened module",
            what=f"received contract={contract!r}; accepted are StatelessModuleContract and TemporalModuleContract",
            how="pass instance.contract.module_contract",
        )
    declared = tuple(param.name for param in contract.params)
    accepted = {*declared, "reset"} if contract.temporal else set(declared)
    missing = [name for name in declared if name not in observed_names]
    undeclared = sorted(name for name in observed_names if name not in accepted)
    if missing or undeclared:
        raise ContractError(
            why="a call passes exactly the parameters its contract declares",
            what=f"missing {missing!r}, undeclared {undeclared!r}; accepted are {sorted(accepted)!r}",
            how="pass every declared parameter by keyword and nothing else",
        )


class StatelessImageInference(Protocol[FrameT]):
    """A frame in, a frame ``scale`` times as large out; no state between calls."""

    @property
    def scale(self) -> int: ...
    def __call__(self, frame: FrameT, /) -> FrameT: ...


class OpenedStatelessImageInference(Protocol[ArtifactIdentity, FrameT]):
    """An opened module.

    The caller keeps inputs alive and ready on the current stream, makes host calls one at a time, and finishes
    outstanding work before ``close()``. Returned frames stay unchanged by later requests and by ``close()``; a call
    after ``close()`` fails before backend work.
    """

    @property
    def scale(self) -> int: ...
    @property
    def contract(self) -> StatelessOpenContract[ArtifactIdentity]: ...
    def __call__(self, frame: FrameT, /, **params: Any) -> FrameT: ...
    def close(self) -> None: ...


class StatelessInferenceFactory(Protocol[ArtifactIdentity, FrameT]):
    """Describes and opens artifacts of one stateless architecture."""

    @property
    def family_contract(self) -> StatelessFamilyContract: ...

    def query_contract(
        self, artifact: ArtifactIdentity, /, *, precision: Precision, input_hw: tuple[int, int]
    ) -> StatelessOpenContract[ArtifactIdentity]:
        """Validate and describe; allocates no device memory."""
        ...

    def open(
        self, artifact: ArtifactIdentity, /, *, precision: Precision, input_hw: tuple[int, int]
    ) -> OpenedStatelessImageInference[ArtifactIdentity, FrameT]:
        """Repeat that validation and return an instance whose ``contract`` equals the query result."""
        ...


class StatefulImageInference(Protocol[ArtifactIdentity, FrameT]):
    """An opened module with private state: one sequential stream of frames.

    ``params`` are those of the contract and ``reset: bool``, which starts a new sequence. The rules of
    `OpenedStatelessImageInference` hold; frames returned stay unchanged by a reset, too.
    """

    @property
    def scale(self) -> int: ...
    @property
    def contract(self) -> TemporalOpenContract[ArtifactIdentity]: ...
    def __call__(self, frame: FrameT, /, **params: Any) -> FrameT: ...
    def close(self) -> None: ...


class TemporalInferenceFactory(Protocol[ArtifactIdentity, FrameT]):
    """Describes and opens artifacts of one temporal architecture."""

    @property
    def family_contract(self) -> TemporalFamilyContract: ...

    def query_contract(
        self, artifact: ArtifactIdentity, /, *, precision: Precision, input_hw: tuple[int, int]
    ) -> TemporalOpenContract[ArtifactIdentity]:
        """Validate and describe; allocates no device memory."""
        ...

    def open(
        self, artifact: ArtifactIdentity, /, *, precision: Precision, input_hw: tuple[int, int]
    ) -> StatefulImageInference[ArtifactIdentity, FrameT]:
        """Repeat that validation and return an instance whose ``contract`` equals the query result."""
        ...


@runtime_checkable
class CudaGraphFactoryProvider(Protocol[Factory_co]):
    """A factory that also offers its graph form; asking for it allocates nothing and changes nothing."""

    def graph_factory(self) -> Factory_co: ...


def check_frame(contract: FrameContract, frame: FrameLike, *, name: str = "frame") -> None:
    """Reject a frame that breaks an `Exact` field of ``contract`` (metadata only; no pixel is read).

    Raises
    ------
    ContractError
        Names the field, the observed and the accepted value.
    """
    for field in ("channels", "colorspace", "gamma", "matrix", "dtype"):
        declared = getattr(contract, field)
        observed = np.dtype(frame.dtype).name if field == "dtype" else getattr(frame, field)
        if isinstance(declared, Exact) and observed != declared.value:
            raise ContractError(
                why=f"the module accepts one value for the field {field!r} of {name!r}",
                what=f"received {field}={observed!r}; accepted is {declared.value!r}",
                how=f"convert the frame with pixtreme or NumPy so that {field} is {declared.value!r}",
            )
