"""Latency, drift, and telemetry of a run (V12)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WAIT_S, doubled
from samples import HW, photograph

from pixtreme.infer.errors import ContextError
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact
from pixtreme.infer.streams import StreamContext
from pixtreme.infer.verification import (
    DriftSummary,
    EventTimer,
    LatencySummary,
    TelemetrySample,
    TimedRequest,
    VerificationExecutionError,
    VerificationInputError,
    WallTimer,
    calculate_throughput,
    evaluate_drift,
    measure_requests,
    summarize_latency,
)

approx: Any = pytest.approx  # stands for a number inside the results compared


class Clock:
    """A timer that runs the request and says what it was told to."""

    def __init__(self, *readings: Any) -> None:
        self.readings = list(readings)

    def measure[T](self, request: Callable[[], T], /) -> TimedRequest[T]:
        return TimedRequest(request(), self.readings.pop(0))


class Source:
    """Telemetry that counts its samples, says when there are enough, and fails at one of them."""

    def __init__(self, *, fail_at: int = -1, enough: int = 10**9) -> None:
        self.taken = 0
        self.threads: list[str] = []
        self.enough = threading.Event()
        self.failed = threading.Event()
        self._fail_at, self._enough = fail_at, enough

    def sample(self) -> TelemetrySample:
        number, self.taken = self.taken, self.taken + 1
        self.threads.append(threading.current_thread().name)
        if self.taken >= self._enough:
            self.enough.set()
        if number == self._fail_at:
            self.failed.set()
            raise LookupError("the board is gone")
        return TelemetrySample(datetime.now(UTC), 0.0, "test", "board", {"power_w": None})


def test_summaries() -> None:
    """V12: known figures from known samples."""
    assert summarize_latency([1.0, 2.0, 3.0, 4.0]) == LatencySummary(
        4, 1.0, 2.5, 2.5, approx(3.85), 4.0, approx(1.25**0.5)
    )
    assert calculate_throughput([10.0, 30.0]) == approx(50.0)
    assert evaluate_drift([1.0, 1.0, 9.0, 2.0, 2.0], window_size=2) == DriftSummary(2, 1.0, 2.0, 100.0)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", None])
def test_samples_are_positive_and_finite(value: Any) -> None:
    """V12: anything else is an input error, also from a timer."""
    for call in (summarize_latency, calculate_throughput):
        with pytest.raises(VerificationInputError, match="positive finite"):
            call([1.0, value])
    with pytest.raises(VerificationInputError, match="positive finite"):
        measure_requests(lambda: 1, timer=Clock(1.0, value), warmup=0, samples=2)


@pytest.mark.parametrize("window", [0, 3, True, 1.0])
def test_drift_windows_do_not_overlap(window: Any) -> None:
    """V12: a window is at most half of the samples."""
    with pytest.raises(VerificationInputError, match="half of"):
        evaluate_drift([1.0] * 5, window_size=window)


def test_a_run_measures_after_warming_up() -> None:
    """V12: warm-up requests are not samples; the last value and the figures come from the measured ones."""
    calls = iter(range(100))
    run = measure_requests(lambda: next(calls), timer=Clock(9, 9, 1, 2, 3, 4), warmup=2, samples=4, drift_window=2)
    assert (run.last_value, run.latencies_ms) == (5, (1.0, 2.0, 3.0, 4.0))
    assert run.latency == summarize_latency(run.latencies_ms)
    assert run.throughput_per_second == approx(400.0)
    assert run.drift == DriftSummary(2, 1.5, 3.5, approx(400 / 3))
    assert run.telemetry is None


def test_telemetry_before_during_and_after() -> None:
    """V12: the source is read before, on a thread of its own at the interval, and after; offsets grow."""
    source = Source(enough=4)  # one before, three meanwhile
    last = iter([False, True])

    def request() -> int:
        if next(last):
            assert source.enough.wait(WAIT_S)
        return 1

    run = measure_requests(
        request, timer=Clock(1, 1), warmup=0, samples=2, telemetry=source, telemetry_interval_seconds=0.01
    )
    trace = run.telemetry
    assert trace is not None
    assert len(trace.periodic) >= 3
    assert set(source.threads[1:-1]) == {"pixtreme.infer telemetry"}
    assert source.threads[0] == source.threads[-1] == threading.current_thread().name
    offsets = [sample.offset_seconds for sample in (trace.before, *trace.periodic, trace.after)]
    assert offsets == sorted(offsets)
    assert all(
        offset >= 0.01 * (index + 1) for index, offset in enumerate(offsets[1:-1])
    )  # the k-th is due at k * 0.01
    assert trace.before.timestamp_utc.utcoffset() == timedelta(0)


def test_slow_samples_do_not_make_the_interval_drift() -> None:
    """V12: due times are multiples of the interval: one slow sample leaves samples out and shifts none."""
    source = Source(enough=5)
    slow = iter([False, True, False, False, False, False])
    original = source.sample

    def sample() -> TelemetrySample:
        if next(slow, False):
            threading.Event().wait(0.125)  # the device answers slowly: that is what this test is about
        return original()

    source.sample = sample  # type: ignore[method-assign]
    run = measure_requests(
        lambda: source.enough.wait(WAIT_S),
        timer=Clock(1),
        warmup=0,
        samples=1,
        telemetry=source,
        telemetry_interval_seconds=0.05,
    )
    assert run.telemetry is not None
    first, second = run.telemetry.periodic[:2]
    assert first.offset_seconds >= 0.05
    assert second.offset_seconds >= 0.2  # the slow one, begun at 0.05 or later, outlasted 0.10 and 0.15


def test_failing_before_starts_no_request() -> None:
    """V12: a source that fails at once fails the run before the first measured request."""
    done: list[int] = []
    with pytest.raises(VerificationExecutionError, match="board is gone") as caught:
        measure_requests(lambda: done.append(1), timer=Clock(1), warmup=0, samples=1, telemetry=Source(fail_at=0))
    assert isinstance(caught.value.__cause__, LookupError)
    assert done == []


def test_failing_half_way_stops_the_run() -> None:
    """V12: a provider's failure stops the run: no further request is started."""
    source, done = Source(fail_at=2), []

    def request() -> None:
        done.append(1)
        if len(done) == 3:
            assert source.failed.wait(WAIT_S)
            for thread in threading.enumerate():
                if thread.name == "pixtreme.infer telemetry":
                    thread.join(WAIT_S)

    with pytest.raises(VerificationExecutionError, match="board is gone"):
        measure_requests(
            request, timer=Clock(*[1] * 99), warmup=0, samples=99, telemetry=source, telemetry_interval_seconds=0.01
        )
    assert len(done) == 3


def test_both_failures_come_together() -> None:
    """V12: a request's failure and the provider's come in one group; a request's alone comes as it is."""
    source = Source(fail_at=1)

    def request() -> None:
        assert source.failed.wait(WAIT_S)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        measure_requests(
            request, timer=Clock(1), warmup=0, samples=1, telemetry=source, telemetry_interval_seconds=0.01
        )
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError, VerificationExecutionError]
    with pytest.raises(ZeroDivisionError):
        measure_requests(lambda: 1 / 0, timer=Clock(1), warmup=0, samples=1, telemetry=Source())


def test_failing_after_fails_the_run() -> None:
    """V12: the last sample counts as much as the first."""
    with pytest.raises(VerificationExecutionError, match="board is gone"):
        measure_requests(lambda: 1, timer=Clock(1), warmup=0, samples=1, telemetry=Source(fail_at=1))


@pytest.mark.parametrize(
    "stamp", [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=9)))], ids=["naive", "local"]
)
def test_timestamps_are_utc(stamp: datetime) -> None:
    """V12: a time without a zone, or in another one, is the provider's failure."""
    source = Source()
    source.sample = lambda: TelemetrySample(stamp, 0.0, "test", "board", {})  # type: ignore[method-assign]
    with pytest.raises(VerificationExecutionError, match="aware time in UTC"):
        measure_requests(lambda: 1, timer=Clock(1), warmup=0, samples=1, telemetry=source)


GOOD: dict[str, Any] = {"request": lambda: 1, "timer": WallTimer(), "warmup": 0, "samples": 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request", 1),
        ("timer", None),
        ("warmup", -1),
        ("warmup", True),
        ("samples", 0),
        ("samples", 2.0),
        ("drift_window", 3),
        ("telemetry_interval_seconds", 0),
        ("telemetry_interval_seconds", float("nan")),
    ],
)
def test_malformed_runs(field: str, value: Any) -> None:
    """V12: a malformed argument is refused by name before any request."""
    done: list[int] = []
    arguments = GOOD | {"request": lambda: done.append(1)} | {field: value}
    with pytest.raises(VerificationInputError, match=field):
        measure_requests(arguments.pop("request"), **arguments)
    assert done == []


def test_timers_on_a_context() -> None:
    """V12: device time through events and host time, of a request that returns a handle; both see the work."""
    array = np.ones((256, 256), np.float32)
    with StreamContext.open("cpu", timing=True) as context:
        for timer in (EventTimer(context), WallTimer()):
            run = measure_requests(lambda: context.submit(doubled, context, array), timer=timer, warmup=1, samples=5)
            assert run.last_value.done()
            assert run.latency.minimum_ms > 0
    with StreamContext.open("cpu") as untimed, pytest.raises(ContextError, match="timing=True"):
        EventTimer(untimed)
    with pytest.raises(VerificationInputError, match="StreamContext"):
        EventTimer(None)  # type: ignore[arg-type]


@pytest.mark.network
@pytest.mark.parametrize("telemetry", [None, "present", "failing"])
def test_measuring_the_real_network(network: Path, telemetry: str | None) -> None:
    """V12: the real network on a stream, with telemetry absent, present, and failing half-way."""
    source = None if telemetry is None else Source(fail_at=2 if telemetry == "failing" else -1)
    with StreamContext.open("cpu", timing=True) as context:
        upscale = context.bind(FACTORY.graph_factory(), OnnxArtifact(network), precision="fp32", input_hw=HW)
        request = photograph()

        def measure() -> Any:
            return measure_requests(
                lambda: upscale(request),
                timer=EventTimer(context),
                warmup=1,
                samples=6,
                drift_window=3,
                telemetry=source,
                telemetry_interval_seconds=0.002,
            )

        if telemetry == "failing":
            with pytest.raises(VerificationExecutionError, match="board is gone"):
                measure()
            return
        run = measure()
        assert run.last_value.result().shape == (4 * HW[0], 4 * HW[1], 3)
        assert run.drift is not None
        assert run.throughput_per_second == approx(6000 / sum(run.latencies_ms))
        assert (run.telemetry is None) == (telemetry is None)
        if run.telemetry is not None:
            assert len(run.telemetry.periodic) >= 1
