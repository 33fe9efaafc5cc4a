"""Latency of requests one after the other, and the device's telemetry meanwhile."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import ContextError
from pixtreme.infer.streams import EventHandle, StreamContext
from pixtreme.infer.verification.comparison import percentile
from pixtreme.infer.verification.errors import refuse
from pixtreme.infer.verification.nvidia import NvidiaTelemetrySource
from pixtreme.infer.verification.telemetry import Sampler, TelemetrySample, TelemetrySource, TelemetryTrace

__all__ = (
    "TimedRequest",
    "LatencySummary",
    "DriftSummary",
    "TelemetrySample",
    "TelemetryTrace",
    "MeasurementRun",
    "RequestTimer",
    "TelemetrySource",
    "NvidiaTelemetrySource",
    "EventTimer",
    "WallTimer",
    "summarize_latency",
    "calculate_throughput",
    "evaluate_drift",
    "measure_requests",
)


@dataclass(frozen=True)
class TimedRequest[T]:
    """What a request returned, and the milliseconds it took."""

    value: T
    elapsed_ms: float


@dataclass(frozen=True)
class LatencySummary:
    """Latency over all samples, in milliseconds."""

    count: int
    minimum_ms: float
    mean_ms: float
    median_ms: float
    p95_ms: float
    maximum_ms: float
    population_stdev_ms: float


@dataclass(frozen=True)
class DriftSummary:
    """How far the median of the last ``window_size`` samples is from that of the first."""

    window_size: int
    first_median_ms: float
    last_median_ms: float
    absolute_percent: float


@dataclass(frozen=True)
class MeasurementRun[T]:
    """One run: the last request's value, every sample, and what follows from them."""

    last_value: T
    latencies_ms: tuple[float, ...]
    latency: LatencySummary
    throughput_per_second: float
    drift: DriftSummary | None
    telemetry: TelemetryTrace | None


class RequestTimer(Protocol):
    """Runs a request and says how long it took."""

    def measure[T](self, request: Callable[[], T], /) -> TimedRequest[T]:
        """Run ``request`` to its completion once."""
        ...


class WallTimer:
    """Host time from the call until the request is complete; a handle it returns is waited for and stays the value.

    Host synchronization
    --------------------
    `measure` blocks until the handle is complete.
    """

    def measure[T](self, request: Callable[[], T], /) -> TimedRequest[T]:
        """Run ``request`` once; what it raises comes out unchanged."""
        started = time.perf_counter_ns()
        value = request()
        if isinstance(value, EventHandle):
            value.result()
        return TimedRequest(value, (time.perf_counter_ns() - started) / 1e6)


class EventTimer:
    """Device time through events, from before the request to after what it enqueued on the context.

    Parameters
    ----------
    context
        Opened with ``timing=True``; the request enqueues on it.

    Host synchronization
    --------------------
    `measure` blocks until the work is complete.
    """

    def __init__(self, context: StreamContext, /) -> None:
        if not isinstance(context, StreamContext):
            refuse("context", repr(context), "a StreamContext")
        if not context.timing:
            raise ContextError(
                why="device time is the time between two timing events",
                what=f"{context!r} was opened without timing; accepted is one opened with timing=True",
                how="open it with StreamContext.open(..., timing=True), or use WallTimer",
            )
        self._context = context

    def measure[T](self, request: Callable[[], T], /) -> TimedRequest[T]:
        """Run ``request`` once; what it raises comes out unchanged."""
        start = self._context.record()
        value = request()
        end = self._context.record()
        end.result()
        return TimedRequest(value, end.elapsed_ms(start))


def summarize_latency(latencies_ms: Sequence[float], /) -> LatencySummary:
    """Summarise latencies; the percentile interpolates linearly.

    Raises
    ------
    VerificationInputError
        There is none, or one is not positive and finite.
    """
    values = _checked(latencies_ms)
    return LatencySummary(
        len(values),
        min(values),
        statistics.fmean(values),
        statistics.median(values),
        percentile(values, 95),
        max(values),
        statistics.pstdev(values),
    )


def calculate_throughput(latencies_ms: Sequence[float], /) -> float:
    """Return requests per second of requests that ran one after the other.

    Raises
    ------
    VerificationInputError
        As `summarize_latency`.
    """
    values = _checked(latencies_ms)
    return len(values) / (math.fsum(values) / 1000)


def evaluate_drift(samples: Sequence[float], /, *, window_size: int) -> DriftSummary:
    """Compare the first and last ``window_size`` latencies, which must not overlap.

    Raises
    ------
    VerificationInputError
        As `summarize_latency`, or there are fewer than twice ``window_size`` samples.
    """
    values = _checked(samples)
    if not is_positive_int(window_size) or 2 * window_size > len(values):
        refuse("window_size", repr(window_size), f"a positive int up to half of the {len(values)} samples")
    first, last = statistics.median(values[:window_size]), statistics.median(values[-window_size:])
    return DriftSummary(window_size, first, last, abs(last - first) / first * 100)


def measure_requests[T](
    request: Callable[[], T],
    *,
    timer: RequestTimer,
    warmup: int,
    samples: int,
    drift_window: int | None = None,
    telemetry: TelemetrySource | None = None,
    telemetry_interval_seconds: float = 1.0,
) -> MeasurementRun[T]:
    """Run a request again and again on this thread and measure each.

    Parameters
    ----------
    request
        One request; it returns a value or a handle.
    timer
        `EventTimer`, `WallTimer`, or one of the caller's own.
    warmup, samples
        How many requests run unmeasured first, and how many are measured.
    drift_window
        Samples in each window of the drift, at most half of ``samples``; None leaves it out.
    telemetry
        Read before the first measured request, every ``telemetry_interval_seconds`` meanwhile on a thread of its own,
        and after the last.

    Raises
    ------
    VerificationInputError
        An argument is malformed, or the timer gave a latency that is not positive and finite.
    VerificationExecutionError
        The telemetry source failed; no further request was started, the cause is its error.
    ExceptionGroup
        A request failed, and so did telemetry.
    Exception
        What a request raised, unchanged.

    Host synchronization
    --------------------
    Blocks until everything is measured.
    """
    _check_run(request, timer, warmup, samples, drift_window, telemetry_interval_seconds)
    for _ in range(warmup):
        timer.measure(request)
    measured: list[TimedRequest[T]] = []
    trace: TelemetryTrace | None = None
    if telemetry is None:
        _measure(request, timer, samples, measured, lambda: False)
    else:
        sampler = Sampler(telemetry, telemetry_interval_seconds)
        failure: Exception | None = None
        with sampler:
            try:
                _measure(request, timer, samples, measured, lambda: sampler.failure is not None)
            except Exception as error:
                failure = error
        if failure is not None and sampler.failure is not None:
            raise ExceptionGroup("a request and telemetry failed", [failure, sampler.failure])
        if (first := failure or sampler.failure) is not None:
            raise first
        trace = sampler.finish()
    latencies = tuple(_checked([timed.elapsed_ms for timed in measured]))
    drift = None if drift_window is None else evaluate_drift(latencies, window_size=drift_window)
    return MeasurementRun(
        measured[-1].value, latencies, summarize_latency(latencies), calculate_throughput(latencies), drift, trace
    )


def _measure[T](
    request: Callable[[], T],
    timer: RequestTimer,
    samples: int,
    measured: list[TimedRequest[T]],
    stopped: Callable[[], bool],
) -> None:
    for _ in range(samples):
        if stopped():
            return
        timed = timer.measure(request)
        if not isinstance(timed, TimedRequest):
            refuse("timer.measure()", repr(timed), "a TimedRequest")
        if measured:  # only the last value is kept: earlier ones would pile up on the device
            measured[-1] = TimedRequest(None, measured[-1].elapsed_ms)  # type: ignore[arg-type]
        measured.append(timed)


def _check_run(
    request: Any, timer: Any, warmup: Any, samples: Any, drift_window: Any, telemetry_interval_seconds: Any
) -> None:
    if not callable(request):
        refuse("request", repr(request), "a callable without arguments")
    if not callable(getattr(timer, "measure", None)):
        refuse("timer", repr(timer), "an EventTimer, a WallTimer or another RequestTimer")
    if warmup != 0 and not is_positive_int(warmup):
        refuse("warmup", repr(warmup), "an int from 0")
    if not is_positive_int(samples):
        refuse("samples", repr(samples), "a positive int")
    if drift_window is not None and (not is_positive_int(drift_window) or 2 * drift_window > samples):
        refuse("drift_window", repr(drift_window), f"None, or a positive int up to half of samples={samples}")
    if not _is_positive(telemetry_interval_seconds):
        refuse("telemetry_interval_seconds", repr(telemetry_interval_seconds), "a positive finite number")


def _checked(values: Sequence[float]) -> list[float]:
    if not isinstance(values, Sequence) or not values:
        refuse("latencies", repr(values), "a nonempty sequence of milliseconds")
    for value in values:
        if not _is_positive(value):
            refuse("a latency", repr(value), "a positive finite number of milliseconds")
    return [float(value) for value in values]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
