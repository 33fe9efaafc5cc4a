"""Graph capture on the host runtime: what a stream records while it captures, and the graph that comes out (S29).

Fork and join follow CUDA: a stream that waits for an event recorded in a capture joins that capture; at the end its
work must be reachable from the stream that began, or the capture fails. A graph is replayed in the order of capture,
one node after the other, which is one of the orders its dependencies allow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, NoReturn, Protocol


class HostRuntimeError(RuntimeError):
    """A verb of the host runtime failed; ``status`` is the code CUDA gives in the same case."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"host runtime error {status}: {detail}")
        self.status = status
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.detail)


class Work(NamedTuple):
    """A task and its arguments: one node."""

    task: Callable[..., object]
    args: tuple[Any, ...]

    def run(self) -> None:
        self.task(*self.args)


class CaptureStatus(Enum):
    """Where a capture stands."""

    ACTIVE = "active"  #: work is recorded
    INVALIDATED = "invalidated"  #: a call that is not allowed was made; ending raises
    ENDED = "ended"  #: no stream takes part any more


_TRANSITIONS: dict[tuple[CaptureStatus, str], CaptureStatus] = {
    (CaptureStatus.ACTIVE, "violate"): CaptureStatus.INVALIDATED,
    (CaptureStatus.INVALIDATED, "violate"): CaptureStatus.INVALIDATED,
    (CaptureStatus.ACTIVE, "end"): CaptureStatus.ENDED,
    (CaptureStatus.INVALIDATED, "end"): CaptureStatus.ENDED,
}


def fire(status: CaptureStatus, event: str) -> CaptureStatus:
    """Return the status after an event; an unknown pair is a KeyError and changes nothing."""
    return _TRANSITIONS[status, event]


class CapturingStream(Protocol):
    """A stream, as far as a capture knows it."""

    capture: Capture | None


class Snapshot(NamedTuple):
    """An event's record inside a capture: the nodes it stands behind."""

    capture: Capture
    frontier: frozenset[int]


class HostGraph:
    """Captured work, ready to be launched as often as wanted."""

    def __init__(self, nodes: tuple[Work, ...]) -> None:
        self.nodes = nodes

    def run(self) -> None:
        for work in self.nodes:
            work.run()


class Capture:
    """One capture: its nodes, and the frontier of each stream that takes part."""

    def __init__(self, origin: CapturingStream) -> None:
        self.status = CaptureStatus.ACTIVE
        self._reason = ""
        self._origin = origin
        self._nodes: list[tuple[Work, frozenset[int]]] = []
        self._frontiers: dict[CapturingStream, frozenset[int]] = {origin: frozenset()}
        self._lock = threading.RLock()
        origin.capture = self

    def add(self, stream: CapturingStream, work: Work) -> None:
        """Record one task of ``stream``."""
        with self._lock:
            self._check_active()
            self._nodes.append((work, self._frontiers[stream]))
            self._frontiers[stream] = frozenset((len(self._nodes) - 1,))

    def snapshot(self, stream: CapturingStream) -> Snapshot:
        """Record an event on ``stream``."""
        with self._lock:
            self._check_active()
            return Snapshot(self, self._frontiers[stream])

    def join(self, stream: CapturingStream, frontier: frozenset[int]) -> None:
        """Make ``stream`` wait for ``frontier``: a fork where it was outside, a join where it was part."""
        with self._lock:
            self._check_active()
            self._frontiers[stream] = self._frontiers.get(stream, frozenset()) | frontier
            stream.capture = self

    def violate(self, reason: str, *, status: int) -> NoReturn:
        """Invalidate the capture and raise."""
        with self._lock:
            if self.status is not CaptureStatus.ENDED:
                self.status = fire(self.status, "violate")
                self._reason = self._reason or reason
        raise HostRuntimeError(status, reason)

    def end(self, stream: CapturingStream) -> HostGraph:
        """Take every stream out of the capture and return the graph, or raise why there is none."""
        with self._lock:
            if stream is not self._origin:
                self.violate("end of a capture on a stream that did not begin it", status=903)
            invalidated = self.status is CaptureStatus.INVALIDATED
            self.status = fire(self.status, "end")
            for member in self._frontiers:
                member.capture = None
            unjoined = set(range(len(self._nodes))) - self._reachable(self._frontiers[stream])
            nodes = tuple(work for work, _ in self._nodes)
            self._nodes.clear()
            self._frontiers.clear()
        if invalidated:
            raise HostRuntimeError(901, f"the capture was invalidated by: {self._reason}")
        if unjoined:
            raise HostRuntimeError(904, f"{len(unjoined)} node(s) of a forked stream were not joined back")
        return HostGraph(nodes)

    def _reachable(self, frontier: frozenset[int]) -> set[int]:
        reached: set[int] = set()
        pending = list(frontier)
        while pending:
            if (node := pending.pop()) not in reached:
                reached.add(node)
                pending.extend(self._nodes[node][1])
        return reached

    def _check_active(self) -> None:
        if self.status is not CaptureStatus.ACTIVE:
            raise HostRuntimeError(901, f"the capture was invalidated by: {self._reason}")
