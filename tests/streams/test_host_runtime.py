"""The host runtime keeps CUDA's semantics: streams, events, capture, faults (S27-S30)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from helpers import WAIT_S, Boom, Gate, fail

from pixtreme.infer.runtimes import Runtime, StreamKey
from pixtreme.infer.runtimes.host import RUNTIME, HostGraph, HostRuntimeError, HostStream
from pixtreme.infer.streams import _captures as captures


@pytest.fixture
def streams() -> Iterator[tuple[HostStream, HostStream]]:
    pair = RUNTIME.create_stream(priority=0), RUNTIME.create_stream(priority=0)
    yield pair
    for stream in pair:
        RUNTIME.destroy_stream(stream)


@pytest.fixture
def held(streams: tuple[HostStream, HostStream]) -> Iterator[Gate]:
    """The first stream stands at a gate."""
    gate = Gate()
    streams[0].enqueue(gate.wait)
    yield gate
    gate.open()


def test_it_is_a_runtime() -> None:
    """The host runtime satisfies the protocol the CUDA adapter will implement (S26 comes with that)."""
    runtime: Runtime = RUNTIME
    assert runtime.device == "cpu"


def test_tasks_run_in_order_on_one_thread(streams: tuple[HostStream, HostStream]) -> None:
    """S27: one worker thread a stream takes tasks in order."""
    seen: list[tuple[int, str]] = []
    for number in range(100):
        streams[0].enqueue(lambda number=number: seen.append((number, str(threading.get_ident()))))
    streams[0].synchronize()
    assert [number for number, _ in seen] == list(range(100))
    assert len({thread for _, thread in seen}) == 1
    assert str(threading.get_ident()) not in {thread for _, thread in seen}


def test_streams_overlap(streams: tuple[HostStream, HostStream]) -> None:
    """S27: tasks of two streams really run at the same time: each waits for the other."""
    meeting = threading.Barrier(2, timeout=WAIT_S)
    for stream in streams:
        stream.enqueue(meeting.wait)
    for stream in streams:
        stream.synchronize()


def test_unrecorded_event_is_complete(streams: tuple[HostStream, HostStream]) -> None:
    """S28: an event never recorded counts as complete, and waiting for it is a no-op."""
    event = RUNTIME.create_event()
    assert RUNTIME.query(event)
    RUNTIME.synchronize(event)
    RUNTIME.wait(streams[0], event)
    streams[0].synchronize()


def test_event_is_honest(streams: tuple[HostStream, HostStream], held: Gate) -> None:
    """S28, C23: not complete before, complete after; a query does not block; a waiting stream has not started."""
    event = RUNTIME.create_event()
    RUNTIME.record(event, streams[0])
    started = threading.Event()
    RUNTIME.wait(streams[1], event)
    streams[1].enqueue(started.set)
    held.wait_until_reached()
    assert not RUNTIME.query(event)
    assert not started.is_set()
    held.open()
    RUNTIME.synchronize(event)
    assert RUNTIME.query(event)
    assert started.wait(WAIT_S)


def test_wait_binds_to_the_record_before_it(streams: tuple[HostStream, HostStream]) -> None:
    """S28, C23: recording again does not disturb an earlier wait, which refers to the record before it."""
    first, second = Gate(), Gate()
    event = RUNTIME.create_event()
    passed = threading.Event()
    streams[0].enqueue(first.wait)
    RUNTIME.record(event, streams[0])
    RUNTIME.wait(streams[1], event)
    RUNTIME.wait(streams[1], event)  # waiting twice is fine
    streams[1].enqueue(passed.set)
    streams[0].enqueue(second.wait)
    RUNTIME.record(event, streams[0])
    try:
        first.open()
        assert passed.wait(WAIT_S)
        second.wait_until_reached()
        assert not RUNTIME.query(event)  # the event itself means its last record
    finally:
        first.open()
        second.open()
    streams[0].synchronize()


def test_fault_skips_later_work_and_reaches_dependants(streams: tuple[HostStream, HostStream]) -> None:
    """S30: later tasks are skipped, later events fault, a waiting stream faults too."""
    ran: list[str] = []
    before, after = RUNTIME.create_event(), RUNTIME.create_event()
    RUNTIME.record(before, streams[0])
    streams[0].enqueue(fail)
    streams[0].enqueue(ran.append, "same stream")
    RUNTIME.record(after, streams[0])
    RUNTIME.wait(streams[1], after)
    streams[1].enqueue(ran.append, "dependant")
    for stream in streams:
        with pytest.raises(HostRuntimeError, match="719.*boom") as raised:
            stream.synchronize()
        assert isinstance(raised.value.__cause__, Boom)
    assert RUNTIME.query(before)  # what was over before the fault stays complete
    with pytest.raises(HostRuntimeError):
        RUNTIME.query(after)
    assert ran == []


def test_independent_stream_survives_a_fault(streams: tuple[HostStream, HostStream]) -> None:
    """S30: contexts that do not depend on a fault go on."""
    streams[0].enqueue(fail)
    with pytest.raises(HostRuntimeError):
        streams[0].synchronize()
    ran = threading.Event()
    streams[1].enqueue(ran.set)
    streams[1].synchronize()
    assert ran.is_set()


def test_reports_come_in_stream_order_on_the_worker(streams: tuple[HostStream, HostStream]) -> None:
    """S21: completions are reported in stream order, on the stream's own thread: no second hop."""
    reports: list[tuple[int, bool]] = []
    for number in range(50):
        event = RUNTIME.create_event()
        RUNTIME.record(event, streams[0])

        def notify(_: BaseException | None, number: int = number) -> None:
            reports.append((number, RUNTIME.reports_here(streams[0])))

        RUNTIME.report(event, streams[0], notify)
    streams[0].synchronize()
    assert reports == [(number, True) for number in range(50)]
    assert not RUNTIME.reports_here(streams[0])


def test_elapsed_time(streams: tuple[HostStream, HostStream]) -> None:
    """S13: elapsed milliseconds need two complete timing events; anything else is an error with CUDA's code."""
    plain, start, end = (RUNTIME.create_event(timing=timing) for timing in (False, True, True))
    with pytest.raises(HostRuntimeError) as raised:
        RUNTIME.elapsed_ms(start, end)
    assert raised.value.status == 400
    gate = Gate()
    RUNTIME.record(start, streams[0])
    streams[0].enqueue(gate.wait)
    RUNTIME.record(end, streams[0])
    try:
        with pytest.raises(HostRuntimeError) as raised:
            RUNTIME.elapsed_ms(start, end)
        assert raised.value.status == 600
    finally:
        gate.open()
    streams[0].synchronize()
    assert RUNTIME.elapsed_ms(start, end) > 0
    with pytest.raises(HostRuntimeError):
        RUNTIME.elapsed_ms(plain, end)


def test_a_task_may_not_call_the_runtime(streams: tuple[HostStream, HostStream]) -> None:
    """S27: a task that waited for its own stream would never end; it is refused with CUDA's code 800."""
    codes: list[int] = []

    def task() -> None:
        calls: list[Callable[[], object]] = [streams[0].synchronize, lambda: streams[1].enqueue(int)]
        for call in calls:
            try:
                call()
            except HostRuntimeError as error:
                codes.append(error.status)

    streams[0].enqueue(task)
    streams[0].synchronize()
    assert codes == [800, 800]


def test_destroyed_stream_runs_what_it_has_and_takes_no_more() -> None:
    """S3, C14: destroying drops nothing; the code after it is CUDA's 400 for ever."""
    stream = RUNTIME.create_stream(priority=0)
    gate, ran = Gate(), threading.Event()
    stream.enqueue(gate.wait)
    stream.enqueue(ran.set)
    RUNTIME.destroy_stream(stream)
    RUNTIME.destroy_stream(stream)
    with pytest.raises(HostRuntimeError) as raised:
        stream.enqueue(int)
    assert raised.value.status == 400
    gate.open()
    assert ran.wait(WAIT_S)


def test_pointers_are_never_reused() -> None:
    """S33: a stream's identity is (device, pointer, generation); the host never hands a pointer out twice."""
    keys: set[StreamKey] = set()
    for _ in range(50):
        stream = RUNTIME.create_stream(priority=0)
        keys.add(RUNTIME.key(stream))
        RUNTIME.destroy_stream(stream)
    assert len(keys) == 50
    assert not {0, 1, 2} & {key.pointer for key in keys}


class TestCapture:
    """S29: capture follows CUDA."""

    def test_records_instead_of_running_and_replays(self, streams: tuple[HostStream, HostStream]) -> None:
        """S29: while a stream captures, enqueue records; one launch replays all, as often as wanted."""
        ran: list[int] = []
        RUNTIME.begin_capture(streams[0])
        assert RUNTIME.is_capturing(streams[0])
        streams[0].enqueue(ran.append, 1)
        streams[0].enqueue(ran.append, 2)
        graph = RUNTIME.end_capture(streams[0])
        streams[0].synchronize()
        assert ran == []
        assert RUNTIME.node_count(graph) == 2
        for _ in range(3):
            RUNTIME.launch(graph, streams[0])
        streams[0].synchronize()
        assert ran == [1, 2] * 3

    def test_fork_and_join(self, streams: tuple[HostStream, HostStream]) -> None:
        """S29: waiting for a captured event pulls the other stream in, and waiting back joins it."""
        main, side = streams
        ran: list[str] = []
        fork, join = RUNTIME.create_event(), RUNTIME.create_event()
        RUNTIME.begin_capture(main)
        main.enqueue(ran.append, "before")
        RUNTIME.record(fork, main)
        RUNTIME.wait(side, fork)
        assert RUNTIME.is_capturing(side)
        side.enqueue(ran.append, "side")
        RUNTIME.record(join, side)
        RUNTIME.wait(main, join)
        main.enqueue(ran.append, "after")
        graph = RUNTIME.end_capture(main)
        assert not RUNTIME.is_capturing(side)
        RUNTIME.launch(graph, main)
        main.synchronize()
        assert ran == ["before", "side", "after"]

    def test_unjoined_fork_is_an_error(self, streams: tuple[HostStream, HostStream]) -> None:
        """S29: a fork that is not joined at the end is an error, and both streams leave the capture."""
        main, side = streams
        fork = RUNTIME.create_event()
        RUNTIME.begin_capture(main)
        RUNTIME.record(fork, main)
        RUNTIME.wait(side, fork)
        side.enqueue(int)
        with pytest.raises(HostRuntimeError) as raised:
            RUNTIME.end_capture(main)
        assert raised.value.status == 904
        self._both_work(streams)

    @pytest.mark.parametrize("violation", ["synchronize", "query", "wait on event", "nested", "launch", "foreign work"])
    def test_violation_invalidates(self, streams: tuple[HostStream, HostStream], violation: str) -> None:
        """S29, S35: a call that is not allowed raises and invalidates; ending raises too; nothing sticks."""
        main, side = streams
        captured, eager = RUNTIME.create_event(), RUNTIME.create_event()
        RUNTIME.record(eager, side)
        RUNTIME.begin_capture(main)
        main.enqueue(int)
        RUNTIME.record(captured, main)
        forbidden: dict[str, Callable[[], object]] = {
            "synchronize": lambda: main.synchronize(),
            "query": lambda: RUNTIME.query(captured),
            "wait on event": lambda: RUNTIME.synchronize(captured),
            "nested": lambda: RUNTIME.begin_capture(main),
            "launch": lambda: RUNTIME.launch(HostGraph(()), main),
            "foreign work": lambda: RUNTIME.wait(main, eager),
        }
        with pytest.raises(HostRuntimeError) as raised:
            forbidden[violation]()
        assert 900 <= raised.value.status <= 907
        with pytest.raises(HostRuntimeError) as raised:
            main.enqueue(int)
        assert raised.value.status == 901
        with pytest.raises(HostRuntimeError) as raised:
            RUNTIME.end_capture(main)
        assert raised.value.status == 901
        self._both_work(streams)

    def test_merging_two_captures_and_ending_elsewhere(self, streams: tuple[HostStream, HostStream]) -> None:
        """S29: two captures do not merge, and only the stream that began a capture ends it."""
        main, side = streams
        event = RUNTIME.create_event()
        RUNTIME.begin_capture(main)
        RUNTIME.begin_capture(side)
        RUNTIME.record(event, main)
        with pytest.raises(HostRuntimeError) as raised:
            RUNTIME.wait(side, event)
        assert raised.value.status == 902
        with pytest.raises(HostRuntimeError):
            RUNTIME.end_capture(side)
        RUNTIME.wait(side, event)  # outside a capture now: this forks
        with pytest.raises(HostRuntimeError) as raised:
            RUNTIME.end_capture(side)
        assert raised.value.status == 903
        with pytest.raises(HostRuntimeError):
            RUNTIME.end_capture(main)
        self._both_work(streams)

    def test_event_of_an_ended_capture(self, streams: tuple[HostStream, HostStream]) -> None:
        """S29: an event last recorded in a capture says nothing afterwards, until it is recorded again."""
        event = RUNTIME.create_event()
        RUNTIME.begin_capture(streams[0])
        RUNTIME.record(event, streams[0])
        RUNTIME.end_capture(streams[0])
        calls: list[Callable[[], object]] = [lambda: RUNTIME.query(event), lambda: RUNTIME.wait(streams[1], event)]
        for call in calls:
            with pytest.raises(HostRuntimeError) as raised:
                call()
            assert raised.value.status == 907
        RUNTIME.record(event, streams[0])
        RUNTIME.synchronize(event)

    def test_end_without_begin(self, streams: tuple[HostStream, HostStream]) -> None:
        """S29: ending what did not begin is an error."""
        with pytest.raises(HostRuntimeError):
            RUNTIME.end_capture(streams[0])

    def test_fault_in_a_graph(self, streams: tuple[HostStream, HostStream]) -> None:
        """S30: a node that raises faults the stream it was launched on."""
        RUNTIME.begin_capture(streams[0])
        streams[0].enqueue(fail)
        graph = RUNTIME.end_capture(streams[0])
        RUNTIME.launch(graph, streams[0])
        with pytest.raises(HostRuntimeError, match="boom"):
            streams[0].synchronize()

    @staticmethod
    def _both_work(streams: tuple[HostStream, HostStream]) -> None:
        for stream in streams:
            assert not RUNTIME.is_capturing(stream)
            ran = threading.Event()
            stream.enqueue(ran.set)
            stream.synchronize()
            assert ran.is_set()


def test_launch_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """S32: PIXTREME_INFER_LAUNCH_BLOCKING=1 runs every host task at once in the caller, errors included."""
    monkeypatch.setenv("PIXTREME_INFER_LAUNCH_BLOCKING", "1")
    stream = RUNTIME.create_stream(priority=0)
    threads: list[int] = []
    stream.enqueue(lambda: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()]
    with pytest.raises(Boom):
        stream.enqueue(fail)
    with pytest.raises(HostRuntimeError, match="boom"):
        stream.synchronize()  # the stream is faulted all the same
    RUNTIME.destroy_stream(stream)


def test_deferred_release_waits_for_the_capture(streams: tuple[HostStream, HostStream]) -> None:
    """S34: a release asked for while a capture is open on the device runs once it has ended."""
    ran: list[str] = []
    with captures.open_capture(RUNTIME.key(streams[0]), "a test"):
        captures.release("cpu", lambda: ran.append("same device"))
        captures.release("cuda:0", lambda: ran.append("other device"))
        assert ran == ["other device"]
    assert ran == ["other device", "same device"]


def test_failing_deferred_release_is_logged(log: pytest.FixtureRequest) -> None:
    """S34: what a release raises in a finaliser is logged, never raised into whoever runs."""
    captures.release("cpu", fail)
    assert log.take() == ["a deferred release failed"]  # type: ignore[attr-defined]
