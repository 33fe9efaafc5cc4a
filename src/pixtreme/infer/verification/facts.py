"""What a module author observed, as frozen dataclasses, and what the judge answers. Public through `contracts`.

An `AllocationIdentity` is any hashable value that is equal for the same allocation and for no other: a pointer with its
pool's generation, a serial number of the author's own. Devices are written ``"cpu"``, ``"cuda:N"`` or ``N``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pixtreme.infer.declarations import ShapeProfile
from pixtreme.infer.frames import FrameLike

AllocationIdentity = Hashable
CheckStatus = Literal["passed", "failed", "unverified", "not-applicable"]


@dataclass(frozen=True)
class GpuArrayFacts:
    """One array parameter of a call, as it was passed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str | int


@dataclass(frozen=True)
class FrameBoundaryFacts:
    """One call at the frame boundary: what went in, and what came out or was raised.

    ``input_profile`` bounds the input's size (three times the same for an instance of fixed size),
    ``dimension_bindings`` gives each symbol of the parameters' shapes its number in this call, ``backend_started``
    says whether the backend was given work.
    """

    name: str
    expected: Literal["accept", "reject"]
    input_frame: object
    input_profile: ShapeProfile
    dimension_bindings: Mapping[str, int]
    params: tuple[GpuArrayFacts, ...]
    output_frame: FrameLike | None
    error: BaseException | None
    backend_started: bool


@dataclass(frozen=True)
class AllocationFacts:
    """One exchange of an array through DLPack: whose memory both sides hold, and what the exchange allocated."""

    name: str
    producer: AllocationIdentity
    consumer: AllocationIdentity
    conversion_allocations: Collection[AllocationIdentity]


@dataclass(frozen=True)
class RejectionFacts:
    """One artifact or selector that must be refused; ``observed`` and ``expected`` must show in the error's text."""

    name: str
    error: BaseException | None
    instance_accepted: bool
    backend_started: bool
    fallback_events: Collection[object]
    observed: object
    expected: object


@dataclass(frozen=True)
class EngineBindingFacts:
    """One input or output of an engine."""

    name: str
    direction: Literal["input", "output"]
    dtype: str
    min_shape: tuple[int, ...]
    opt_shape: tuple[int, ...]
    max_shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineRoundTripFacts:
    """An engine produced in one process and loaded in another. An execution is any value that names its process."""

    producer_execution: Hashable
    consumer_execution: Hashable
    serialized_sha256: str
    loaded_sha256: str
    expected_bindings: tuple[EngineBindingFacts, ...]
    loaded_bindings: tuple[EngineBindingFacts, ...]
    original_output: Any
    loaded_output: Any


@dataclass(frozen=True)
class SequenceFacts:
    """The outputs of one sequence of requests, from two instances."""

    reference_instance: Any
    candidate_instance: Any
    reference: Sequence[Any]
    candidate: Sequence[Any]


@dataclass(frozen=True)
class IsolationFacts:
    """Two instances called in turns, and what each gives alone."""

    instance_a: Any
    instance_b: Any
    reference_a: Sequence[Any]
    observed_a: Sequence[Any]
    reference_b: Sequence[Any]
    observed_b: Sequence[Any]


@dataclass(frozen=True)
class ResourceSnapshot:
    """What was held at one moment: an amount in ``unit``, and the allocations by identity."""

    amount: int
    unit: str
    allocations: Collection[AllocationIdentity]


@dataclass(frozen=True)
class StateLifecycleFacts:
    """Persistent state of one instance, from before it was opened until after it was closed."""

    instance: Any
    before_open: ResourceSnapshot
    after_open: ResourceSnapshot
    after_run: ResourceSnapshot
    after_reset: ResourceSnapshot
    after_close: ResourceSnapshot


@dataclass(frozen=True)
class QueryAllocationFacts:
    """Device memory around one ``query_contract``, and everything allocated while it ran, temporary or not."""

    name: str
    before_query: ResourceSnapshot
    after_query: ResourceSnapshot
    allocations_during_query: Collection[AllocationIdentity]


@dataclass(frozen=True)
class OpenedContractFacts:
    """What a query promised and what the opened instance says."""

    name: str
    queried_contract: Any
    opened_contract: Any


@dataclass(frozen=True)
class ClosedInferenceFacts:
    """One call of a closed instance."""

    name: str
    error: BaseException | None
    backend_started: bool


@dataclass(frozen=True)
class VerificationFinding:
    """One thing that is wrong or missing.

    ``code`` is a stable word to test for, ``path`` leads to the fact it was found in.
    """

    code: str
    path: str
    observed: str
    expected: str
    detail: str

    def __str__(self) -> str:
        return f"{self.code} at {self.path}: observed {self.observed}; expected {self.expected} ({self.detail})"


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    status: CheckStatus
    findings: tuple[VerificationFinding, ...]


@dataclass(frozen=True)
class VerificationReport:
    """The outcome of a suite: ``str(report)`` is a table, `to_dict` goes into a record."""

    scope: str
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """True where every check that applies has passed; a check without evidence has not."""
        return all(check.status in ("passed", "not-applicable") for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, for `canonical_json`."""
        checks = [
            {
                "name": check.name,
                "status": check.status,
                "findings": [dict(vars(finding)) for finding in check.findings],
            }
            for check in self.checks
        ]
        return {"scope": self.scope, "passed": self.passed, "checks": checks}

    def __str__(self) -> str:
        counts = {
            status: sum(check.status == status for check in self.checks)
            for status in ("passed", "failed", "unverified", "not-applicable")
        }
        summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        lines = [f"{self.scope}: {'passed' if self.passed else 'not passed'} ({summary})"]
        width = max((len(check.name) for check in self.checks), default=0)
        for check in self.checks:
            lines.append(f"  {check.name:<{width}}  {check.status}")
            lines += [f"      {finding}" for finding in check.findings]
        return "\n".join(lines)
