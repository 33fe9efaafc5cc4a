"""Streams, events and capture against a sequential oracle (S27-S30), with Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field

from helpers import Boom, fail
from hypothesis import given, settings
from hypothesis import strategies as st

from pixtreme.infer.runtimes.host import RUNTIME, HostEvent, HostRuntimeError, HostStream

STREAMS, EVENTS = 3, 3
streams = st.integers(0, STREAMS - 1)
events = st.integers(0, EVENTS - 1)
commands = st.lists(
    st.one_of(
        st.tuples(st.just("task"), streams, st.integers(0, 999)),
        st.tuples(st.just("record"), streams, events),
        st.tuples(st.just("wait"), streams, events),
        st.tuples(st.just("fault"), streams, st.just(0)),
    ),
    max_size=40,
)


@dataclass
class Oracle:
    """What CUDA's rules say must have happened when everything is over: happens-before as sets of task numbers."""

    before: list[set[int]] = field(default_factory=lambda: [set() for _ in range(STREAMS)])
    faulted: list[bool] = field(default_factory=lambda: [False] * STREAMS)
    events: list[tuple[set[int], bool] | None] = field(default_factory=lambda: [None] * EVENTS)
    tasks: dict[int, tuple[int, set[int]]] = field(default_factory=dict)

    def apply(self, kind: str, stream: int, argument: int) -> None:
        if kind == "task" and not self.faulted[stream]:
            number = len(self.tasks)
            self.tasks[number] = argument, set(self.before[stream])
            self.before[stream].add(number)
        elif kind == "fault":
            self.faulted[stream] = True
        elif kind == "record":
            self.events[argument] = set(self.before[stream]), self.faulted[stream]
        elif kind == "wait" and (point := self.events[argument]) is not None:
            self.before[stream] |= point[0]
            self.faulted[stream] |= point[1]


@settings(max_examples=150, deadline=None)
@given(commands)
def test_eager_programs(program: list[tuple[str, int, int]]) -> None:
    """S28, S30: every task the rules allow ran, none other, and after all that the rules order before it."""
    native = [RUNTIME.create_stream(priority=0) for _ in range(STREAMS)]
    marks = [RUNTIME.create_event() for _ in range(EVENTS)]
    oracle, ran = Oracle(), []
    for kind, stream, argument in program:
        before = len(oracle.tasks)
        oracle.apply(kind, stream, argument)
        _issue(native, marks, kind, stream, argument, lambda number=before: ran.append(number))
    for index, member in enumerate(native):
        try:
            member.synchronize()
        except HostRuntimeError as error:
            assert oracle.faulted[index]
            assert isinstance(error.__cause__, Boom)
        else:
            assert not oracle.faulted[index]
        RUNTIME.destroy_stream(member)
    position = {number: place for place, number in enumerate(ran)}
    assert set(position) == set(oracle.tasks)
    for number, (_, predecessors) in oracle.tasks.items():
        assert all(position[predecessor] < position[number] for predecessor in predecessors)


def _issue(
    native: list[HostStream], marks: list[HostEvent], kind: str, stream: int, argument: int, task: object
) -> None:
    if kind == "task":
        native[stream].enqueue(task)  # type: ignore[arg-type]
    elif kind == "fault":
        native[stream].enqueue(fail)
    elif kind == "record":
        RUNTIME.record(marks[argument], native[stream])
    else:
        RUNTIME.wait(native[stream], marks[argument])


captured = st.lists(
    st.one_of(
        st.tuples(st.just("task"), streams, st.just(0)),
        st.tuples(st.just("record"), streams, events),
        st.tuples(st.just("wait"), streams, events),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(captured)
def test_captured_programs(program: list[tuple[str, int, int]]) -> None:
    """S29: a captured program replays in an order its dependencies allow; an unjoined fork fails the capture."""
    native = [RUNTIME.create_stream(priority=0) for _ in range(STREAMS)]
    marks: list[HostEvent] = [RUNTIME.create_event() for _ in range(EVENTS)]
    members, oracle, ran = {0}, Oracle(), []
    recorded: set[int] = set()
    RUNTIME.begin_capture(native[0])
    for kind, stream, argument in program:
        if kind == "wait" and argument in recorded:
            members.add(stream)
        elif stream not in members:
            continue  # outside the capture it would run at once: not this test's program
        if kind == "record":
            recorded.add(argument)
        before = len(oracle.tasks)
        oracle.apply(kind, stream, argument)
        _issue(native, marks, kind, stream, argument, lambda number=before: ran.append(number))
    unjoined = set(oracle.tasks) - oracle.before[0]
    try:
        graph = RUNTIME.end_capture(native[0])
    except HostRuntimeError as error:
        assert error.status == 904
        assert unjoined
    else:
        assert not unjoined
        assert RUNTIME.node_count(graph) == len(oracle.tasks)
        for launch in range(2):
            RUNTIME.launch(graph, native[0])
            native[0].synchronize()
            replayed = ran[launch * len(oracle.tasks) :]
            assert sorted(replayed) == sorted(oracle.tasks)
            for number, (_, predecessors) in oracle.tasks.items():
                assert all(replayed.index(one) < replayed.index(number) for one in predecessors)
    for member in native:
        assert not RUNTIME.is_capturing(member)
        RUNTIME.destroy_stream(member)
