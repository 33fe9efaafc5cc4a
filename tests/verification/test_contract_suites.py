"""The suites on facts: one sound set, and facts broken in one place each (V1-V10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
from helpers import frame
from samples import RGB

from pixtreme.infer.contracts import (
    GpuArrayParamContract,
    ShapeProfile,
    StateFootprint,
    StatelessFamilyContract,
    StatelessOpenContract,
    TemporalFamilyContract,
    TemporalOpenContract,
)
from pixtreme.infer.errors import InferError
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.verification import (
    AllocationFacts,
    ClosedInferenceFacts,
    CommonContractCases,
    CudaGraphContractSuite,
    EngineBindingFacts,
    EngineRoundTripFacts,
    FactoryContractCases,
    FrameBoundaryFacts,
    GpuArrayFacts,
    IsolationFacts,
    OpenedContractFacts,
    QueryAllocationFacts,
    RejectionFacts,
    ResourceSnapshot,
    SequenceFacts,
    StatelessContractSuite,
    StateLifecycleFacts,
    TemporalContractSuite,
    VerificationExecutionError,
    VerificationFinding,
    VerificationInputError,
    VerificationReport,
    canonical_json,
    verify_cuda_graph_contract,
    verify_module_contract,
)

WEIGHT = GpuArrayParamContract("weight", ("H", "W"), "float32", "share")
FAMILY = TemporalFamilyContract(RGB, RGB, (WEIGHT,), startup_frames=1)
OPENED = TemporalOpenContract(FAMILY, "artifact", "fp32", (4, 6), 2, StateFootprint(64))
PROFILE = ShapeProfile((2, 2), (4, 6), (8, 8))
GIVEN = GpuArrayFacts("weight", (4, 6), "float32", "cpu")
DIGEST = "ab" * 32


def large(**options: Any) -> HostFrame:
    return frame(shape=(8, 12, 3), **options)


def accepted(**changes: Any) -> FrameBoundaryFacts:
    sound = FrameBoundaryFacts("good", "accept", frame(), PROFILE, {"H": 4, "W": 6}, (GIVEN,), large(), None, True)
    return replace(sound, **changes)


def rejected(given: Any, text: str | None, **changes: Any) -> FrameBoundaryFacts:
    error = None if text is None else ValueError(text)
    bindings = {"H": 4, "W": 6}
    return replace(
        FrameBoundaryFacts("bad", "reject", given, PROFILE, bindings, (GIVEN,), None, error, False), **changes
    )


def boundaries(*extra: FrameBoundaryFacts) -> tuple[FrameBoundaryFacts, ...]:
    halves = rejected(frame(dtype="float16"), "received dtype float16; accepted is float32")
    return (accepted(), halves, *extra)


BINDING = EngineBindingFacts("frame", "input", "float32", (2, 2, 3), (4, 6, 3), (8, 8, 3))
RESULT = EngineBindingFacts("output", "output", "float32", (4, 4, 3), (8, 12, 3), (16, 16, 3))
ROUND_TRIP = EngineRoundTripFacts(100, 200, DIGEST, DIGEST, (BINDING, RESULT), (RESULT, BINDING), 1, 1)
ALLOCATION = AllocationFacts("result", 0x1000, 0x1000, ())
VERSION = RejectionFacts("version", ValueError("engine of version 9; accepted is 10"), False, False, (), 9, 10)
SELECTOR = RejectionFacts("ema", ValueError("received ema; accepted is params"), False, False, (), "ema", "params")
EMPTY = ResourceSnapshot(0, "bytes", ())
HELD = ResourceSnapshot(64, "bytes", ("a", "b"))
QUERY = QueryAllocationFacts("query", HELD, HELD, ())
CONTRACTS = OpenedContractFacts("open", OPENED, replace(OPENED))
CLOSED = ClosedInferenceFacts("after close", RuntimeError("closed"), False)
SEQUENCE = SequenceFacts("one", "two", (1, 2, 3), (1, 2, 3))
ISOLATION = IsolationFacts("one", "two", (1, 2), (1, 2), (7, 8), (7, 8))
LIFECYCLE = StateLifecycleFacts("one", EMPTY, HELD, HELD, HELD, EMPTY)
SOUND: dict[str, tuple[Any, ...]] = {
    "frame-boundary": boundaries(),
    "dlpack-allocation": (ALLOCATION,),
    "engine-round-trip": (ROUND_TRIP,),
    "engine-incompatibility": (VERSION,),
    "checkpoint-selector-rejection": (SELECTOR,),
    "query-gpu-allocation": (QUERY,),
    "opened-contract": (CONTRACTS,),
    "closed-inference": (CLOSED,),
    "reset-equivalence": (SEQUENCE,),
    "reset-continuation": (SEQUENCE,),
    "instance-isolation": (ISOLATION,),
    "state-footprint": (LIFECYCLE,),
    "graph-replay-equivalence": (SEQUENCE,),
}


def suite(**changes: Any) -> CudaGraphContractSuite:
    """The graph suite of sound facts, with the facts of some checks replaced."""
    facts = {name: tuple(_case(fact) for fact in given) for name, given in (SOUND | changes).items()}
    return CudaGraphContractSuite(
        TemporalContractSuite(
            contract=OPENED,
            common=CommonContractCases(
                facts["frame-boundary"],
                facts["dlpack-allocation"],
                facts["engine-round-trip"],
                facts["engine-incompatibility"],
                facts["checkpoint-selector-rejection"],
                outputs_equivalent=lambda first, second: bool(first == second),
                factory=FactoryContractCases(
                    facts["query-gpu-allocation"],
                    facts["opened-contract"],
                    facts["closed-inference"],
                    resources_equivalent=lambda first, second: bool(first == second),
                ),
            ),
            reset_equivalence=facts["reset-equivalence"],
            reset_continuation=facts["reset-continuation"],
            instance_isolation=facts["instance-isolation"],
            state_lifecycle=facts["state-footprint"],
            normalize_footprint=lambda footprint: footprint,
            resources_equivalent=lambda first, second: set(first.allocations) == set(second.allocations),
        ),
        facts["graph-replay-equivalence"],
    )


def _case(fact: Any) -> Callable[[], Any]:
    return lambda: fact


def test_sound_facts_pass_in_order() -> None:
    """V1: every check passes, in the order of the rule; the module's suite is the same without the replay."""
    report = verify_cuda_graph_contract(suite())
    assert [check.name for check in report.checks] == list(SOUND)
    assert {check.status for check in report.checks} == {"passed"}, str(report)
    module = verify_module_contract(suite().module)
    assert module.checks == report.checks[:-1]
    assert (module.scope, report.scope) == ("temporal-module", "cuda-graph")


#: name → (check, facts put in its place, code, path)
MUTANTS: dict[str, tuple[str, tuple[Any, ...], str, str]] = {
    "accepted frame of another dtype": (
        "frame-boundary",
        boundaries(accepted(input_frame=frame(dtype="float16"))),
        "contract-violation",
        "frame_boundaries[2].input_frame.dtype",
    ),
    "accepted frame outside the profile": (
        "frame-boundary",
        boundaries(accepted(input_frame=frame(shape=(4, 9, 3)), output_frame=frame(shape=(8, 18, 3)))),
        "contract-violation",
        "frame_boundaries[2].input_frame.shape[1]",
    ),
    "accepted weight of another shape": (
        "frame-boundary",
        boundaries(accepted(params=(replace(GIVEN, shape=(6, 4)),))),
        "contract-violation",
        "frame_boundaries[2].params.weight.shape",
    ),
    "accepted weight on another device": (
        "frame-boundary",
        boundaries(accepted(params=(replace(GIVEN, device=1),))),
        "contract-violation",
        "frame_boundaries[2].params.weight.device",
    ),
    "accepted call with an undeclared parameter": (
        "frame-boundary",
        boundaries(accepted(params=(GIVEN, replace(GIVEN, name="depth")))),
        "contract-violation",
        "frame_boundaries[2].params.depth",
    ),
    "accepted call that never ran": (
        "frame-boundary",
        boundaries(accepted(backend_started=False)),
        "backend-not-started",
        "frame_boundaries[2].backend_started",
    ),
    "accepted call that raised": (
        "frame-boundary",
        boundaries(accepted(error=RuntimeError("late"))),
        "unexpected-error",
        "frame_boundaries[2].error",
    ),
    "accepted call without an output": (
        "frame-boundary",
        boundaries(accepted(output_frame=None)),
        "no-output",
        "frame_boundaries[2].output_frame",
    ),
    "output of another dtype": (
        "frame-boundary",
        boundaries(accepted(output_frame=large(dtype="float16"))),
        "output-violation",
        "frame_boundaries[2].output_frame.dtype",
    ),
    "output of another size": (
        "frame-boundary",
        boundaries(accepted(output_frame=frame(shape=(8, 11, 3)))),
        "output-scale",
        "frame_boundaries[2].output_frame.shape",
    ),
    "rejected although valid": (
        "frame-boundary",
        boundaries(rejected(frame(), "received 1; accepted is 2")),
        "no-violation",
        "frame_boundaries[2].input_frame",
    ),
    "rejection hides the observed value": (
        "frame-boundary",
        boundaries(rejected(frame(dtype="float16"), "only float32 is accepted")),
        "error-hides-value",
        "frame_boundaries[2].error",
    ),
    "rejection shows another violation's value": (
        "frame-boundary",
        boundaries(rejected(frame(shape=(9, 6, 3)), "received 3 channels; accepted are 4")),
        "error-hides-value",
        "frame_boundaries[2].error",
    ),
    "rejection without an error": (
        "frame-boundary",
        boundaries(rejected(frame(dtype="float16"), None)),
        "no-error",
        "frame_boundaries[2].error",
    ),
    "rejection after the backend": (
        "frame-boundary",
        boundaries(rejected(frame(dtype="float16"), "float16, not float32", backend_started=True)),
        "backend-started",
        "frame_boundaries[2].backend_started",
    ),
    "rejection with an output": (
        "frame-boundary",
        boundaries(rejected(frame(dtype="float16"), "float16, not float32", output_frame=large())),
        "unexpected-output",
        "frame_boundaries[2].output_frame",
    ),
    "copied on export": (
        "dlpack-allocation",
        (replace(ALLOCATION, consumer=0x2000),),
        "hidden-copy",
        "dlpack_allocations[0].consumer",
    ),
    "allocated on export": (
        "dlpack-allocation",
        (ALLOCATION, replace(ALLOCATION, conversion_allocations=("scratch",))),
        "conversion-allocation",
        "dlpack_allocations[1].conversion_allocations",
    ),
    "loaded where it was made": (
        "engine-round-trip",
        (replace(ROUND_TRIP, consumer_execution=100),),
        "same-process",
        "engine_round_trip[0].consumer_execution",
    ),
    "digest of another form": (
        "engine-round-trip",
        (replace(ROUND_TRIP, serialized_sha256="abc", loaded_sha256="abc"),),
        "digest-form",
        "engine_round_trip[0].serialized_sha256",
    ),
    "other bytes": (
        "engine-round-trip",
        (replace(ROUND_TRIP, loaded_sha256="cd" * 32),),
        "digest-mismatch",
        "engine_round_trip[0].loaded_sha256",
    ),
    "binding lost": (
        "engine-round-trip",
        (replace(ROUND_TRIP, loaded_bindings=(BINDING,)),),
        "binding-missing",
        "engine_round_trip[0].loaded_bindings.output",
    ),
    "binding appeared": (
        "engine-round-trip",
        (replace(ROUND_TRIP, loaded_bindings=(BINDING, RESULT, replace(RESULT, name="debug"))),),
        "binding-unexpected",
        "engine_round_trip[0].loaded_bindings.debug",
    ),
    "binding twice": (
        "engine-round-trip",
        (replace(ROUND_TRIP, loaded_bindings=(BINDING, RESULT, RESULT)),),
        "binding-duplicate",
        "engine_round_trip[0].loaded_bindings.output",
    ),
    "binding of another profile": (
        "engine-round-trip",
        (replace(ROUND_TRIP, loaded_bindings=(replace(BINDING, max_shape=(9, 9, 3)), RESULT)),),
        "binding-mismatch",
        "engine_round_trip[0].loaded_bindings.frame.max_shape",
    ),
    "loaded engine computes something else": (
        "engine-round-trip",
        (replace(ROUND_TRIP, loaded_output=2),),
        "output-mismatch",
        "engine_round_trip[0].loaded_output",
    ),
    "incompatible engine opens": (
        "engine-incompatibility",
        (replace(VERSION, error=None, instance_accepted=True),),
        "instance-accepted",
        "engine_incompatibilities[0].instance_accepted",
    ),
    "incompatibility hides what it wants": (
        "engine-incompatibility",
        (replace(VERSION, error=ValueError("an engine of version 9 cannot be used")),),
        "error-hides-value",
        "engine_incompatibilities[0].error",
    ),
    "incompatible engine runs": (
        "engine-incompatibility",
        (replace(VERSION, backend_started=True),),
        "backend-started",
        "engine_incompatibilities[0].backend_started",
    ),
    "another checkpoint is used instead": (
        "checkpoint-selector-rejection",
        (replace(SELECTOR, fallback_events=("used params",)),),
        "fallback",
        "checkpoint_rejections[0].fallback_events",
    ),
    "checkpoint refused without an error": (
        "checkpoint-selector-rejection",
        (replace(SELECTOR, error=None),),
        "no-error",
        "checkpoint_rejections[0].error",
    ),
    "query grows": (
        "query-gpu-allocation",
        (replace(QUERY, after_query=replace(HELD, amount=65)),),
        "growth",
        "factory.query_allocations[0].after_query",
    ),
    "query swaps an allocation": (
        "query-gpu-allocation",
        (replace(QUERY, after_query=replace(HELD, allocations=("a", "c"))),),
        "growth",
        "factory.query_allocations[0].after_query",
    ),
    "query releases": (
        "query-gpu-allocation",
        (replace(QUERY, after_query=replace(HELD, allocations=("a",))),),
        "resources-differ",
        "factory.query_allocations[0].after_query",
    ),
    "query allocates for a moment": (
        "query-gpu-allocation",
        (replace(QUERY, allocations_during_query=("scratch",)),),
        "temporary-allocation",
        "factory.query_allocations[0].allocations_during_query",
    ),
    "query counts in other units": (
        "query-gpu-allocation",
        (replace(QUERY, after_query=replace(HELD, unit="blocks")),),
        "unit-mismatch",
        "factory.query_allocations[0].after_query.unit",
    ),
    "opened at another size": (
        "opened-contract",
        (replace(CONTRACTS, opened_contract=replace(OPENED, input_hw=(6, 4))),),
        "contract-mismatch",
        "factory.opened_contracts[0].opened_contract",
    ),
    "opened at another scale": (
        "opened-contract",
        (CONTRACTS, replace(CONTRACTS, opened_contract=replace(OPENED, scale=3))),
        "contract-mismatch",
        "factory.opened_contracts[1].opened_contract",
    ),
    "closed instance answers": (
        "closed-inference",
        (replace(CLOSED, error=None),),
        "no-error",
        "factory.closed_inference[0].error",
    ),
    "closed instance starts the backend": (
        "closed-inference",
        (replace(CLOSED, backend_started=True),),
        "backend-started",
        "factory.closed_inference[0].backend_started",
    ),
    "reset compared with itself": (
        "reset-equivalence",
        (replace(SEQUENCE, candidate_instance="one"),),
        "same-instance",
        "reset_equivalence[0].candidate_instance",
    ),
    "reset sequence too short": (
        "reset-equivalence",
        (replace(SEQUENCE, reference=(1,), candidate=(1,)),),
        "too-short",
        "reset_equivalence[0].reference",
    ),
    "history after a reset": (
        "reset-equivalence",
        (replace(SEQUENCE, candidate=(1, 9, 3)),),
        "output-mismatch",
        "reset_equivalence[0].candidate[1]",
    ),
    "continuation differs": (
        "reset-continuation",
        (replace(SEQUENCE, candidate=(1, 2, 9)),),
        "output-mismatch",
        "reset_continuation[0].candidate[2]",
    ),
    "continuation compared with itself": (
        "reset-continuation",
        (replace(SEQUENCE, reference_instance="two"),),
        "same-instance",
        "reset_continuation[0].candidate_instance",
    ),
    "second instance disturbed": (
        "instance-isolation",
        (replace(ISOLATION, observed_b=(7, 2)),),
        "output-mismatch",
        "instance_isolation[0].observed_b[1]",
    ),
    "one instance in two places": (
        "instance-isolation",
        (replace(ISOLATION, instance_b="one"),),
        "same-instance",
        "instance_isolation[0].instance_b",
    ),
    "state larger than declared": (
        "state-footprint",
        (replace(LIFECYCLE, after_open=replace(HELD, amount=128)),),
        "growth-mismatch",
        "state_lifecycle[0].after_open",
    ),
    "no state at all": (
        "state-footprint",
        (StateLifecycleFacts("one", EMPTY, EMPTY, EMPTY, EMPTY, EMPTY),),
        "growth-mismatch",
        "state_lifecycle[0].after_open",
    ),
    "state moves when running": (
        "state-footprint",
        (replace(LIFECYCLE, after_run=replace(HELD, allocations=("a", "c"))),),
        "allocations-changed",
        "state_lifecycle[0].after_run",
    ),
    "state kept after closing": (
        "state-footprint",
        (replace(LIFECYCLE, after_close=replace(EMPTY, allocations=("b",))),),
        "not-released",
        "state_lifecycle[0].after_close",
    ),
    "state counted in other units": (
        "state-footprint",
        (replace(LIFECYCLE, after_reset=replace(HELD, unit="frames")),),
        "unit-mismatch",
        "state_lifecycle[0].after_reset.unit",
    ),
    "replay lags by one": (
        "graph-replay-equivalence",
        (SEQUENCE, replace(SEQUENCE, candidate=(0, 1, 2))),
        "output-mismatch",
        "replay_equivalence[1].candidate[0]",
    ),
    "replay sequence too short": (
        "graph-replay-equivalence",
        (replace(SEQUENCE, reference=(1,), candidate=(1,)),),
        "too-short",
        "replay_equivalence[0].reference",
    ),
    "replay compared with itself": (
        "graph-replay-equivalence",
        (replace(SEQUENCE, candidate_instance="one"),),
        "same-instance",
        "replay_equivalence[0].candidate_instance",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_fact_is_caught(name: str) -> None:
    """V3, V4, V5, V6, V7, V8, V9: the check meant for it fails with this finding, and no other check does."""
    check, facts, code, path = MUTANTS[name]
    report = verify_cuda_graph_contract(suite(**{check: facts}))
    failed = {result.name: result for result in report.checks if result.status != "passed"}
    assert set(failed) == {check}, str(report)
    assert (code, path) in [(finding.code, finding.path) for finding in failed[check].findings], str(report)
    assert not report.passed
    assert canonical_json(report.to_dict())


def test_there_are_mutants_for_every_check() -> None:
    """Each check is tripped by at least two broken facts."""
    counts = {check: sum(mutant[0] == check for mutant in MUTANTS.values()) for check in SOUND}
    assert all(count >= 2 for count in counts.values()), counts
    assert len(MUTANTS) >= 40


#: what was wrong → (input, message): each names both sides, in the author's own words.
GOOD_MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"input_frame": frame(dtype="uint8")}, "dtype=uint8; accepted is float32"),
    "height": ({"input_frame": frame(shape=(1, 6, 3))}, "height 1 is not within 2..8"),
    "size as a tuple": ({"input_frame": frame(shape=(4, 20, 3))}, "got (4, 20), at most (8, 8)"),
    "size as WxH": ({"input_frame": frame(shape=(4, 20, 3))}, "got 20x4; largest is 8x8"),
    "channels": (
        {
            "input_frame": HostFrame(
                data=np.zeros((4, 6, 3), np.float32), channels="BGR", colorspace="sRGB", gamma="sRGB"
            )
        },
        "channels BGR, but RGB is accepted",
    ),
    "no frame": ({"input_frame": np.zeros((4, 6, 3))}, "received ndarray; accepted is a frame"),
    "missing": ({"params": ()}, "weight is missing"),
    "undeclared": ({"params": (GIVEN, replace(GIVEN, name="depth"))}, "depth is unknown; accepted are ['weight']"),
    "shape": ({"params": (replace(GIVEN, shape=(3, 3)),)}, "weight is (3, 3), not (4, 6)"),
    "param dtype": ({"params": (replace(GIVEN, dtype="float64"),)}, "weight is float64, not float32"),
    "param device": ({"params": (replace(GIVEN, device=0),)}, "weight is on cuda:0, the frame on cpu"),
}


@pytest.mark.parametrize("name", GOOD_MESSAGES)
def test_a_rejection_that_shows_both_sides_is_evidence(name: str) -> None:
    """V3: a rejection of each kind of violation passes when its text shows what was observed and what is accepted."""
    changes, text = GOOD_MESSAGES[name]
    facts = replace(rejected(frame(), text), **changes)
    report = verify_cuda_graph_contract(suite(**{"frame-boundary": boundaries(facts)}))
    assert report.passed, str(report)
    silent = replace(facts, error=ValueError("no"))
    report = verify_cuda_graph_contract(suite(**{"frame-boundary": boundaries(silent)}))
    assert [finding.code for finding in report.checks[0].findings] == ["error-hides-value"]


@pytest.mark.parametrize("check", SOUND)
def test_no_evidence_is_never_a_pass(check: str) -> None:
    """V2: an empty case tuple is unverified, with one finding that says what is missing."""
    report = verify_cuda_graph_contract(suite(**{check: ()}))
    (result,) = [result for result in report.checks if result.status != "passed"]
    assert (result.name, result.status) == (check, "unverified")
    (finding,) = result.findings
    assert (finding.code, finding.expected) == ("no-evidence", "at least one case")
    assert finding.path.split(".")[-1] in {field.name for kind in _SUITES for field in fields(kind)}
    assert not report.passed


_SUITES: tuple[Any, ...] = (CommonContractCases, FactoryContractCases, TemporalContractSuite, CudaGraphContractSuite)


def test_stateless_suite() -> None:
    """V1, V2: temporal checks do not apply; without factory evidence three are unverified. One callable is a case."""
    opened = StatelessOpenContract(StatelessFamilyContract(RGB, RGB, (WEIGHT,)), "artifact", "fp32", (4, 6), 2)
    common = replace(suite().module.common, factory=None, dlpack_allocations=lambda: ALLOCATION)
    for contract in (opened, opened.module_contract):
        report = verify_module_contract(StatelessContractSuite(contract, common))
        assert {check.name: check.status for check in report.checks} == {
            name: "not-applicable" if index >= 8 else ("unverified" if index in (5, 6, 7) else "passed")
            for index, name in enumerate(list(SOUND)[:-1])
        }
        assert [check.findings[0].path for check in report.checks if check.status == "unverified"] == ["factory"] * 3
    short = SequenceFacts("one", "two", (1,), (1,))
    graph = CudaGraphContractSuite(StatelessContractSuite(opened, common), lambda: short)
    assert verify_cuda_graph_contract(graph).checks[-1].status == "passed"  # no start-up frames: one request is enough


def test_report_reads_as_a_table() -> None:
    """V10: a line a check, its findings below it."""
    report = verify_cuda_graph_contract(suite(**{"closed-inference": (replace(CLOSED, error=None),)}))
    lines = str(report).splitlines()
    assert lines[0] == "cuda-graph: not passed (12 passed, 1 failed)"
    assert len(lines) == 15
    place = lines.index("  closed-inference               failed")
    assert lines[place + 1].strip().startswith("no-error at factory.closed_inference[0].error: observed None;")
    assert report.to_dict()["checks"][7]["findings"][0]["code"] == "no-error"


def test_results_are_frozen() -> None:
    """V10: what was judged cannot be changed."""
    report = verify_module_contract(suite().module)
    finding = VerificationFinding("code", "path", "observed", "expected", "detail")
    for thing, field in ((report, "scope"), (report.checks[0], "status"), (finding, "code"), (GIVEN, "name")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, field, "other")
    assert VerificationReport("empty", ()).passed


def _raises() -> Any:
    raise LookupError("lost")


def test_what_a_case_raises_is_no_verdict() -> None:
    """V1: a provider's or comparison's own failure is a VerificationExecutionError with that cause."""
    whole = suite()
    broken_case = replace(whole, replay_equivalence=(_raises,))
    broken_comparison = replace(
        whole,
        module=replace(whole.module, common=replace(whole.module.common, outputs_equivalent=lambda *_: _raises())),
    )
    for broken in (broken_case, broken_comparison):
        with pytest.raises(VerificationExecutionError, match="lost") as caught:
            verify_cuda_graph_contract(broken)
        assert isinstance(caught.value.__cause__, LookupError)
        assert isinstance(caught.value, InferError)


alter: Any = replace  # malformed on purpose: the type checker need not know
judge: Any = verify_module_contract
judge_graph: Any = verify_cuda_graph_contract

#: what is malformed → (check, facts, words of the message)
MALFORMED: dict[str, tuple[str, Any, str]] = {
    "fact of another kind": ("dlpack-allocation", (VERSION,), "AllocationFacts"),
    "neither accept nor reject": ("frame-boundary", (accepted(expected="maybe"),), "'accept' or 'reject'"),
    "no profile": ("frame-boundary", (accepted(input_profile=None),), "ShapeProfile"),
    "symbol without a number": ("frame-boundary", (accepted(dimension_bindings={"H": 4}),), "['W']"),
    "number that is none": ("frame-boundary", (accepted(dimension_bindings={"H": True, "W": 6}),), "positive ints"),
    "parameter twice": ("frame-boundary", (accepted(params=(GIVEN, GIVEN)),), "each parameter once"),
    "parameters in a list": ("frame-boundary", (accepted(params=[GIVEN]),), "tuple of GpuArrayFacts"),
    "device that is none": ("frame-boundary", (accepted(params=(alter(GIVEN, device=None),)),), "'cuda:N'"),
    "shape that is none": ("frame-boundary", (accepted(params=(alter(GIVEN, shape="4"),)),), "tuple of ints"),
    "error as text": ("frame-boundary", (accepted(error="boom"),), "exception"),
    "started maybe": ("frame-boundary", (accepted(backend_started=1),), "a bool"),
    "allocations counted": ("dlpack-allocation", (alter(ALLOCATION, conversion_allocations=1),), "collection"),
    "bindings in a list": ("engine-round-trip", (alter(ROUND_TRIP, loaded_bindings=[BINDING]),), "tuple"),
    "no bindings": ("engine-round-trip", (alter(ROUND_TRIP, expected_bindings=()),), "inputs and outputs"),
    "rejection error as text": ("engine-incompatibility", (alter(VERSION, error="9, 10"),), "exception"),
    "fallback as text": ("checkpoint-selector-rejection", (alter(SELECTOR, fallback_events="x"),), "collection"),
    "snapshot as a number": ("query-gpu-allocation", (alter(QUERY, before_query=0),), "ResourceSnapshot"),
    "negative amount": ("query-gpu-allocation", (alter(QUERY, before_query=alter(HELD, amount=-1)),), "from 0"),
    "module's contract": (
        "opened-contract",
        (alter(CONTRACTS, opened_contract=OPENED.module_contract),),
        "TemporalOpenContract",
    ),
    "closed error as text": ("closed-inference", (alter(CLOSED, error="closed"),), "exception"),
    "unequal lengths": ("reset-equivalence", (alter(SEQUENCE, candidate=(1, 2)),), "as many as reference has, 3"),
    "no outputs": ("reset-continuation", (alter(SEQUENCE, reference=(), candidate=()),), "at least one output"),
    "isolation of unequal lengths": ("instance-isolation", (alter(ISOLATION, observed_a=(1,)),), "as many as"),
    "cases that are no callables": ("state-footprint", None, "callables that return StateLifecycleFacts"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_facts_are_refused(name: str) -> None:
    """V8: a malformed fact or case is an input error that says what is accepted, never a finding."""
    check, facts, words = MALFORMED[name]
    whole = suite(**({check: facts} if facts is not None else {}))
    if facts is None:
        whole = alter(whole, module=alter(whole.module, state_lifecycle=(LIFECYCLE,)))
    with pytest.raises(VerificationInputError, match="accepted is") as caught:
        verify_cuda_graph_contract(whole)
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: judge(suite()), "StatelessContractSuite"),
        (lambda: judge_graph(suite().module), "CudaGraphContractSuite"),
        (lambda: judge(alter(suite().module, common=None)), "CommonContractCases"),
        (lambda: judge(alter(suite().module, contract=FAMILY)), "TemporalModuleContract"),
        (
            lambda: judge(alter(suite().module, common=alter(suite().module.common, factory=suite()))),
            "FactoryContractCases",
        ),
        (
            lambda: judge(alter(suite().module, common=alter(suite().module.common, outputs_equivalent=1))),
            "callable",
        ),
        (
            lambda: judge(
                alter(suite().module, common=alter(suite().module.common, outputs_equivalent=lambda *_: "yes"))
            ),
            "True or False",
        ),
    ],
)
def test_malformed_suites_are_refused(call: Any, words: str) -> None:
    """V1: the suite itself is checked."""
    with pytest.raises(VerificationInputError) as caught:
        call()
    assert words in str(caught.value)
