"""The checks of `pixtreme.infer.testing.check_runtime`: one function for each statement about a runtime (S28-S30)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pixtreme.infer.runtimes import NativeStream, Runtime

Fault = Callable[[NativeStream], object]
REPORT_WAIT_S = 20.0


class Skipped(Exception):
    """The check needs something that was not given."""


class Bench:
    """Streams, arrays and latches of one check."""

    def __init__(self, runtime: Runtime, fault: Fault | None) -> None:
        self.runtime = runtime
        self._fault = fault
        self._streams: list[NativeStream] = []
        self._releases: list[Callable[[], object]] = []

    def stream(self) -> NativeStream:
        self._streams.append(self.runtime.create_stream(priority=0))
        self.runtime.attach(self._streams[-1])
        return self._streams[-1]

    def hold(self, stream: NativeStream) -> Callable[[], object]:
        self._releases.append(self.runtime.hold(stream))
        return self._releases[-1]

    def array(self, value: float) -> Any:
        put_back = self.runtime.activate(self._streams[0] if self._streams else self.stream())
        try:
            array = self.runtime.empty((4,), np.dtype(np.float32))
            self.runtime.from_host(array, np.full(4, value, np.float32))
        finally:
            put_back()
        return array

    def recorded(self, stream: NativeStream, *, timing: bool = False) -> Any:
        event = self.runtime.create_event(timing=timing)
        self.runtime.record(event, stream)
        return event

    def finish(self, stream: NativeStream) -> None:
        """Wait for the stream, for a bounded time: a broken runtime must not hang the suite."""
        assert self.watch(stream, self.recorded(stream))() is None

    def watch(self, stream: NativeStream, event: Any) -> Callable[[], BaseException | None]:
        """Ask for the report of an event just recorded; the answer waits for it and returns the fault."""
        over, faults = threading.Event(), []

        def notify(fault: BaseException | None) -> None:
            faults.append(fault)
            over.set()

        def outcome() -> BaseException | None:
            assert over.wait(REPORT_WAIT_S), "the stream did not finish"
            (fault,) = faults
            return fault

        self.runtime.report(event, stream, notify)
        self.runtime.ensure_reporting(stream)
        return outcome

    def value(self, array: Any) -> float:
        return float(self.runtime.to_host(array)[0])

    def break_stream(self, stream: NativeStream) -> None:
        if self._fault is None:
            raise Skipped("no way to fault a stream was given")
        self._fault(stream)

    @contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        for release in self._releases:
            release()
        for stream in self._streams:
            try:
                if self.runtime.is_capturing(stream):
                    self.runtime.end_capture(stream)
            except Exception:
                pass  # a check failed or broke the device: what counts is that the streams go
            self.runtime.detach(stream)
            self.runtime.destroy_stream(stream)


def _status(call: Callable[..., object], *args: Any) -> int | None:
    """Return CUDA's code of the error a call raises, 0 where it raises none, None where the error has none."""
    try:
        call(*args)
    except Exception as error:
        return getattr(error, "status", None)
    return 0


CHECKS: dict[str, tuple[str, Callable[[Bench], None]]] = {}


def _check(rule: str, statement: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    def add(body: Callable[[Bench], None]) -> Callable[[Bench], None]:
        CHECKS[statement] = (rule, body)
        return body

    return add


@_check("S28", "an event never recorded counts as complete")
def _unrecorded(bench: Bench) -> None:
    stream, event = bench.stream(), bench.runtime.create_event()
    assert bench.runtime.query(event)
    bench.runtime.synchronize(event)
    bench.runtime.wait(stream, event)
    bench.finish(stream)


@_check("S28", "a query does not block, and tells pending from complete")
def _query(bench: Bench) -> None:
    stream = bench.stream()
    release = bench.hold(stream)
    event = bench.recorded(stream)
    assert not bench.runtime.query(event)
    release()
    bench.runtime.synchronize(event)
    assert bench.runtime.query(event)


@_check("S28", "work of a stream runs in order, and after the work it waits for")
def _order(bench: Bench) -> None:
    first, second = bench.stream(), bench.stream()
    one, two, three, target = (bench.array(value) for value in (1, 2, 3, 0))
    release = bench.hold(first)
    bench.runtime.copy(target, one, first)
    bench.runtime.copy(target, two, first)
    bench.runtime.wait(second, bench.recorded(first))
    bench.runtime.copy(target, three, second)
    done = bench.recorded(second)
    assert not bench.runtime.query(done)
    release()
    bench.runtime.synchronize(done)
    assert bench.value(target) == 3


@_check("S28", "recording again does not disturb an earlier wait")
def _record_again(bench: Bench) -> None:
    held, free, waiting = bench.stream(), bench.stream(), bench.stream()
    release = bench.hold(held)
    event = bench.recorded(held)
    bench.runtime.wait(waiting, event)
    bench.runtime.record(event, free)
    bench.runtime.synchronize(event)
    done = bench.recorded(waiting)
    assert not bench.runtime.query(done)
    release()
    bench.runtime.synchronize(done)


@_check("S28", "a wait refers to the last record before it, and waiting twice is fine")
def _wait_refers_back(bench: Bench) -> None:
    held, free, waiting = bench.stream(), bench.stream(), bench.stream()
    release = bench.hold(held)
    event = bench.recorded(free)
    bench.runtime.wait(waiting, event)
    bench.runtime.wait(waiting, event)
    bench.runtime.record(event, held)
    bench.finish(waiting)
    release()


@_check("S21", "reports come in stream order, once each, on one thread that is not the caller's")
def _reports(bench: Bench) -> None:
    stream, over = bench.stream(), threading.Event()
    release = bench.hold(stream)
    seen: list[tuple[int, int]] = []
    for number in range(20):
        event = bench.recorded(stream)

        def notify(fault: BaseException | None, number: int = number) -> None:
            seen.append((number, threading.get_ident()))
            if number == 19:
                over.set()

        bench.runtime.report(event, stream, notify)
    bench.runtime.ensure_reporting(stream)
    assert seen == []
    release()
    assert over.wait(REPORT_WAIT_S)
    assert [number for number, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
    assert not bench.runtime.reports_here(stream)


@_check("S4", "activating a stream makes it current, and what was found is put back")
def _activate(bench: Bench) -> None:
    runtime, first, second = bench.runtime, bench.stream(), bench.stream()
    put_back = runtime.activate(first)
    inner = runtime.activate(second)
    assert runtime.key(runtime.current()) == runtime.key(second) != runtime.key(first)
    inner()
    assert runtime.key(runtime.current()) == runtime.key(first)
    put_back()
    assert runtime.is_stream(first)
    assert not runtime.is_event(first)
    assert runtime.is_event(bench.recorded(first))


@_check("S13", "elapsed time needs timing events that are complete")
def _elapsed(bench: Bench) -> None:
    stream = bench.stream()
    first, plain = bench.recorded(stream, timing=True), bench.recorded(stream)
    release = bench.hold(stream)
    last = bench.recorded(stream, timing=True)
    assert _status(bench.runtime.elapsed_ms, first, last) == 600
    release()
    bench.runtime.synchronize(last)
    assert bench.runtime.elapsed_ms(first, last) >= 0
    assert _status(bench.runtime.elapsed_ms, first, plain) == 400


@_check("S29", "a capture records instead of running, and a graph is replayed as often as wanted")
def _capture(bench: Bench) -> None:
    runtime, stream = bench.runtime, bench.stream()
    source, target = bench.array(1), bench.array(0)
    runtime.begin_capture(stream)
    assert runtime.is_capturing(stream)
    runtime.copy(target, source, stream)
    graph = runtime.end_capture(stream)
    bench.finish(stream)
    assert (runtime.is_capturing(stream), runtime.node_count(graph), bench.value(target)) == (False, 1, 0)
    for value in (5.0, 6.0):
        runtime.from_host(source, np.full(4, value, np.float32))
        runtime.launch(graph, stream)
        bench.finish(stream)
        assert bench.value(target) == value


@_check("S29", "an empty capture has no nodes")
def _empty_capture(bench: Bench) -> None:
    stream = bench.stream()
    bench.runtime.begin_capture(stream)
    assert bench.runtime.node_count(bench.runtime.end_capture(stream)) == 0


@_check("S29", "a wait pulls another stream into the capture, and a join brings it back")
def _fork_and_join(bench: Bench) -> None:
    runtime, stream, fork = bench.runtime, bench.stream(), bench.stream()
    source, middle, target = bench.array(7), bench.array(0), bench.array(0)
    runtime.begin_capture(stream)
    runtime.copy(middle, source, stream)
    runtime.wait(fork, bench.recorded(stream))
    assert runtime.is_capturing(fork)
    runtime.copy(target, middle, fork)
    runtime.wait(stream, bench.recorded(fork))
    graph = runtime.end_capture(stream)
    assert (runtime.node_count(graph), runtime.is_capturing(fork)) == (2, False)
    runtime.launch(graph, stream)
    bench.finish(stream)
    assert bench.value(target) == 7


@_check("S29", "a fork that is not joined is an error at the end, and the streams are out of the capture")
def _unjoined(bench: Bench) -> None:
    runtime, stream, fork = bench.runtime, bench.stream(), bench.stream()
    source, target = bench.array(7), bench.array(0)
    runtime.begin_capture(stream)
    runtime.wait(fork, bench.recorded(stream))
    runtime.copy(target, source, fork)
    assert _status(runtime.end_capture, stream) == 904
    assert not runtime.is_capturing(stream)
    bench.finish(stream)


def _violation(act: Callable[[Bench, NativeStream], object], code: int) -> Callable[[Bench], None]:
    """A call that a capture does not allow: it has this code, ending the capture raises, the stream works on."""

    def body(bench: Bench) -> None:
        runtime, stream = bench.runtime, bench.stream()
        source, target = bench.array(3), bench.array(0)
        runtime.begin_capture(stream)
        runtime.copy(target, source, stream)
        assert _status(act, bench, stream) == code
        assert _status(runtime.end_capture, stream) == 901
        assert not runtime.is_capturing(stream)
        runtime.copy(target, source, stream)
        bench.finish(stream)
        assert bench.value(target) == 3

    return body


def _wait_for_outside(bench: Bench, stream: NativeStream) -> None:
    other = bench.stream()
    bench.hold(other)
    bench.runtime.wait(stream, bench.recorded(other))


for _statement, _act, _code in (
    ("synchronising a captured event invalidates", lambda b, s: b.runtime.synchronize(b.recorded(s)), 907),
    ("querying a captured event invalidates", lambda b, s: b.runtime.query(b.recorded(s)), 907),
    ("waiting for work outside invalidates", _wait_for_outside, 905),
):
    _check("S29", f"{_statement} the capture")(_violation(_act, _code))


@_check("S30", "a fault stays with the events recorded behind it, and with the streams that wait for them")
def _faults(bench: Bench) -> None:
    runtime, stream, waiting = bench.runtime, bench.stream(), bench.stream()
    before = bench.recorded(stream)
    runtime.synchronize(before)
    release = bench.hold(stream)
    bench.break_stream(stream)
    event = bench.recorded(stream)
    runtime.wait(waiting, event)
    last = bench.recorded(waiting)
    outcome = bench.watch(stream, event)
    release()
    assert isinstance(outcome(), BaseException)
    for broken in (event, last):
        assert _status(runtime.synchronize, broken) != 0
        assert _status(runtime.query, broken) != 0
