"""Telemetry of a device while requests run: samples, and the thread that takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Protocol, Self

from pixtreme.infer.verification.errors import VerificationExecutionError


@dataclass(frozen=True)
class TelemetrySample:
    """What a source read at one moment.

    ``timestamp_utc`` is aware and in UTC; ``offset_seconds`` counts from the start of the run and is set by it (a
    source says 0); ``device`` names the board for good, by UUID where it has one; a value the board does not offer is
    None.
    """

    timestamp_utc: datetime
    offset_seconds: float
    source: str
    device: str
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class TelemetryTrace:
    """The samples of one run: before the first request, at the interval meanwhile, after the last."""

    interval_seconds: float
    before: TelemetrySample
    periodic: tuple[TelemetrySample, ...]
    after: TelemetrySample


class TelemetrySource(Protocol):
    """Where samples come from. It is called from a thread of the run's own as well."""

    def sample(self) -> TelemetrySample:
        """Read the device now."""
        ...


class Sampler:
    """Reads a source now, periodically on a thread while the ``with`` block runs, and once more at `finish`.

    The k-th periodic sample is due k intervals after the start, however long the samples before took; one that is
    missed is left out, not made up for. The first failure ends the thread and is kept in `failure`.
    """

    def __init__(self, source: TelemetrySource, interval_seconds: float) -> None:
        self._source = source
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._before = self._read()
        self._periodic: list[TelemetrySample] = []
        self._thread = threading.Thread(target=self._run, name="pixtreme.infer telemetry", daemon=True)
        self.failure: VerificationExecutionError | None = None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def finish(self) -> TelemetryTrace:
        """Take the last sample and return all of them."""
        return TelemetryTrace(self._interval, self._before, tuple(self._periodic), self._read())

    def _run(self) -> None:
        due = 1
        while not self._stop.wait(max(0.0, self._started + due * self._interval - time.monotonic())):
            try:
                self._periodic.append(self._read())
            except VerificationExecutionError as error:
                self.failure = error
                return
            due = max(due + 1, int((time.monotonic() - self._started) / self._interval) + 1)

    def _read(self) -> TelemetrySample:
        offset = time.monotonic() - self._started
        try:
            sample = self._source.sample()
        except Exception as error:
            raise VerificationExecutionError(
                why="a run with telemetry needs every sample",
                what=f"{self._source!r} failed after {offset:.3f} s: {error!r}",
                how="look at the cause, or measure without telemetry",
            ) from error
        if not isinstance(sample, TelemetrySample) or sample.timestamp_utc.utcoffset() != timedelta(0):
            raise VerificationExecutionError(
                why="telemetry is recorded with a time that means the same everywhere",
                what=f"{self._source!r} returned {sample!r}; accepted is a TelemetrySample with an aware time in UTC",
                how="stamp samples with datetime.now(UTC)",
            )
        return replace(sample, offset_seconds=offset)
