"""What a module declares about itself: frozen dataclasses that check their own fields (C6).

Public through `pixtreme.infer.contracts`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, get_args

from typing_extensions import TypeIs, TypeVar

from pixtreme.infer.errors import refuse_argument

Precision = Literal["fp32", "fp16", "int8"]
_TAKEN = ("frame", "reset", "after", "out", "host", "ahead", "blocking_source")  # by calls that pass parameters on
CheckpointContainer = Literal["bare", "params", "params_ema", "params-ema"]

Value = TypeVar("Value")
ArtifactIdentity = TypeVar("ArtifactIdentity")


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
                refuse_argument(self, field.name, value, "Exact(value) or UnconstrainedWithReference(reference)")


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
        if not (isinstance(self.name, str) and self.name.isidentifier()) or self.name in _TAKEN:
            refuse_argument(self, "name", self.name, f"an identifier other than {', '.join(map(repr, _TAKEN))}")
        if not isinstance(self.shape, tuple) or not all(_is_dimension(size) for size in self.shape):
            refuse_argument(self, "shape", self.shape, "a tuple of positive ints and identifier symbols such as 'H'")
        _check_text(self, "dtype", self.dtype)
        _check_text(self, "unit", self.unit)


@dataclass(frozen=True)
class StateFootprint:
    """Persistent state of one open instance: ``amount`` in ``unit``."""

    amount: int
    unit: str = "bytes"

    def __post_init__(self) -> None:
        _check_positive(self, "amount", self.amount)
        _check_text(self, "unit", self.unit)


@dataclass(frozen=True)
class ShapeProfile:
    """The input sizes ``(height, width)`` in pixels that one engine takes: least, best and greatest."""

    min_hw: tuple[int, int]
    opt_hw: tuple[int, int]
    max_hw: tuple[int, int]

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_hw(self, field.name, getattr(self, field.name))
        for axis, sides in zip(
            ("height", "width"), zip(self.min_hw, self.opt_hw, self.max_hw, strict=True), strict=True
        ):
            if list(sides) != sorted(sides):
                refuse_argument(self, f"{axis} of min_hw, opt_hw, max_hw", sides, "1 <= min <= opt <= max on each axis")


@dataclass(frozen=True)
class StatelessModuleContract:
    """One opened module without state between calls; the output is ``scale`` times as high and wide as the input."""

    input_frame: FrameContract
    output_frame: FrameContract
    params: tuple[GpuArrayParamContract, ...]
    scale: int

    temporal: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        _check_call(self)
        _check_positive(self, "scale", self.scale)


@dataclass(frozen=True)
class TemporalModuleContract:
    """One opened module that carries state from frame to frame; a call with ``reset=True`` starts a new sequence.

    ``startup_frames`` is how many outputs after a reset are made without full history.
    """

    input_frame: FrameContract
    output_frame: FrameContract
    params: tuple[GpuArrayParamContract, ...]
    scale: int
    startup_frames: int
    state_footprint: StateFootprint

    temporal: ClassVar[Literal[True]] = True
    reset_control: ClassVar[Literal["reset"]] = "reset"

    def __post_init__(self) -> None:
        _check_call(self)
        _check_positive(self, "scale", self.scale)
        _check_startup(self, self.startup_frames)
        _check_footprint(self, self.state_footprint)


ModuleContract = StatelessModuleContract | TemporalModuleContract


@dataclass(frozen=True)
class StatelessFamilyContract:
    """What is true of every artifact of a stateless architecture."""

    input_frame: FrameContract
    output_frame: FrameContract
    params: tuple[GpuArrayParamContract, ...]

    def __post_init__(self) -> None:
        _check_call(self)


@dataclass(frozen=True)
class TemporalFamilyContract:
    """What is true of every artifact of a temporal architecture."""

    input_frame: FrameContract
    output_frame: FrameContract
    params: tuple[GpuArrayParamContract, ...]
    startup_frames: int

    def __post_init__(self) -> None:
        _check_call(self)
        _check_startup(self, self.startup_frames)


@dataclass(frozen=True)
class StatelessOpenContract(Generic[ArtifactIdentity]):
    """One artifact of a stateless architecture at one precision and fixed input size ``(height, width)`` in pixels."""

    family_contract: StatelessFamilyContract
    artifact_identity: ArtifactIdentity
    precision: Precision
    input_hw: tuple[int, int]
    scale: int

    def __post_init__(self) -> None:
        _check_open(self, self.family_contract, StatelessFamilyContract)

    @property
    def module_contract(self) -> StatelessModuleContract:
        """The contract of the module that opening this gives."""
        family = self.family_contract
        return StatelessModuleContract(family.input_frame, family.output_frame, family.params, self.scale)


@dataclass(frozen=True)
class TemporalOpenContract(Generic[ArtifactIdentity]):
    """One artifact of a temporal architecture at one precision and fixed input size ``(height, width)`` in pixels."""

    family_contract: TemporalFamilyContract
    artifact_identity: ArtifactIdentity
    precision: Precision
    input_hw: tuple[int, int]
    scale: int
    state_footprint: StateFootprint

    def __post_init__(self) -> None:
        _check_open(self, self.family_contract, TemporalFamilyContract)
        _check_footprint(self, self.state_footprint)

    @property
    def module_contract(self) -> TemporalModuleContract:
        """The contract of the module that opening this gives."""
        family = self.family_contract
        return TemporalModuleContract(
            family.input_frame,
            family.output_frame,
            family.params,
            self.scale,
            family.startup_frames,
            self.state_footprint,
        )


def check_precision(owner: object, precision: object) -> None:
    """Reject what is not one of `Precision`."""
    if precision not in get_args(Precision):
        refuse_argument(owner, "precision", precision, f"one of {get_args(Precision)!r}")


def check_input_hw(owner: object, input_hw: object) -> None:
    """Reject what is not a ``(height, width)`` of positive ints."""
    _check_hw(owner, "input_hw", input_hw)


def _check_hw(owner: object, field: str, value: object) -> None:
    if not (isinstance(value, tuple) and len(value) == 2 and all(is_positive_int(side) for side in value)):
        refuse_argument(owner, field, value, "a tuple (height, width) of positive ints")


def _check_open(
    contract: StatelessOpenContract[Any] | TemporalOpenContract[Any], family: object, kind: type[object]
) -> None:
    if not isinstance(family, kind):
        refuse_argument(contract, "family_contract", family, f"a {kind.__name__}")
    check_precision(contract, contract.precision)
    check_input_hw(contract, contract.input_hw)
    _check_positive(contract, "scale", contract.scale)


def _check_call(contract: ModuleContract | StatelessFamilyContract | TemporalFamilyContract) -> None:
    """Check what a call takes and returns."""
    for field in ("input_frame", "output_frame"):
        if not isinstance(getattr(contract, field), FrameContract):
            refuse_argument(contract, field, getattr(contract, field), "a FrameContract")
    params: object = contract.params
    if not isinstance(params, tuple) or not all(isinstance(param, GpuArrayParamContract) for param in params):
        refuse_argument(contract, "params", params, "a tuple of GpuArrayParamContract")
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        refuse_argument(contract, "params", names, "names without duplicates")


def _check_positive(owner: object, field: str, value: object) -> None:
    if not is_positive_int(value):
        refuse_argument(owner, field, value, "a positive int (a bool is not an int here)")


def _check_startup(owner: object, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        refuse_argument(owner, "startup_frames", value, "an int from 0 (a bool is not an int here)")


def _check_footprint(owner: object, value: object) -> None:
    if not isinstance(value, StateFootprint):
        refuse_argument(owner, "state_footprint", value, "a StateFootprint")


def _check_text(owner: object, field: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        refuse_argument(owner, field, value, "a non-empty string")


def is_positive_int(value: object) -> TypeIs[int]:
    """Tell whether a value is an int above zero; a bool is not an int here."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_dimension(size: object) -> bool:
    return is_positive_int(size) or (isinstance(size, str) and size.isidentifier())
