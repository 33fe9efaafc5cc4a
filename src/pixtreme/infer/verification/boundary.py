"""The judgement of one call at the frame boundary (V3): how it violates the contract, and whether an error says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixtreme.infer.contracts import ModuleContract
from pixtreme.infer.declarations import Exact, FrameContract, GpuArrayParamContract, ShapeProfile, is_positive_int
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.verification.errors import refuse
from pixtreme.infer.verification.facts import FrameBoundaryFacts, GpuArrayFacts, VerificationFinding

_HOST_MEMORY, _CUDA_MEMORY = (1, 3), (2, 13)  # DLPack device types: plain and pinned, plain and managed


@dataclass(frozen=True)
class _Violation:
    """A field that breaks the contract, and the texts by which a message may show both sides."""

    path: str
    observed: tuple[str, ...]
    accepted: tuple[str, ...]


def judge_boundary(contract: ModuleContract, facts: FrameBoundaryFacts, path: str) -> Iterator[VerificationFinding]:
    """Yield what is wrong with one accepted or rejected call."""
    _check(contract, facts, path)
    violations = list(_input_violations(contract, facts))
    if facts.expected == "accept":
        yield from _accepted(contract, facts, violations, path)
    else:
        yield from _rejected(facts, violations, path)


def shows(error: BaseException, *forms: str) -> bool:
    """Tell whether an error's text shows a value, as a word of its own, in one of its spellings."""
    return any(re.search(rf"(?<![\w.]){re.escape(form)}(?!\w|\.\d)", str(error)) for form in forms)


def spellings(value: object) -> tuple[str, ...]:
    """Return how a message may spell a value."""
    if isinstance(value, tuple | list):
        plain = ", ".join(map(str, value))
        return repr(value), f"({plain})", f"[{plain}]", "".join(map(str, value)), "x".join(map(str, value))
    return repr(value), str(value)


def _accepted(
    contract: ModuleContract, facts: FrameBoundaryFacts, violations: list[_Violation], path: str
) -> Iterator[VerificationFinding]:
    for violation in violations:
        yield _finding("contract-violation", path, violation, facts, "an accepted call satisfies the input contract")
    if facts.error is not None:
        detail = f"{facts.name}: a call that satisfies the contract raises nothing"
        yield VerificationFinding("unexpected-error", f"{path}.error", repr(facts.error), "no error", detail)
    if not facts.backend_started:
        detail = f"{facts.name}: an accepted call reaches the backend"
        yield VerificationFinding("backend-not-started", f"{path}.backend_started", "False", "True", detail)
    if not isinstance(facts.output_frame, FrameLike):
        detail = f"{facts.name}: an accepted call returns a frame"
        observed = type(facts.output_frame).__qualname__
        yield VerificationFinding("no-output", f"{path}.output_frame", observed, "a frame", detail)
        return
    output = facts.output_frame
    for violation in _frame_violations(contract.output_frame, output, "output_frame"):
        yield _finding("output-violation", path, violation, facts, "the output satisfies the output contract")
    if not isinstance(facts.input_frame, FrameLike):
        return
    places = [_place_of(frame) for frame in (facts.input_frame, output)]
    if places[0] != places[1]:
        detail = f"{facts.name}: the output is on the device of the input"
        yield VerificationFinding("output-device", f"{path}.output_frame", places[1], places[0], detail)
    expected = tuple(contract.scale * size for size in facts.input_frame.shape[:2])
    if tuple(output.shape[:2]) != expected:
        detail = f"{facts.name}: the output is exactly scale={contract.scale} times as high and wide as the input"
        yield VerificationFinding(
            "output-scale", f"{path}.output_frame.shape", repr(tuple(output.shape[:2])), repr(expected), detail
        )


def _rejected(facts: FrameBoundaryFacts, violations: list[_Violation], path: str) -> Iterator[VerificationFinding]:
    if not violations:
        detail = f"{facts.name}: a rejected call must violate the contract, or the rejection proves nothing"
        yield VerificationFinding("no-violation", f"{path}.input_frame", "a valid call", "a violation", detail)
    if facts.error is None:
        detail = f"{facts.name}: a call that violates the contract is refused"
        yield VerificationFinding("no-error", f"{path}.error", "None", "an error", detail)
    elif violations and not any(
        shows(facts.error, *violation.observed) and shows(facts.error, *violation.accepted) for violation in violations
    ):
        first = violations[0]
        detail = f"{facts.name}: the message shows what was received and what is accepted, for {first.path}"
        yield VerificationFinding(
            "error-hides-value",
            f"{path}.error",
            str(facts.error),
            f"a text with {first.observed[0]} and {first.accepted[0]}",
            detail,
        )
    if facts.backend_started:
        detail = f"{facts.name}: a refused call never reaches the backend"
        yield VerificationFinding("backend-started", f"{path}.backend_started", "True", "False", detail)
    if facts.output_frame is not None:
        detail = f"{facts.name}: a refused call returns nothing"
        observed = type(facts.output_frame).__qualname__
        yield VerificationFinding("unexpected-output", f"{path}.output_frame", observed, "None", detail)


def _finding(code: str, path: str, violation: _Violation, facts: FrameBoundaryFacts, rule: str) -> VerificationFinding:
    return VerificationFinding(
        code, f"{path}.{violation.path}", violation.observed[0], violation.accepted[0], f"{facts.name}: {rule}"
    )


def _input_violations(contract: ModuleContract, facts: FrameBoundaryFacts) -> Iterator[_Violation]:
    frame = facts.input_frame
    place = None
    if isinstance(frame, FrameLike):
        place = _place_of(frame)
        yield from _frame_violations(contract.input_frame, frame, "input_frame")
        yield from _size_violations(facts.input_profile, frame)
    else:
        yield _Violation("input_frame", (type(frame).__name__,), ("a frame", "Frame", "HostFrame"))
    passed = {param.name: param for param in facts.params}
    declared = {param.name: param for param in contract.params}
    for name in passed.keys() - declared.keys():
        accepted = tuple(declared) or ("[]", "()", "none", "no parameter")
        yield _Violation(f"params.{name}", (name,), (repr(sorted(declared)), *accepted))
    for name, param in declared.items():
        if name not in passed:
            yield _Violation(f"params.{name}", ("missing", "absent"), (name,))
        else:
            yield from _param_violations(param, passed[name], facts.dimension_bindings, place)


def _frame_violations(contract: FrameContract, frame: FrameLike, path: str) -> Iterator[_Violation]:
    for field in ("channels", "colorspace", "gamma", "matrix", "dtype"):
        declared = getattr(contract, field)
        observed = np.dtype(frame.dtype).name if field == "dtype" else getattr(frame, field)
        if isinstance(declared, Exact) and observed != declared.value:
            yield _Violation(f"{path}.{field}", spellings(observed), spellings(declared.value))
    labels = contract.channels.value if isinstance(contract.channels, Exact) else contract.channels.reference
    count = int(frame.shape[2])
    if count != len(labels):
        accepted = (str(len(labels)), *spellings(labels))
        yield _Violation(f"{path}.shape", (str(count), *spellings(tuple(frame.shape))), accepted)


def _size_violations(profile: ShapeProfile, frame: FrameLike) -> Iterator[_Violation]:
    size = tuple(frame.shape[:2])
    for axis in (0, 1):
        least, most = profile.min_hw[axis], profile.max_hw[axis]
        if not least <= size[axis] <= most:
            observed = (*spellings(size), *spellings(tuple(frame.shape)), *spellings(size[::-1]), str(size[axis]))
            bounds = (profile.min_hw, profile.max_hw)
            accepted = [form for hw in bounds for form in (*spellings(hw), *spellings((*hw, frame.shape[2])))]
            yield _Violation(f"input_frame.shape[{axis}]", observed, (*accepted, str(least), str(most)))


def _param_violations(
    declared: GpuArrayParamContract, passed: GpuArrayFacts, bindings: Mapping[str, int], place: str | None
) -> Iterator[_Violation]:
    path = f"params.{declared.name}"
    bound = tuple(bindings[size] if isinstance(size, str) else size for size in declared.shape)
    if tuple(passed.shape) != bound:
        yield _Violation(
            f"{path}.shape", spellings(tuple(passed.shape)), (*spellings(bound), *spellings(declared.shape))
        )
    if _dtype(passed.dtype) != _dtype(declared.dtype):
        yield _Violation(f"{path}.dtype", spellings(_dtype(passed.dtype)), spellings(_dtype(declared.dtype)))
    device = _place(passed.device)
    if place is not None and device != place:
        yield _Violation(f"{path}.device", (device, str(passed.device)), (place, place.removeprefix("cuda:")))


def _place_of(frame: FrameLike) -> str:
    kind, index = (int(part) for part in frame.__dlpack_device__())
    if kind in _HOST_MEMORY:
        return "cpu"
    return f"cuda:{index}" if kind in _CUDA_MEMORY else f"DLPack device ({kind}, {index})"


def _dtype(name: Any) -> str:
    try:
        return str(np.dtype(name).name)
    except TypeError:  # one that NumPy does not know
        return str(name)


def _place(device: str | int) -> str:
    if isinstance(device, int):
        return f"cuda:{device}"
    return "cuda:0" if device == "cuda" else device


def _check(contract: ModuleContract, facts: FrameBoundaryFacts, path: str) -> None:
    """Refuse facts that no verdict can rest on."""
    if facts.expected not in ("accept", "reject"):
        refuse(f"{path}.expected", repr(facts.expected), "'accept' or 'reject'")
    if not isinstance(facts.input_profile, ShapeProfile):
        refuse(f"{path}.input_profile", repr(facts.input_profile), "a ShapeProfile")
    if not isinstance(facts.dimension_bindings, Mapping) or not all(
        isinstance(name, str) and is_positive_int(size) for name, size in facts.dimension_bindings.items()
    ):
        refuse(f"{path}.dimension_bindings", repr(facts.dimension_bindings), "a mapping of symbols to positive ints")
    if not isinstance(facts.params, tuple) or not all(isinstance(param, GpuArrayFacts) for param in facts.params):
        refuse(f"{path}.params", repr(facts.params), "a tuple of GpuArrayFacts")
    names = [param.name for param in facts.params]
    if len(set(names)) != len(names):
        refuse(f"{path}.params", repr(names), "each parameter once")
    for param in facts.params:
        if isinstance(param.device, bool) or not isinstance(param.device, str | int):
            refuse(f"{path}.params.{param.name}.device", repr(param.device), "'cpu', 'cuda:N' or N")
        if not isinstance(param.shape, tuple) or not all(isinstance(size, int) for size in param.shape):
            refuse(f"{path}.params.{param.name}.shape", repr(param.shape), "a tuple of ints")
    symbols = {size for param in contract.params for size in param.shape if isinstance(size, str)}
    if missing := sorted(symbols - facts.dimension_bindings.keys()):
        refuse(f"{path}.dimension_bindings", f"none for {missing!r}", "a number for each symbol of the contract")
    if not isinstance(facts.backend_started, bool):
        refuse(f"{path}.backend_started", repr(facts.backend_started), "a bool")
    check_error(facts.error, path)


def check_error(error: Any, path: str) -> None:
    """Refuse what is neither an exception nor None."""
    if error is not None and not isinstance(error, BaseException):
        refuse(f"{path}.error", repr(error), "the exception that was raised, or None")
