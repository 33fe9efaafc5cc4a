"""Contract suites: facts a module author observed, judged check by check.

A *case* is a callable that makes an observation and returns one of the facts below; the suites call each once, in the
order of the checks. The judge allocates nothing on a device and runs on any machine. Wherever cases are listed, one
callable stands for a tuple of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pixtreme.infer.contracts import ModuleContract
from pixtreme.infer.declarations import (
    StateFootprint,
    StatelessModuleContract,
    StatelessOpenContract,
    TemporalModuleContract,
    TemporalOpenContract,
)
from pixtreme.infer.verification import judgements
from pixtreme.infer.verification.boundary import judge_boundary
from pixtreme.infer.verification.errors import VerificationExecutionError, VerificationInputError, refuse
from pixtreme.infer.verification.facts import (
    AllocationFacts,
    AllocationIdentity,
    CheckResult,
    CheckStatus,
    ClosedInferenceFacts,
    EngineBindingFacts,
    EngineRoundTripFacts,
    FrameBoundaryFacts,
    GpuArrayFacts,
    IsolationFacts,
    OpenedContractFacts,
    QueryAllocationFacts,
    RejectionFacts,
    ResourceSnapshot,
    SequenceFacts,
    StateLifecycleFacts,
    VerificationFinding,
    VerificationReport,
)
from pixtreme.infer.verification.judgements import Findings, Outputs, Resources

__all__ = (
    "VerificationFinding",
    "CheckResult",
    "CheckStatus",
    "VerificationReport",
    "VerificationInputError",
    "VerificationExecutionError",
    "AllocationIdentity",
    "GpuArrayFacts",
    "FrameBoundaryFacts",
    "AllocationFacts",
    "RejectionFacts",
    "EngineBindingFacts",
    "EngineRoundTripFacts",
    "SequenceFacts",
    "IsolationFacts",
    "ResourceSnapshot",
    "StateLifecycleFacts",
    "QueryAllocationFacts",
    "OpenedContractFacts",
    "ClosedInferenceFacts",
    "FactoryContractCases",
    "CommonContractCases",
    "StatelessContractSuite",
    "TemporalContractSuite",
    "CudaGraphContractSuite",
    "verify_module_contract",
    "verify_cuda_graph_contract",
)

type Cases[T] = Callable[[], T] | Sequence[Callable[[], T]]
type Judge[T] = Callable[[T, str], Findings]


@dataclass(frozen=True)
class FactoryContractCases:
    """Observations of a factory; ``resources_equivalent(before, after)`` says whether two snapshots hold the same."""

    query_allocations: Cases[QueryAllocationFacts]
    opened_contracts: Cases[OpenedContractFacts]
    closed_inference: Cases[ClosedInferenceFacts]
    resources_equivalent: Resources


@dataclass(frozen=True)
class CommonContractCases:
    """Observations every module owes; ``outputs_equivalent(reference, candidate)`` says whether two outputs agree."""

    frame_boundaries: Cases[FrameBoundaryFacts]
    dlpack_allocations: Cases[AllocationFacts]
    engine_round_trip: Cases[EngineRoundTripFacts]
    engine_incompatibilities: Cases[RejectionFacts]
    checkpoint_rejections: Cases[RejectionFacts]
    outputs_equivalent: Outputs
    factory: FactoryContractCases | None = None


@dataclass(frozen=True)
class StatelessContractSuite:
    """What `verify_module_contract` judges of a module without state; an open contract stands for its module's."""

    contract: StatelessModuleContract | StatelessOpenContract[Any]
    common: CommonContractCases


@dataclass(frozen=True)
class TemporalContractSuite:
    """What `verify_module_contract` judges of a module with state.

    Parameters
    ----------
    reset_equivalence
        A reset instance against a fresh one, on the same sequence.
    reset_continuation
        An instance that goes on after a reset, against one that was never reset, on the same sequence.
    instance_isolation
        Two instances called in turns, each against its own reference.
    state_lifecycle
        Persistent state from before opening until after closing.
    normalize_footprint
        Brings a footprint to the terms in which it was observed, such as whole allocation granules; applied to the
        declaration and to the observed growth alike.
    resources_equivalent
        Says whether two snapshots hold the same.
    """

    contract: TemporalModuleContract | TemporalOpenContract[Any]
    common: CommonContractCases
    reset_equivalence: Cases[SequenceFacts]
    reset_continuation: Cases[SequenceFacts]
    instance_isolation: Cases[IsolationFacts]
    state_lifecycle: Cases[StateLifecycleFacts]
    normalize_footprint: Callable[[StateFootprint], StateFootprint]
    resources_equivalent: Resources


@dataclass(frozen=True)
class CudaGraphContractSuite:
    """The suite of a graph instance, and its complete request sequences against a normal instance's."""

    module: StatelessContractSuite | TemporalContractSuite
    replay_equivalence: Cases[SequenceFacts]


def verify_module_contract(suite: StatelessContractSuite | TemporalContractSuite, /) -> VerificationReport:
    """Make a suite's observations and judge them.

    Returns
    -------
    VerificationReport
        One result for each check, in a fixed order. A check without evidence is ``unverified``, never ``passed``.

    Raises
    ------
    VerificationInputError
        The suite or a fact is malformed.
    VerificationExecutionError
        A case, or a comparison the suite was given, raised; the cause is what it raised.
    """
    if not isinstance(suite, StatelessContractSuite | TemporalContractSuite):
        refuse("suite", repr(suite), "a StatelessContractSuite or TemporalContractSuite")
    scope = "temporal-module" if isinstance(suite, TemporalContractSuite) else "stateless-module"
    return VerificationReport(scope, tuple(_module_checks(suite)))


def verify_cuda_graph_contract(suite: CudaGraphContractSuite, /) -> VerificationReport:
    """Judge a graph instance: its module's suite, then its sequences against a normal instance.

    Returns, raises
        As `verify_module_contract`.
    """
    if not isinstance(suite, CudaGraphContractSuite):
        refuse("suite", repr(suite), "a CudaGraphContractSuite")
    module = verify_module_contract(suite.module)
    contract = _module_contract(suite.module)
    startup = contract.startup_frames if contract.temporal else 0
    replay = _check(
        "graph-replay-equivalence",
        suite.replay_equivalence,
        SequenceFacts,
        judgements.sequences(_guarded(suite.module.common.outputs_equivalent), least=startup + 1),
        "replay_equivalence",
    )
    return VerificationReport("cuda-graph", (*module.checks, replay))


def _module_checks(suite: StatelessContractSuite | TemporalContractSuite) -> Iterator[CheckResult]:
    common, contract = suite.common, _module_contract(suite)
    if not isinstance(common, CommonContractCases):
        refuse("suite.common", repr(common), "CommonContractCases")
    equivalent = _guarded(common.outputs_equivalent)

    def boundary(facts: FrameBoundaryFacts, path: str) -> Findings:
        return judge_boundary(contract, facts, path)

    yield _check("frame-boundary", common.frame_boundaries, FrameBoundaryFacts, boundary, "frame_boundaries")
    yield _check(
        "dlpack-allocation", common.dlpack_allocations, AllocationFacts, judgements.allocation, "dlpack_allocations"
    )
    round_trip = judgements.round_trip(equivalent)
    yield _check("engine-round-trip", common.engine_round_trip, EngineRoundTripFacts, round_trip, "engine_round_trip")
    for name, cases, path in (
        ("engine-incompatibility", common.engine_incompatibilities, "engine_incompatibilities"),
        ("checkpoint-selector-rejection", common.checkpoint_rejections, "checkpoint_rejections"),
    ):
        yield _check(name, cases, RejectionFacts, judgements.rejection, path)
    yield from _factory_checks(common.factory)
    yield from _temporal_checks(suite, equivalent)


def _factory_checks(factory: FactoryContractCases | None) -> Iterator[CheckResult]:
    if factory is None:
        for name in ("query-gpu-allocation", "opened-contract", "closed-inference"):
            yield _unverified(name, "factory")
        return
    if not isinstance(factory, FactoryContractCases):
        refuse("common.factory", repr(factory), "FactoryContractCases, or None where there is no evidence")
    query = judgements.query(_guarded(factory.resources_equivalent))
    yield _check(
        "query-gpu-allocation", factory.query_allocations, QueryAllocationFacts, query, "factory.query_allocations"
    )
    yield _check(
        "opened-contract",
        factory.opened_contracts,
        OpenedContractFacts,
        judgements.opened,
        "factory.opened_contracts",
    )
    yield _check(
        "closed-inference",
        factory.closed_inference,
        ClosedInferenceFacts,
        judgements.closed,
        "factory.closed_inference",
    )


def _temporal_checks(
    suite: StatelessContractSuite | TemporalContractSuite, equivalent: Outputs
) -> Iterator[CheckResult]:
    if isinstance(suite, StatelessContractSuite):
        for name in ("reset-equivalence", "reset-continuation", "instance-isolation", "state-footprint"):
            yield CheckResult(name, "not-applicable", ())
        return
    contract = suite.contract
    startup = _module_contract(suite).startup_frames  # type: ignore[union-attr]  # a temporal suite's contract
    reset = judgements.sequences(equivalent, least=startup + 1)
    yield _check("reset-equivalence", suite.reset_equivalence, SequenceFacts, reset, "reset_equivalence")
    continuation = judgements.sequences(equivalent, least=1)
    yield _check("reset-continuation", suite.reset_continuation, SequenceFacts, continuation, "reset_continuation")
    isolation = judgements.isolation(equivalent)
    yield _check("instance-isolation", suite.instance_isolation, IsolationFacts, isolation, "instance_isolation")
    lifecycle = judgements.lifecycle(
        contract.state_footprint, _guarded(suite.normalize_footprint), _guarded(suite.resources_equivalent)
    )
    yield _check("state-footprint", suite.state_lifecycle, StateLifecycleFacts, lifecycle, "state_lifecycle")


def _check[T](name: str, cases: Cases[T], kind: type[T], judge: Judge[T], path: str) -> CheckResult:
    """Make the observations of one check and judge them."""
    listed: Iterable[Any] = (cases,) if callable(cases) else cases
    if not isinstance(listed, Sequence) or not all(callable(case) for case in listed):
        refuse(path, repr(cases), f"callables that return {kind.__name__}")
    if not listed:
        return _unverified(name, path)
    findings: list[VerificationFinding] = []
    for index, case in enumerate(listed):
        place = f"{path}[{index}]"
        facts = _guarded(case)()
        if not isinstance(facts, kind):
            refuse(place, f"{type(facts).__qualname__} from {case!r}", kind.__name__)
        findings += judge(facts, place)
    return CheckResult(name, "failed" if findings else "passed", tuple(findings))


def _unverified(name: str, path: str) -> CheckResult:
    finding = VerificationFinding(
        "no-evidence", path, "no case", "at least one case", f"{name} was not observed; no evidence is never a pass"
    )
    return CheckResult(name, "unverified", (finding,))


def _module_contract(suite: StatelessContractSuite | TemporalContractSuite) -> ModuleContract:
    contract: Any = suite.contract
    module: type[ModuleContract] = StatelessModuleContract
    opened: type[Any] = StatelessOpenContract
    if isinstance(suite, TemporalContractSuite):
        module, opened = TemporalModuleContract, TemporalOpenContract
    if isinstance(contract, opened):
        contract = contract.module_contract
    if not isinstance(contract, module):
        refuse("suite.contract", repr(contract), f"{module.__name__} or {opened.__name__}")
    return contract


def _guarded[**P, T](call: Callable[P, T]) -> Callable[P, T]:
    """Wrap a callable of the author: what it raises is no verdict on the module."""
    if not callable(call):
        refuse("suite", repr(call), "a callable")

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except VerificationInputError:
            raise
        except Exception as error:
            raise VerificationExecutionError(
                why="a verdict needs every observation and comparison to run to its end",
                what=f"{call!r} raised {error!r}",
                how="mend the observation; its error is the cause",
            ) from error

    return guarded
