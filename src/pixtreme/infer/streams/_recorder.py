"""`Recorder`: the events recorded on one context's stream, and what each keeps alive until it completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NoReturn

from pixtreme.infer.errors import ContextError, ContractError, InferError
from pixtreme.infer.runtimes import NativeEvent, Runtime
from pixtreme.infer.streams import _captures, _scopes
from pixtreme.infer.streams._binding import BoundInference
from pixtreme.infer.streams._completion import Completion, HostEpilogue
from pixtreme.infer.streams._handle import EventHandle
from pixtreme.infer.streams._in_flight import InFlight
from pixtreme.infer.streams._planning import After, Plan, named_by, plan_waits, replace_handles, resolved
from pixtreme.infer.streams._stream import Consumer, Stream
from pixtreme.infer.streams._values import Later


class Recorder:
    """Turns what was enqueued on a stream into completions.

    `submit`, `enqueue`, `keep`, `leave_scope` and `drain` take the stream's turn themselves; for the others the caller
    holds it.
    """

    def __init__(self, stream: Stream, max_in_flight: int | None, *, timing: bool) -> None:
        self.stream = stream
        self.in_flight = InFlight(stream.place, max_in_flight)
        self.timing = timing
        self._kept: list[object] = []  # until the next event is recorded (S16)

    def carry_out(self, plan: Plan) -> None:
        """Enqueue the waits that were planned."""
        stream = self.stream
        for other in plan.streams:
            stream.wait_for(other)
        for event in plan.events:
            stream.wait(event)
        for completion in plan.handed_over:
            completion.hand_over()

    def submit(
        self, owner: Consumer, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], after: After
    ) -> tuple[Completion, Any]:
        """Plan, call ``fn`` inside a scope of ``owner``, and publish what it enqueued.

        A slot was promised before; it is given back where nothing is published.
        """
        completion: Completion | None = None
        try:
            with self.stream.turn:
                owner.check_usable()
                if isinstance(fn, BoundInference):
                    fn = fn.call_on(owner, args)
                label = _label(fn, "submit")
                self.stream.refuse_while_capturing(f"submit({label})")
                handles: list[EventHandle[Any]] = []
                args = replace_handles(args, handles)
                if kwargs:
                    kwargs = replace_handles(kwargs, handles)
                plan = plan_waits(self.stream, [*named_by(after, self.stream), *handles])
                entry = _scopes.enter(self.stream, owner)
                try:
                    self.carry_out(plan)
                    try:
                        value = self.stream.runtime.bare(fn(*args, **kwargs))
                        if _awaits(value.__class__):
                            _refuse_awaitable(label, value)
                    except BaseException as error:
                        self.mark_failure(label, (fn, args, kwargs, entry.kept), error)
                        raise
                    completion = self.publish((fn, args, kwargs, value, entry.kept), label, promised=True)
                finally:
                    _scopes.leave_entry(entry)
        except BaseException:
            if completion is None:
                self.in_flight.give_back()
            raise
        return completion, value

    def enqueue(
        self,
        owner: Consumer,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        after: After,
        *,
        counts: bool,
    ) -> tuple[Completion, Any]:
        """Plan, and enqueue one call of ``fn``; the value is ``out``, or a `Later` that holds what ``fn`` will return.

        A slot was promised before where the handle counts as in flight. While the stream captures, the call is
        recorded into the graph.
        """
        completion: Completion | None = None
        try:
            with self.stream.turn:
                owner.check_usable()
                label = _label(fn, "enqueue")
                handles: list[EventHandle[Any]] = []
                args = replace_handles(args, handles, later=True)
                kwargs = replace_handles(kwargs, handles, later=True)
                if out is not None:
                    out = _memory_of(out, handles)
                plan = plan_waits(self.stream, [*named_by(after, self.stream), *handles])
                work = _Enqueued(label, fn, args, kwargs, out, self.stream.runtime)
                entry = _scopes.enter(self.stream, owner)
                try:
                    self.carry_out(plan)
                    try:
                        self.stream.runtime.enqueue(self.stream.native, work)
                    except BaseException as error:
                        if not self.stream.is_capturing:
                            self.mark_failure(label, (work, entry.kept), error)
                        raise
                    if self.stream.is_capturing:
                        completion = Completion(self.stream, self.stream.record(), self.in_flight, label, captured=True)
                    elif counts:
                        completion = self.publish((work, entry.kept), label, promised=True)
                    else:  # a part of a submission, whose event takes on what is to be done after it
                        event = self._record()
                        completion = self._completion(event, (work, entry.kept), label, None, has_handle=False)
                        self.stream.report(event, completion.finish)
                finally:
                    _scopes.leave_entry(entry)
        except BaseException:
            if completion is None and counts:
                self.in_flight.give_back()
            raise
        return completion, work.value

    def publish(self, kept: object, label: str, *, promised: bool) -> Completion:
        """Record an event for a handle: nothing is published unless that succeeds (S36)."""
        _captures.run_deferred()
        event = self._record()
        completion = self._completion(event, kept, label, _scopes.take_epilogue(self.stream), has_handle=True)
        self.in_flight.publish(promised=promised)
        self.stream.report(event, completion.finish)
        return completion

    def mark(self, label: str, kept: object = None, epilogue: HostEpilogue | None = None) -> Completion:
        """Record an event without a handle; ``kept`` lives until it completes."""
        event = self._record()
        epilogue = epilogue or _scopes.take_epilogue(self.stream)
        completion = self._completion(event, kept, label, epilogue, has_handle=False)
        self.stream.report(event, completion.finish)
        return completion

    def mark_failure(self, label: str, kept: object, error: BaseException) -> None:
        """Keep what a call that raised was given: what it had enqueued before may still use it (S6)."""
        try:
            self.mark(label, kept)
        except Exception as second:
            error.add_note(f"the arguments could not be kept until the work is over: {second!r}")
        fault = self.in_flight.fault
        if fault is not None and fault.cause is error:  # PIXTREME_INFER_LAUNCH_BLOCKING: the caller gets it directly
            fault.retrieved = True

    def keep(self, values: Iterable[object]) -> None:
        """Keep objects alive: until this thread's scope of the stream is over, or else the next recorded event."""
        entry = _scopes.entry_of(self.stream)
        if entry is not None:
            entry.kept.extend(values)
            return
        with self.stream.turn:
            self._kept.extend(values)

    def leave_scope(self, kept: list[object], epilogue: HostEpilogue | None) -> None:
        """Keep what a scope collected until what it enqueued is complete (S16)."""
        with self.stream.turn:
            if self.stream.is_capturing:
                self._kept.append((kept, epilogue))
            else:
                self.mark("use()", kept, epilogue)

    def drain(self, label: str) -> Completion:
        """Return what is over once everything enqueued so far is."""
        with self.stream.turn:
            self.stream.refuse_own_thread(label)
            self.stream.refuse_while_capturing(label)
            _captures.run_deferred()
            try:
                completion = self.mark(label)
            except InferError:
                raise
            except Exception as error:  # the device takes no more calls: nothing of it can be waited for
                completion = Completion(self.stream, None, self.in_flight, label)
                completion.finish(error)
            self.stream.ensure_reporting()
            return completion

    def _record(self) -> NativeEvent:
        if self.stream.is_capturing:
            self.stream.refuse_while_capturing("recording a handle's event")
            raise ContextError(
                why="an event recorded in a capture never completes by itself",
                what=f"the stream of {self.stream.place} was left capturing by code that is not ours",
                how="end that capture before the call returns, or use CudaGraphSession to capture",
            )
        return self.stream.record(timing=self.timing)

    def _completion(
        self, event: NativeEvent, kept: object, label: str, epilogue: HostEpilogue | None, *, has_handle: bool
    ) -> Completion:
        handed, self._kept = self._kept, []
        return Completion(self.stream, event, self.in_flight, label, (kept, handed), epilogue, has_handle=has_handle)


def _memory_of(out: Any, handles: list[EventHandle[Any]]) -> Any:
    """Return what an enqueued function fills: arrays, frames, or the values of handles."""
    memory = replace_handles(out, handles, later=True)
    for one in memory if isinstance(memory, tuple) else (memory,):
        if not (hasattr(one, "shape") and hasattr(one, "dtype")):
            raise ContractError(
                why="out= is the memory that the function fills, and the handle's value at once",
                what=f"received out={out!r}; accepted are an array, a frame, a handle of one, and a tuple of them",
                how="allocate it first, out=context.empty(shape, dtype), or leave it away to have what the function "
                "returns",
            )
    return memory


class _Enqueued:
    """One call of a function, made by its stream or, where functions enqueue, on the stream's behalf."""

    def __init__(
        self,
        label: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        runtime: Runtime,
    ) -> None:
        self.value: Any = Later() if out is None else runtime.bare(out)
        self._label = label
        self._fn = fn
        self._args = runtime.bare(args)
        self._kwargs = runtime.bare(kwargs) if out is None else {**runtime.bare(kwargs), "out": self.value}

    def __call__(self) -> None:
        value = self._fn(*resolved(self._args), **resolved(self._kwargs))
        if _awaits(value.__class__):
            _refuse_awaitable(self._label, value)
        if isinstance(self.value, Later):
            self.value.become(value)


def _label(fn: object, verb: str) -> str:
    """Return what messages call a submission."""
    if not callable(fn):
        raise ContractError(
            why=f"{verb} calls its first argument",
            what=f"received {fn!r}; accepted is a callable that works on the current stream",
            how=f"pass a function and its arguments: context.{verb}(fn, *args, **kwargs)",
        )
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


@lru_cache(maxsize=1024)
def _awaits(kind: type) -> bool:
    return hasattr(kind, "__await__") or hasattr(kind, "__aiter__")


def _refuse_awaitable(label: str, value: object) -> NoReturn:
    """Raise where a submitted function was a coroutine function, or returned another handle."""
    if isinstance(value, EventHandle):
        how = "submit the work once, on the context it is for, or return value.on(context)"
    else:
        how = "pass a plain function that enqueues; await first, and submit what was awaited"
    if (close := getattr(value, "close", None)) is not None and not isinstance(value, EventHandle):
        close()  # a coroutine that never ran: it need not warn that nobody awaited it
    raise ContractError(
        why="a submitted function enqueues work and returns the result-to-be; nothing here awaits",
        what=f"{label} returned {value!r}; accepted is anything that is not awaitable",
        how=how,
    )
