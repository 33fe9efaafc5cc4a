"""`StreamContext`: one device, one stream, and everything bound to it."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from pixtreme.infer.contracts import Precision, StatelessInferenceFactory, TemporalInferenceFactory
from pixtreme.infer.errors import ContextError, refuse_pickle
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.streams import capture, loops, scope
from pixtreme.infer.streams.arguments import check_options
from pixtreme.infer.streams.binding import BoundInference
from pixtreme.infer.streams.completion import Flight
from pixtreme.infer.streams.devices import native_stream, runtime_for
from pixtreme.infer.streams.handle import EventHandle
from pixtreme.infer.streams.lane import TRANSITIONS, After, ContextStatus, Lane
from pixtreme.infer.streams.runtime import NativeStream, Runtime


class StreamContext(Lane):
    """One stream of one device, and the work and modules bound to it. Made by `open` and `adopt`.

    Invariants

    1. Host calls through one context take turns; they never overlap (S9).
    2. Whatever was submitted keeps its arguments and its result alive until its event completes.
    3. Nothing waits for the device but ``synchronize``, ``close`` and methods with ``sync`` in their name.
    4. The stream is released only after everything recorded on it is complete.

    Not guaranteed: any order with work other code enqueues on the same native stream from another thread.
    """

    def __init__(
        self,
        runtime: Runtime,
        stream: NativeStream,
        *,
        owned: bool,
        name: str | None,
        timing: bool,
        max_in_flight: int | None,
    ) -> None:
        super().__init__(runtime, stream, name=name, timing=timing, max_in_flight=max_in_flight)
        self._owned = owned
        self._bound: list[BoundInference[Any]] = []
        self._finalizer = weakref.finalize(self, _dropped, runtime, stream, self._place, owned)
        self._finalizer.atexit = False

    @classmethod
    def open(
        cls,
        device: str | int = "auto",
        *,
        name: str | None = None,
        priority: int = 0,
        timing: bool = False,
        max_in_flight: int | None = None,
    ) -> StreamContext:
        """Create a stream of its own on a device.

        Parameters
        ----------
        device
            ``"auto"`` (CUDA if usable, else CPU), ``"cuda"``, ``"cuda:N"``, ``N`` or ``"cpu"``.
        name
            For messages and traces.
        priority
            CUDA stream priority, lower is more urgent; the host runtime has none and ignores it.
        timing
            Record timing events, for `EventHandle.elapsed_ms`.
        max_in_flight
            Bound on handles whose event has not completed; None for no bound.

        Raises
        ------
        ContextError
            The device cannot be used; names those that can.
        ContractError
            Another argument is malformed.

        Host synchronization
            None.
        """
        check_options(name=name, priority=priority, timing=timing, max_in_flight=max_in_flight)
        runtime = runtime_for(device)
        stream = runtime.create_stream(priority=priority)
        return cls(runtime, stream, owned=True, name=name, timing=timing, max_in_flight=max_in_flight)

    @classmethod
    def adopt(
        cls,
        stream: NativeStream,
        *,
        name: str | None = None,
        timing: bool = False,
        max_in_flight: int | None = None,
    ) -> StreamContext:
        """Wrap a native stream that somebody else owns; closing the context leaves the stream alone.

        Raises
        ------
        ContextError
            ``stream`` is no stream, or a default stream.

        ``stream`` is a host stream, a CuPy stream, or any object with ``__cuda_stream__`` (cuda.core, numba-cuda,
        PyTorch), which is kept alive.

        Host synchronization
            None.
        """
        check_options(name=name, priority=0, timing=timing, max_in_flight=max_in_flight)
        runtime, native = native_stream(stream)
        return cls(runtime, native, owned=False, name=name, timing=timing, max_in_flight=max_in_flight)

    @staticmethod
    def current() -> StreamContext:
        """Return the context whose ``use()`` scope is innermost on this thread.

        Raises
        ------
        ContextError
            This thread is inside no scope. A new thread starts outside any.
        """
        context = scope.current_context()
        if not isinstance(context, StreamContext):
            raise ContextError(
                why="a current context exists only inside a use() scope of this thread",
                what=f"thread {threading.current_thread().name!r} is inside no scope",
                how="call this inside `with context.use():`, or name the context",
            )
        return context

    def use(self) -> scope.Scope:
        """Return a scope, ``with context.use():``, that makes device and stream current for this thread.

        Stream order
            Adds nothing to the stream.
        Host synchronization
            None.

        Raises
        ------
        ContextError
            (On leaving) the scope is left by another thread or out of order, as happens when a task awaits inside.
        """
        return scope.Scope(self)

    def submit[T](self, fn: Callable[..., T], /, *args: Any, after: After = "current", **kwargs: Any) -> EventHandle[T]:
        """Call ``fn`` on this thread inside ``use()``, and return a handle to what it enqueued.

        Parameters
        ----------
        fn
            Enqueues work on the current stream and returns the result-to-be.
        *args, **kwargs
            For ``fn``. Every `EventHandle` among them, also inside lists, tuples and dict values, is replaced by its
            value, ordered on the device.
        after
            ``"current"`` orders the work after the caller's current stream, so that inputs just produced there are
            safe; None after nothing; a list names handles, contexts, events or streams.

        Raises
        ------
        BusyError
            ``max_in_flight`` is reached; nothing was enqueued.
        ClosedError, StreamFault, CaptureError
            The context takes no work (now).
        ContextError
            A handle belongs to another runtime.

        An exception of ``fn`` comes straight out: there is no handle, the context stays usable, and what ``fn`` had
        enqueued keeps its arguments alive.

        Stream order
            After everything submitted here before, and after the dependencies.
        Host synchronization
            None.
        Lifetime
            Arguments and result live until the recorded event completes.
        """
        self._check_usable()
        self._board.take()
        return self._launch(fn, args, kwargs, after)

    def submit_sync[T](
        self, fn: Callable[..., T], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[T]:
        """Like `submit`, but at the bound wait on the host for a slot; slots are given in order of asking.

        Raises
        ------
        ContextError
            This thread runs an event loop, which the wait would freeze: use `submit_async`.

        Stream order, lifetime
            As `submit`.
        Host synchronization
            Blocks while ``max_in_flight`` handles are pending.
        """
        if loops.loop_runs_here():
            raise ContextError(
                why="a blocking wait for a slot would freeze the event loop of this thread",
                what=f"submit_sync was called on {self!r} where an event loop runs",
                how="use `await context.submit_async(...)`, or submit() and handle BusyError",
            )
        self._check_usable()
        self._refuse_own_thread("waiting for a slot")
        self._board.take_blocking(self._demand)
        return self._launch(fn, args, kwargs, after)

    async def submit_async[T](
        self, fn: Callable[..., T], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[T]:
        """Like `submit`, but at the bound wait for a slot without blocking; slots are given in order of asking.

        Stream order, lifetime
            As `submit`; ``"current"`` means the stream current when this is first awaited.
        Host synchronization
            None.
        """
        self._check_usable()
        after = self._pinned(after)  # other tasks, and their scopes, run while this one waits
        await self._board.take_waiting(self._demand)
        return self._launch(fn, args, kwargs, after)

    def bind[ArtifactIdentity, F: FrameLike](
        self,
        factory: StatelessInferenceFactory[ArtifactIdentity, F] | TemporalInferenceFactory[ArtifactIdentity, F],
        artifact: ArtifactIdentity,
        /,
        *,
        precision: Precision,
        input_hw: tuple[int, int],
    ) -> BoundInference[F]:
        """Open a module inside this context, which owns it from then on.

        Parameters
        ----------
        factory
            Anything with ``open(artifact, /, *, precision, input_hw)``.
        input_hw
            Fixed input ``(height, width)`` in pixels.

        Stream order
            The module opens with this stream current.
        Host synchronization
            As the factory's ``open``: a graph factory waits for its warm-up.
        Lifetime
            Closed with the context, in reverse order of binding, or by its own ``close()``.
        """
        with self._turn:
            self._check_usable()
            capture.refuse_while_capturing(self._key, "bind()")
            with self.use():
                instance = factory.open(artifact, precision=precision, input_hw=input_hw)
            bound = BoundInference(self, instance)
            self._bound.append(bound)
            return bound

    def synchronize(self) -> None:
        """Block until everything enqueued so far is over.

        Raises
        ------
        StreamFault
            Something failed.

        Host synchronization
            Blocks this thread; Ctrl-C interrupts it.
        """
        self._check_open()
        self._drain("synchronize()").block()
        if self._board.fault is not None:
            raise self._board.fault.retrieve()

    def close(self) -> None:
        """Drain outstanding work, close what was bound in reverse order, release the stream. Idempotent.

        Raises
        ------
        ContextError
            This thread is inside a ``use()`` scope of the context, or reports its completions.

        A module whose ``close`` raises does not keep the rest from closing; the first such error is raised at the end.

        Host synchronization
            Blocks until the work is over (`aclose` does not); Ctrl-C interrupts it, and close() may be called again.
        """
        if (flight := self._begin_close()) is not None:
            flight.block()
            self._finish_close()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop.

        Cancelling it takes effect after the close is done: work under way cannot be abandoned.

        Host synchronization
            None while draining.
        """
        flight = self._begin_close()
        if flight is None:
            await loops.checkpoint()
            return
        self._demand()
        cancelled = await loops.until_in_any_case(flight)
        self._finish_close()
        if cancelled is not None:
            raise cancelled

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "faulted" if self.faulted and not self.closed else self._status.value
        return f"<StreamContext {self._name!r} on {self.device}: {state}, {self.in_flight} in flight, {self._stream!r}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the device name")

    def _begin_close(self) -> Flight | None:
        """Refuse new work and return the flight to wait for; None where the context is closed already."""
        with self._turn:
            if self._status is ContextStatus.CLOSED:
                return None
            self._check_process()
            if scope.is_entered_here(self):
                raise ContextError(
                    why="a context cannot close while its stream is current",
                    what=f"this thread is inside a use() scope of {self!r}",
                    how="leave the scope first",
                )
            flight = self._drain("close()")
            self._status = TRANSITIONS[self._status, "close"]
            return flight

    def _close_bound(self, bound: BoundInference[Any]) -> None:
        """Close one module: its outstanding work first (C8)."""
        if not self.closed:
            self._drain("close() of a module").block()
        with self._turn:
            if bound in self._bound:
                self._bound.remove(bound)
                with scope.Scope(self, even_closing=True):
                    bound._close_instance()

    def _finish_close(self) -> None:
        errors: list[BaseException] = []
        with self._turn:
            if self._status is not ContextStatus.CLOSED:
                while self._bound:
                    try:
                        with scope.Scope(self, even_closing=True):
                            self._bound.pop()._close_instance()
                    except Exception as error:
                        errors.append(error)
                self._status = TRANSITIONS[self._status, "drained"]
                self._finalizer.detach()
                self._forget()
                self._runtime.detach(self._stream)
                if self._owned:
                    self._runtime.destroy_stream(self._stream)
                fault = self._board.fault
                if fault is not None and not fault.delivered:
                    fault.log_unless_known()
        if errors:
            for further in errors[1:]:
                errors[0].add_note(f"while closing another module of {self._place}: {further!r}")
            raise errors[0]


def _dropped(runtime: Runtime, stream: NativeStream, place: str, owned: bool) -> None:
    """A context was garbage-collected open: release its stream when no capture is under way (S34)."""
    runtime.detach(stream)
    if owned:
        capture.release(runtime.device, partial(runtime.destroy_stream, stream))
    warnings.warn(f"{place} was dropped without close()", ResourceWarning, stacklevel=2)
