"""`pixtreme.infer.testing`: the conformance suite on the host runtime, and what it notices (S31)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import WAIT_S
from samples import break_host_stream

from pixtreme.infer.runtimes.host import HostRuntime
from pixtreme.infer.streams import StreamContext
from pixtreme.infer.testing import Latch, check_runtime


def test_the_host_runtime_passes() -> None:
    """S31, S28, S29, S30: every check of the suite, none skipped; without a fault to give, only those are."""
    report = check_runtime(HostRuntime, fault=break_host_stream)
    assert report.passed, str(report)
    assert {check.outcome for check in report.checks} == {"passed"}
    assert len(report.checks) >= 15
    partial = check_runtime(HostRuntime)
    assert [check.rule for check in partial.checks if check.outcome == "skipped"] == ["S30"]
    assert "passed  S28" in str(partial)


class RecordsNothing(HostRuntime):
    def record(self, event: Any, stream: Any) -> None:
        pass


class RunsWhileCapturing(HostRuntime):
    def copy(self, target: Any, source: Any, stream: Any) -> None:
        target[...] = source
        super().copy(target, source, stream)


class WaitsForTheLatest(HostRuntime):
    """A wait that looks at the event when it is reached, not when it was issued."""

    def wait(self, stream: Any, event: Any) -> None:
        if stream.capture is None:
            stream.worker.push(lambda: getattr(event.point, "block", int)())
        else:
            super().wait(stream, event)


class ReportsHere(HostRuntime):
    def report(self, event: Any, stream: Any, notify: Any) -> None:
        notify(None)


class CountsOne(HostRuntime):
    def node_count(self, graph: Any) -> int:
        return 1


class HidesFaults(HostRuntime):
    def synchronize(self, event: Any) -> None:
        try:
            super().synchronize(event)
        except Exception as error:
            if getattr(error, "status", None) != 719:
                raise


class LeavesItCurrent(HostRuntime):
    def activate(self, stream: Any) -> Callable[[], None]:
        super().activate(stream)
        return lambda: None


@pytest.mark.parametrize(
    ("kind", "statements"),
    [
        (RecordsNothing, {"a query does not block, and tells pending from complete"}),
        (RunsWhileCapturing, {"a capture records instead of running, and a graph is replayed as often as wanted"}),
        (WaitsForTheLatest, {"a wait refers to the last record before it, and waiting twice is fine"}),
        (ReportsHere, {"reports come in stream order, once each, on one thread that is not the caller's"}),
        (CountsOne, {"an empty capture has no nodes"}),
        (HidesFaults, {"a fault stays with the events recorded behind it, and with the streams that wait for them"}),
        (LeavesItCurrent, {"activating a stream makes it current, and what was found is put back"}),
    ],
)
def test_a_broken_runtime_is_noticed(
    kind: type[HostRuntime], statements: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S31: a runtime that breaks one statement fails that check, and says where."""
    monkeypatch.setattr("pixtreme.infer._runtime_checks.REPORT_WAIT_S", 1.0)
    report = check_runtime(kind, fault=break_host_stream)
    assert not report.passed
    failed = {check.statement for check in report.checks if check.outcome == "failed"}
    assert statements <= failed
    assert all(check.detail for check in report.checks if check.outcome == "failed")
    if kind is LeavesItCurrent:
        HostRuntime().activate(None)  # type: ignore[arg-type]  # what the broken one left behind


def test_latch(context: StreamContext, other: StreamContext) -> None:
    """S31: contexts and native streams are held until the latch is released, or its block left."""
    with Latch(context, other.stream) as latch:
        handles = [each.submit(lambda: 1) for each in (context, other)]
        assert not any(handle.done() for handle in handles)
        latch.release()
        assert [handle.result(WAIT_S) for handle in handles] == [1, 1]
        latch.hold(context)
        held = context.submit(lambda: 2)
        assert not held.done()
    assert held.result(WAIT_S) == 2
