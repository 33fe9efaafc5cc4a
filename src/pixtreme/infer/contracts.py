"""What a module declares about itself, and the protocols it implements.

Declarations are frozen dataclasses that check their own fields; protocols are generic in the artifact identity and in
the frame type, which is ``pixtreme.core.Frame`` unless a host module says ``HostFrame``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, NoReturn, Protocol, get_args, runtime_checkable

import numpy as np
from pixtreme.core import Frame
from typing_extensions import TypeIs, TypeVar

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
    "StatelessModuleContract",
    "StatelessFamilyContract",
    "StatelessOpenContract",
    "StatelessImageInference",
    "OpenedStatelessImageInference",
    "StatelessInferenceFactory",
    "CudaGraphFactoryProvider",
    "validate_call_params",
    "actionable_error",
)

Precision = Literal["fp32", "fp16", "int8"]
CheckpointContainer = Literal["bare", "params", "params_ema", "params-ema"]

Value = TypeVar("Value")
ArtifactIdentity = TypeVar("ArtifactIdentity")
FrameT = TypeVar("FrameT", bound=FrameLike, default=Frame)
Factory_co = TypeVar("Factory_co", covariant=True)


class FrameMetadataWarning(UserWarning):
    """A frame's metadata is accepted, but differs from the reference the module was made with."""


@dataclass(frozen=True)
class Exact(Generic[Value]):
    """The field must equal ``value``."""

    value: Value


@dataclass(frozen=True)
class UnconstrainedWithReference(Generic[Value]):
    """Any valid value is accepted; ``reference`` is the one the module was made with."""

    reference: Value


FrameField = Exact[Value] | UnconstrainedWithReference[Value]


@dataclass(frozen=True)
class FrameContract:
    """What a module accepts or returns in each field of a frame."""

    channels: FrameField[tuple[str, ...]]
    colorspace: FrameField[str]
    gamma: FrameField[str]
    matrix: FrameField[str | None]
    dtype: FrameField[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Exact | UnconstrainedWithReference):
                _refuse(self, field.name, value, "Exact(value) or UnconstrainedWithReference(reference)")


@dataclass(frozen=True)
class GpuArrayParamContract:
    """A keyword-only array parameter of a call.

    ``shape`` holds positive ints and identifier symbols (``"H"``); ``unit`` says what the numbers mean (``"pixel"``).
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    unit: str

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()) or self.name in ("frame", "reset"):
            _refuse(self, "name", self.name, "an identifier other than 'frame' and 'reset'")
        if not isinstance(self.shape, tuple) or not all(_is_dimension(size) for size in self.shape):
            _refuse(self, "shape", self.shape, "a tuple of positive ints and identifier symbols such as 'H'")
        for field in ("dtype", "unit"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                _refuse(self, field, getattr(self, field), "a non-empty string")


@dataclass(frozen=True)
class StatelessModuleContract:
    """One opened module without state between calls; the output is ``scale`` times as high and wide as the input."""

    input_frame: FrameContract
    output_frame: FrameContract
    params: tuple[GpuArrayParamContract, ...]
    scale: int

    temporal: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        _check_frames(self)
        _check_params(self, self.params)
        _check_positive(self, "scale", self.scale)


@dataclass(frozen=True)
class StatelessFamilyContract:
    """What is true of every artifact of a stateless architecture."""

    input_frame: FrameContract
    output_frame: FrameContract
    params: tuple[GpuArrayParamContract, ...]

    def __post_init__(self) -> None:
        _check_frames(self)
        _check_params(self, self.params)


@dataclass(frozen=True)
class StatelessOpenContract(Generic[ArtifactIdentity]):
    """One artifact of a stateless architecture at one precision and fixed input size ``(height, width)`` in pixels."""

    family_contract: StatelessFamilyContract
    artifact_identity: ArtifactIdentity
    precision: Precision
    input_hw: tuple[int, int]
    scale: int

    def __post_init__(self) -> None:
        if not isinstance(self.family_contract, StatelessFamilyContract):
            _refuse(self, "family_contract", self.family_contract, "a StatelessFamilyContract")
        check_precision(self, self.precision)
        check_input_hw(self, self.input_hw)
        _check_positive(self, "scale", self.scale)

    @property
    def module_contract(self) -> StatelessModuleContract:
        """The contract of the module that opening this gives."""
        family = self.family_contract
        return StatelessModuleContract(family.input_frame, family.output_frame, family.params, self.scale)


def validate_call_params(contract: StatelessModuleContract, observed_names: Collection[str]) -> None:
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
    after ``close()`` fails before backend work (C8).
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


def check_precision(owner: object, precision: object) -> None:
    """Reject what is not one of `Precision`."""
    if precision not in get_args(Precision):
        _refuse(owner, "precision", precision, f"one of {get_args(Precision)!r}")


def check_input_hw(owner: object, input_hw: object) -> None:
    """Reject what is not a ``(height, width)`` of positive ints."""
    if not (isinstance(input_hw, tuple) and len(input_hw) == 2 and all(is_positive_int(side) for side in input_hw)):
        _refuse(owner, "input_hw", input_hw, "a tuple (height, width) of positive ints")


def _check_frames(contract: StatelessModuleContract | StatelessFamilyContract) -> None:
    for field in ("input_frame", "output_frame"):
        if not isinstance(getattr(contract, field), FrameContract):
            _refuse(contract, field, getattr(contract, field), "a FrameContract")


def _check_params(owner: object, params: object) -> None:
    if not isinstance(params, tuple) or not all(isinstance(param, GpuArrayParamContract) for param in params):
        _refuse(owner, "params", params, "a tuple of GpuArrayParamContract")
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        _refuse(owner, "params", names, "names without duplicates")


def _check_positive(owner: object, field: str, value: object) -> None:
    if not is_positive_int(value):
        _refuse(owner, field, value, "a positive int (a bool is not an int here)")


def is_positive_int(value: object) -> TypeIs[int]:
    """Tell whether a value is an int above zero; a bool is not an int here."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_dimension(size: object) -> bool:
    return is_positive_int(size) or (isinstance(size, str) and size.isidentifier())


def _refuse(owner: object, field: str, observed: object, accepted: str) -> NoReturn:
    name = owner if isinstance(owner, str) else type(owner).__name__
    raise ContractError(
        why=f"{name}.{field} breaks the contract's form",
        what=f"received {field}={observed!r}; accepted is {accepted}",
        how=f"pass {accepted} as {field}",
    )
