"""The judgements of the contract suites, one for each kind of fact but the frame boundary (V4-V9).

Each yields findings and nothing where all is well. Those that need a comparison of the author's take it and return
the judgement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

from pixtreme.infer.declarations import (
    StateFootprint,
    StatelessOpenContract,
    TemporalOpenContract,
    is_positive_int,
)
from pixtreme.infer.verification.boundary import check_error, shows, spellings
from pixtreme.infer.verification.errors import refuse
from pixtreme.infer.verification.facts import (
    AllocationFacts,
    ClosedInferenceFacts,
    EngineBindingFacts,
    EngineRoundTripFacts,
    IsolationFacts,
    OpenedContractFacts,
    QueryAllocationFacts,
    RejectionFacts,
    ResourceSnapshot,
    SequenceFacts,
    StateLifecycleFacts,
    VerificationFinding,
)

type Findings = Iterator[VerificationFinding]
Outputs = Callable[[Any, Any], bool]
Resources = Callable[[ResourceSnapshot, ResourceSnapshot], bool]


def allocation(facts: AllocationFacts, path: str) -> Findings:
    """V4: an exchange through DLPack shares the allocation and makes none."""
    _check_collection(facts.conversion_allocations, f"{path}.conversion_allocations")
    if facts.producer != facts.consumer:
        detail = f"{facts.name}: producer and consumer hold the same allocation"
        yield VerificationFinding("hidden-copy", f"{path}.consumer", repr(facts.consumer), repr(facts.producer), detail)
    if facts.conversion_allocations:
        detail = f"{facts.name}: an exchange allocates nothing"
        observed = _listed(facts.conversion_allocations)
        yield VerificationFinding("conversion-allocation", f"{path}.conversion_allocations", observed, "none", detail)


def round_trip(equivalent: Outputs) -> Callable[[EngineRoundTripFacts, str], Findings]:
    """V5: another process loads the same bytes, with the same bindings, and computes the same."""

    def judge(facts: EngineRoundTripFacts, path: str) -> Findings:
        if facts.producer_execution == facts.consumer_execution:
            detail = "an engine is proved by another process than the one that made it"
            observed = repr(facts.consumer_execution)
            yield VerificationFinding("same-process", f"{path}.consumer_execution", observed, "another process", detail)
        digests = {name: getattr(facts, name) for name in ("serialized_sha256", "loaded_sha256")}
        for name, digest in digests.items():
            if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
                detail = "the engine's bytes are named by their SHA-256"
                yield VerificationFinding("digest-form", f"{path}.{name}", repr(digest), "64 hex digits", detail)
        serialized, loaded = (str(digest).casefold() for digest in digests.values())
        if serialized != loaded:
            detail = "what was loaded is what was serialized"
            yield VerificationFinding("digest-mismatch", f"{path}.loaded_sha256", loaded, serialized, detail)
        yield from _bindings(facts.expected_bindings, facts.loaded_bindings, path)
        if not _agree(equivalent, facts.original_output, facts.loaded_output):
            detail = "the loaded engine computes what the original computed"
            yield VerificationFinding("output-mismatch", f"{path}.loaded_output", "another output", "equal", detail)

    return judge


def _bindings(expected: tuple[EngineBindingFacts, ...], loaded: tuple[EngineBindingFacts, ...], path: str) -> Findings:
    by_name: list[dict[str, EngineBindingFacts]] = []
    for field, bindings in (("expected_bindings", expected), ("loaded_bindings", loaded)):
        if not isinstance(bindings, tuple) or not all(isinstance(item, EngineBindingFacts) for item in bindings):
            refuse(f"{path}.{field}", repr(bindings), "a tuple of EngineBindingFacts")
        if not bindings:
            refuse(f"{path}.{field}", "none", "the engine's inputs and outputs")
        names = [binding.name for binding in bindings]
        for name in sorted({name for name in names if names.count(name) > 1}):
            detail = "bindings match one to one"
            yield VerificationFinding("binding-duplicate", f"{path}.{field}.{name}", "several", "one", detail)
        by_name.append({binding.name: binding for binding in bindings})
    before, after = by_name
    for name in before.keys() - after.keys():
        detail = "every binding is still there after loading"
        yield VerificationFinding("binding-missing", f"{path}.loaded_bindings.{name}", "absent", "present", detail)
    for name in after.keys() - before.keys():
        detail = "loading adds no binding"
        yield VerificationFinding("binding-unexpected", f"{path}.loaded_bindings.{name}", "present", "absent", detail)
    for name in before.keys() & after.keys():
        for field in (field.name for field in fields(EngineBindingFacts)):
            sides = getattr(after[name], field), getattr(before[name], field)
            if sides[0] != sides[1]:
                place = f"{path}.loaded_bindings.{name}.{field}"
                detail = "a binding is the same in every field"
                yield VerificationFinding("binding-mismatch", place, repr(sides[0]), repr(sides[1]), detail)


def rejection(facts: RejectionFacts, path: str) -> Findings:
    """V6: what must be refused is refused by an error that shows both sides, and nothing else happens."""
    check_error(facts.error, path)
    _check_collection(facts.fallback_events, f"{path}.fallback_events")
    if facts.error is None:
        detail = f"{facts.name}: it is refused"
        yield VerificationFinding("no-error", f"{path}.error", "None", "an error", detail)
    else:
        for side, value in (("observed", facts.observed), ("expected", facts.expected)):
            if not shows(facts.error, *spellings(value)):
                detail = f"{facts.name}: the message shows the {side} value"
                yield VerificationFinding("error-hides-value", f"{path}.error", str(facts.error), repr(value), detail)
    for code, field in (("instance-accepted", "instance_accepted"), ("backend-started", "backend_started")):
        if getattr(facts, field):
            detail = f"{facts.name}: a refusal leaves no instance and starts no backend"
            yield VerificationFinding(code, f"{path}.{field}", "True", "False", detail)
    if facts.fallback_events:
        detail = f"{facts.name}: nothing else is used instead"
        observed = _listed(facts.fallback_events)
        yield VerificationFinding("fallback", f"{path}.fallback_events", observed, "none", detail)


def query(equivalent: Resources) -> Callable[[QueryAllocationFacts, str], Findings]:
    """V7: a query grows nothing and allocates nothing, not even for a moment."""

    def judge(facts: QueryAllocationFacts, path: str) -> Findings:
        before, after = facts.before_query, facts.after_query
        _check_snapshots(path, before_query=before, after_query=after)
        _check_collection(facts.allocations_during_query, f"{path}.allocations_during_query")
        yield from _one_unit(path, before.unit, after_query=after)
        if after.amount > before.amount or set(after.allocations) - set(before.allocations):
            detail = f"{facts.name}: a query leaves nothing behind"
            yield VerificationFinding("growth", f"{path}.after_query", _held(after), _held(before), detail)
        elif not _agree(equivalent, before, after):
            detail = f"{facts.name}: what is held before and after a query is the same"
            yield VerificationFinding("resources-differ", f"{path}.after_query", _held(after), _held(before), detail)
        if facts.allocations_during_query:
            detail = f"{facts.name}: a query allocates nothing, temporary allocations included"
            observed = _listed(facts.allocations_during_query)
            place = f"{path}.allocations_during_query"
            yield VerificationFinding("temporary-allocation", place, observed, "none", detail)

    return judge


def opened(facts: OpenedContractFacts, path: str) -> Findings:
    """V7: an instance is what the query promised."""
    for field in ("queried_contract", "opened_contract"):
        value = getattr(facts, field)
        if not isinstance(value, StatelessOpenContract | TemporalOpenContract):
            refuse(f"{path}.{field}", repr(value), "a StatelessOpenContract or TemporalOpenContract")
    if facts.queried_contract != facts.opened_contract:
        detail = f"{facts.name}: the opened contract equals the queried one"
        sides = repr(facts.opened_contract), repr(facts.queried_contract)
        yield VerificationFinding("contract-mismatch", f"{path}.opened_contract", *sides, detail)


def closed(facts: ClosedInferenceFacts, path: str) -> Findings:
    """V7: a closed instance refuses before the backend."""
    check_error(facts.error, path)
    if facts.error is None:
        detail = f"{facts.name}: a closed instance refuses every call"
        yield VerificationFinding("no-error", f"{path}.error", "None", "an error", detail)
    if facts.backend_started:
        detail = f"{facts.name}: the refusal comes before the backend"
        yield VerificationFinding("backend-started", f"{path}.backend_started", "True", "False", detail)


def sequences(equivalent: Outputs, *, least: int) -> Callable[[SequenceFacts, str], Findings]:
    """V8, V9: two distinct instances give equivalent outputs, over at least ``least`` requests."""

    def judge(facts: SequenceFacts, path: str) -> Findings:
        if _same(facts.reference_instance, facts.candidate_instance):
            yield _same_instance(f"{path}.candidate_instance")
        if len(facts.reference) < least:
            detail = "a shorter sequence ends before the module has its full history"
            observed = f"{len(facts.reference)} requests"
            yield VerificationFinding("too-short", f"{path}.reference", observed, f"at least {least}", detail)
        yield from _pairs(equivalent, facts.reference, facts.candidate, path, "reference", "candidate")

    return judge


def isolation(equivalent: Outputs) -> Callable[[IsolationFacts, str], Findings]:
    """V8: two instances called in turns do not see each other."""

    def judge(facts: IsolationFacts, path: str) -> Findings:
        if _same(facts.instance_a, facts.instance_b):
            yield _same_instance(f"{path}.instance_b")
        yield from _pairs(equivalent, facts.reference_a, facts.observed_a, path, "reference_a", "observed_a")
        yield from _pairs(equivalent, facts.reference_b, facts.observed_b, path, "reference_b", "observed_b")

    return judge


def lifecycle(
    declared: StateFootprint, normalize: Callable[[StateFootprint], StateFootprint], equivalent: Resources
) -> Callable[[StateLifecycleFacts, str], Findings]:
    """V8: opening grows by what is declared, running and resetting by nothing, and closing gives all of it back."""

    def judge(facts: StateLifecycleFacts, path: str) -> Findings:
        moments = ("before_open", "after_open", "after_run", "after_reset", "after_close")
        snapshots: dict[str, ResourceSnapshot] = {moment: getattr(facts, moment) for moment in moments}
        _check_snapshots(path, **snapshots)
        yield from _one_unit(path, declared.unit, **snapshots)
        before, after = facts.before_open, facts.after_open
        expected = normalize(declared)
        grown = after.amount - before.amount
        observed = normalize(StateFootprint(grown, after.unit)) if grown > 0 else None
        if observed is None or observed.amount != expected.amount:
            detail = "opening grows the state by what the contract declares"
            amount = f"{grown if observed is None else observed.amount} {after.unit}"
            yield VerificationFinding(
                "growth-mismatch", f"{path}.after_open", amount, f"{expected.amount} {expected.unit}", detail
            )
        for moment in ("after_run", "after_reset"):
            snapshot = snapshots[moment]
            if set(snapshot.allocations) != set(after.allocations) or not _agree(equivalent, after, snapshot):
                detail = "state stays in the storage it was opened with"
                place = f"{path}.{moment}"
                yield VerificationFinding("allocations-changed", place, _held(snapshot), _held(after), detail)
        kept = set(facts.after_close.allocations) & (set(after.allocations) - set(before.allocations))
        if kept or not _agree(equivalent, before, facts.after_close):
            detail = "closing releases everything that opening allocated"
            held = _held(facts.after_close)
            yield VerificationFinding("not-released", f"{path}.after_close", held, _held(before), detail)

    return judge


def _pairs(
    equivalent: Outputs, reference: Sequence[Any], candidate: Sequence[Any], path: str, first: str, second: str
) -> Findings:
    for name, outputs in ((first, reference), (second, candidate)):
        if not isinstance(outputs, Sequence) or not outputs:
            refuse(f"{path}.{name}", repr(outputs), "a sequence of at least one output")
    if len(reference) != len(candidate):
        refuse(f"{path}.{second}", f"{len(candidate)} outputs", f"as many as {first} has, {len(reference)}")
    for index, (expected, observed) in enumerate(zip(reference, candidate, strict=True)):
        if not _agree(equivalent, expected, observed):
            detail = f"output {index} of {second} is equivalent to that of {first}"
            yield VerificationFinding("output-mismatch", f"{path}.{second}[{index}]", "another output", "equal", detail)


def _agree(equivalent: Callable[[Any, Any], bool], first: Any, second: Any) -> bool:
    verdict: Any = equivalent(first, second)
    if type(verdict).__name__ not in ("bool", "bool_"):  # NumPy's bool is one, too; an array is none
        refuse("the answer of an equivalence", repr(verdict), "True or False")
    return bool(verdict)


def _same(first: Any, second: Any) -> bool:
    return first is second or (type(first) is type(second) and isinstance(first, int | str) and first == second)


def _same_instance(place: str) -> VerificationFinding:
    detail = "an instance compared with itself proves nothing"
    return VerificationFinding("same-instance", place, "the same instance", "another instance", detail)


def _one_unit(path: str, unit: str, **snapshots: ResourceSnapshot) -> Findings:
    for moment, snapshot in snapshots.items():
        if snapshot.unit != unit:
            detail = "amounts are counted in one unit throughout"
            yield VerificationFinding("unit-mismatch", f"{path}.{moment}.unit", repr(snapshot.unit), repr(unit), detail)


def _check_snapshots(path: str, **snapshots: ResourceSnapshot) -> None:
    for moment, snapshot in snapshots.items():
        if not isinstance(snapshot, ResourceSnapshot):
            refuse(f"{path}.{moment}", repr(snapshot), "a ResourceSnapshot")
        if snapshot.amount != 0 and not is_positive_int(snapshot.amount):
            refuse(f"{path}.{moment}.amount", repr(snapshot.amount), "an int from 0")
        _check_collection(snapshot.allocations, f"{path}.{moment}.allocations")


def _check_collection(value: object, place: str) -> None:
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        refuse(place, repr(value), "a collection of identities, empty where there is none")


def _held(snapshot: ResourceSnapshot) -> str:
    return f"{snapshot.amount} {snapshot.unit} in {len(snapshot.allocations)} allocations"


def _listed(values: Collection[object]) -> str:
    return f"{len(values)}: {', '.join(map(repr, list(values)[:4]))}"
