"""The engine of a context: one stream, the events recorded on it, and what orders them. `StreamContext` is its face."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from pixtreme.infer.errors import ClosedError, ContextError, ContractError, InferError
from pixtreme.infer.streams import capture, scope
from pixtreme.infer.streams.arguments import replace_handles
from pixtreme.infer.streams.completion import Board, Finishers, Flight
from pixtreme.infer.streams.handle import EventHandle
from pixtreme.infer.streams.runtime import NativeEvent, NativeStream, Runtime, StreamKey

if TYPE_CHECKING:
    from pixtreme.infer.streams.context import StreamContext

After = Literal["current"] | None | Iterable[Any]


class ContextStatus(Enum):
    """How long a context still lives."""

    OPEN = "open"  #: takes work
    CLOSING = "closing"  #: refuses work and drains what it has
    CLOSED = "closed"  #: its stream is released


#: status x event → status; an unknown pair is an error and changes nothing.
TRANSITIONS: dict[tuple[ContextStatus, str], ContextStatus] = {
    (ContextStatus.OPEN, "close"): ContextStatus.CLOSING,
    (ContextStatus.CLOSING, "close"): ContextStatus.CLOSING,  # an interrupted close goes on
    (ContextStatus.CLOSING, "drained"): ContextStatus.CLOSED,
    (ContextStatus.CLOSED, "close"): ContextStatus.CLOSED,
    (ContextStatus.CLOSED, "drained"): ContextStatus.CLOSED,  # two threads closed at once
}

_numbers = itertools.count(1)
_lanes: weakref.WeakValueDictionary[StreamKey, Lane] = weakref.WeakValueDictionary()


class Lane:
    """One native stream and everything recorded on it."""

    def __init__(
        self, runtime: Runtime, stream: NativeStream, *, name: str | None, timing: bool, max_in_flight: int | None
    ) -> None:
        self._runtime = runtime
        self._stream = stream
        self._key = runtime.key(stream)
        self._name = name if name is not None else f"{runtime.device}#{next(_numbers)}"
        self._place = f"context {self._name!r} ({runtime.device})"
        self._timing = timing
        self._board = Board(self._place, max_in_flight)
        self._status = ContextStatus.OPEN
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._handed: list[object] = []  # values handed over to this stream since its last record (S16)
        self._finishers: Finishers | None = None  # what the host does when the work since the last record is over
        runtime.attach(stream)
        _lanes.setdefault(self._key, self)  # an alias does not displace the context it stands beside

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        return self._runtime.device

    @property
    def name(self) -> str:
        """The name given, or one made up."""
        return self._name

    @property
    def stream(self) -> NativeStream:
        """The native stream, for code that enqueues on it."""
        return self._stream

    @property
    def in_flight(self) -> int:
        """How many handles are pending."""
        return self._board.in_flight

    @property
    def closed(self) -> bool:
        """True from the moment close() is called: no more work is taken."""
        return self._status is not ContextStatus.OPEN

    @property
    def faulted(self) -> bool:
        """True once work is known to have failed: no more work is taken."""
        return self._board.fault is not None

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return ``(0, pointer)``: what makes a CUDA context a stream for CuPy, cuda.core, numba-cuda and PyTorch."""
        if self.device == "cpu":
            raise ContextError(
                why="a host stream is no CUDA stream",
                what=f"{self!r} was passed where a CUDA stream is expected",
                how="open the context on a CUDA device",
            )
        return 0, self._key.pointer

    @overload
    def record(self, *, keep_alive: Iterable[object] = ()) -> EventHandle[None]: ...
    @overload
    def record[T](self, value: T, *, keep_alive: Iterable[object] = ()) -> EventHandle[T]: ...
    def record(self, value: Any = None, *, keep_alive: Iterable[object] = ()) -> EventHandle[Any]:
        """Record an event behind what was enqueued, for code already inside ``use()``; return its handle.

        Parameters
        ----------
        value
            What the handle resolves to.
        keep_alive
            Objects the enqueued work uses.

        Stream order
            Behind everything enqueued so far.
        Host synchronization
            None. It counts as in flight, but is never refused for ``max_in_flight``: the work is enqueued already.
        Lifetime
            ``value`` and ``keep_alive`` live until the event completes.
        """
        with self._turn:
            self._check_usable()
            capture.refuse_while_capturing(self._key, "record()")
            return self._publish(value, tuple(keep_alive), "record", promised=False)

    def wait(self, *dependencies: Any) -> None:
        """Order later work of this context after handles, events, contexts or native streams.

        Every dependency is checked before the first wait is added.

        Raises
        ------
        ContractError, ContextError
            Something else was passed, or something of another runtime.
        StreamFault
            A handle is known to have faulted.

        Stream order
            Later work waits on the device; a context or stream counts with what is enqueued on it now.
        Host synchronization
            None.
        """
        with self._turn:
            self._check_usable()
            for wait in self._plan_waits(dependencies):
                wait()

    # -- submission ---------------------------------------------------------------------------------------------

    def _launch[T](
        self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], after: After
    ) -> EventHandle[T]:
        """Submit on a promised slot; the slot is given back where no handle comes of it."""
        try:
            if not callable(fn):
                raise ContractError(
                    why="submit calls its first argument",
                    what=f"received {fn!r}; accepted is a callable that enqueues on the current stream",
                    how="pass a function and its arguments: context.submit(fn, *args, **kwargs)",
                )
            label = getattr(fn, "__qualname__", None) or type(fn).__qualname__
            with self._turn:
                self._check_usable()
                capture.refuse_while_capturing(self._key, f"submit({label})")
                handles: list[EventHandle[Any]] = []
                args, kwargs = replace_handles(args, handles), replace_handles(kwargs, handles)
                waits = self._plan_waits([*self._pinned(after), *handles])
                with scope.Scope(self):
                    for wait in waits:
                        wait()
                    try:
                        value = fn(*args, **kwargs)
                    except BaseException as error:
                        self._keep_after_failure((args, kwargs), label, error)
                        raise
                    return self._publish(value, (args, kwargs), label, promised=True)
        except BaseException:
            self._board.give_back()
            raise

    def _pinned(self, after: After) -> list[Any]:
        """Return the dependencies ``after`` names; the current stream becomes an event recorded on it now."""
        if after is None:
            return []
        if after != "current":
            if isinstance(after, str) or not isinstance(after, Iterable):
                raise ContractError(
                    why="after names what the work waits for",
                    what=f"received after={after!r}; accepted are 'current', None and a list of dependencies",
                    how="pass a list, such as after=[handle]",
                )
            return list(after)
        runtime = self._runtime.here()  # the caller's device may be another one than this context's
        current = runtime.current()
        if current is None or runtime.key(current) == self._key:
            return []
        capture.refuse_while_capturing(runtime.key(current), f"ordering {self._place} after it")
        event = runtime.create_event()
        runtime.record(event, current)
        return [event]

    def _plan_waits(self, dependencies: Iterable[Any]) -> list[Callable[[], None]]:
        """Check every dependency, and return how to wait for each; nothing is enqueued yet."""
        return [plan for dependency in dependencies if (plan := self._plan_wait(dependency)) is not None]

    def _plan_wait(self, dependency: Any) -> Callable[[], None] | None:
        runtime = self._runtime
        if isinstance(dependency, EventHandle):
            self._check_runtime(dependency, dependency._context._runtime)
            dependency._outcome()
            if dependency.done():
                return None
            _refuse_unfilled(dependency, self._place)
            return partial(self._follow, dependency)
        if isinstance(dependency, Lane):
            self._check_runtime(dependency, dependency._runtime)
            dependency._check_open()
            return None if dependency._key == self._key else partial(self._wait_for_stream, dependency._stream)
        if runtime.is_event(dependency):
            return partial(runtime.wait, self._stream, dependency)
        if runtime.is_stream(dependency):
            return None if runtime.key(dependency) == self._key else partial(self._wait_for_stream, dependency)
        raise ContractError(
            why="a stream waits for handles, events, contexts and native streams",
            what=f"received {dependency!r} as a dependency of {self._place}",
            how="pass what submit() or record() returned, a context, or a native event or stream of the same runtime",
        )

    def _follow(self, handle: EventHandle[Any]) -> None:
        if handle._context._key != self._key:  # else it is in order already
            self._runtime.wait(self._stream, handle._event)
        handle._flight.hand_over()

    def _wait_for_stream(self, stream: NativeStream) -> None:
        event = self._runtime.create_event()
        self._runtime.record(event, stream)
        self._runtime.wait(self._stream, event)

    def _check_runtime(self, thing: object, runtime: Runtime) -> None:
        if runtime is not self._runtime:
            raise ContextError(
                why="streams of different runtimes cannot wait for each other on the device",
                what=f"{self._place} was given {thing!r} of {runtime.device}",
                how="await the handle and pass its value, or stage the data to the other device",
            )

    def _publish[T](self, value: T, keep: object, label: str, *, promised: bool) -> EventHandle[T]:
        """Record an event and return its handle: only after the record call succeeded (S36)."""
        capture.run_deferred()
        event = self._record_event()
        kept = (keep, value, self._take_handed())
        flight = Flight(self._board, label, kept, self._take_finishers(), has_handle=True)
        handle = EventHandle(cast("StreamContext", self), flight, event, value)
        self._board.launched(promised=promised)
        self._runtime.report(event, self._stream, flight.finish)
        return handle

    def _mark(self, keep: object, label: str) -> Flight:
        """Record an event without a handle; ``keep`` lives until it completes."""
        event = self._record_event()
        flight = Flight(self._board, label, (keep, self._take_handed()), self._take_finishers(), has_handle=False)
        self._runtime.report(event, self._stream, flight.finish)
        return flight

    def _record_event(self) -> NativeEvent:
        if self._runtime.is_capturing(self._stream):
            capture.refuse_while_capturing(self._key, "recording a handle's event")
            raise ContextError(
                why="an event recorded in a capture never completes by itself",
                what=f"the stream of {self._place} was left capturing by code that is not ours",
                how="end that capture before the call returns, or use CudaGraphSession to capture",
            )
        event = self._runtime.create_event(timing=self._timing)
        self._runtime.record(event, self._stream)
        return event

    def _keep_after_failure(self, keep: object, label: str, error: BaseException) -> None:
        """Keep the arguments of a call that raised: what it had enqueued before may still use them (S6)."""
        try:
            self._mark(keep, label)
        except Exception as second:
            error.add_note(f"the arguments could not be kept until the work is over: {second!r}")
        fault = self._board.fault
        if fault is not None and fault.cause is error:  # PIXTREME_INFER_LAUNCH_BLOCKING: the caller gets it directly
            fault.retrieved = True

    def _forget(self) -> None:
        if _lanes.get(self._key) is self:
            del _lanes[self._key]

    def _take_handed(self) -> list[object]:
        handed, self._handed = self._handed, []
        return handed

    def _take_finishers(self) -> Finishers | None:
        finishers, self._finishers = self._finishers, None
        return finishers

    def _finish_with(self, call: Callable[[], object], *, fills_host: bool = False) -> None:
        """Have the host call something once what is enqueued now is over, before anybody is told so (A12)."""
        with self._turn:
            if self._finishers is None:
                self._finishers = Finishers()
            self._finishers.add(call, fills_host=fills_host)

    def _scope_left(self) -> None:
        """Keep what was handed over inside the scope until what the scope enqueued is complete (S16)."""
        with self._turn:
            pending = self._handed or self._finishers is not None
            if pending and self._status is ContextStatus.OPEN and not self._runtime.is_capturing(self._stream):
                self._mark((), "use()")

    # -- handing over (S16) -------------------------------------------------------------------------------------

    def _hand_over(self, handle: EventHandle[Any], target: Lane | NativeStream) -> None:
        """Order ``target`` after ``handle``, a handle of this context, and keep its value for the use there."""
        runtime = self._runtime
        consumer = target if isinstance(target, Lane) else None
        if consumer is None and runtime.is_stream(target):
            consumer = _lanes.get(runtime.key(target))
        if consumer is not None:
            with consumer._turn:
                consumer._check_usable()
                capture.refuse_while_capturing(consumer._key, "on()")
                for wait in consumer._plan_waits([handle]):
                    wait()
                if consumer._key != self._key:
                    consumer._handed.append(handle._value)
            return
        if not runtime.is_stream(target):
            raise ContextError(
                why="a value is handed to a context or stream of its own runtime",
                what=f"received target={target!r} for {handle!r}; "
                f"accepted are contexts and native streams of {self.device}",
                how="await the handle and pass its value, or stage the data to the other device",
            )
        handle._outcome()
        _refuse_unfilled(handle, repr(target))
        capture.refuse_while_capturing(runtime.key(target), "on()")
        runtime.wait(target, handle._event)
        handle._flight.hand_over()
        handle._keep_for(target)

    # -- waiting and closing ------------------------------------------------------------------------------------

    def _demand(self) -> None:
        if self._status is not ContextStatus.CLOSED:
            self._runtime.demand(self._stream)

    def _drain(self, label: str) -> Flight:
        with self._turn:
            self._refuse_own_thread(label)
            capture.refuse_while_capturing(self._key, label)
            capture.run_deferred()
            try:
                flight = self._mark((), label)
            except InferError:
                raise
            except Exception as error:  # the device takes no more calls: nothing of it can be waited for
                flight = Flight(self._board, label, (), has_handle=False)
                flight.finish(error)
            self._demand()
            return flight

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self._check_open()
        if self._board.fault is not None:
            raise self._board.fault.retrieve()

    def _check_open(self) -> None:
        self._check_process()
        if self._status is not ContextStatus.OPEN:
            raise ClosedError(
                why="a closed context takes no more work",
                what=f"{self!r} was used after close()",
                how="open a new context",
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ContextError(
                why="streams and their threads do not survive a fork",
                what=f"{self._place} was opened in process {self._pid} and used in its child {os.getpid()}",
                how="open contexts after the fork, or start the process with the spawn method",
            )

    def _refuse_own_thread(self, what: str) -> None:
        if self._runtime.reports_here(self._stream):
            raise ContextError(
                why="the thread that reports a stream's completions must not wait for that stream",
                what=f"{what} on {self._place} from one of its own tasks or callbacks would never end",
                how="wait from another thread, or chain the next step with submit() or then()",
            )


def _refuse_unfilled(handle: EventHandle[Any], place: str) -> None:
    if handle._flight.fills_host and not handle.done():
        raise ContextError(
            why="host memory is filled by the host, which no stream can wait for on the device",
            what=f"{place} was given {handle!r}, whose value is host memory and not filled yet",
            how="await the handle and pass its value",
        )
