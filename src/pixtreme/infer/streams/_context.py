"""`StreamContext`: one device, one stream, and everything bound to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, Self, overload

from pixtreme.infer.contracts import Precision, StatelessInferenceFactory, TemporalInferenceFactory
from pixtreme.infer.errors import ContextError, refuse_pickle
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.runtimes import NativeStream, Runtime, StreamLike, native_stream, runtime_for
from pixtreme.infer.streams import _loops, _scopes
from pixtreme.infer.streams._binding import BoundInference
from pixtreme.infer.streams._completion import HostEpilogue
from pixtreme.infer.streams._handle import EventHandle
from pixtreme.infer.streams._lifetime import ContextStatus, Lifetime, check_options
from pixtreme.infer.streams._planning import After, named_by, plan_waits
from pixtreme.infer.streams._recorder import Recorder
from pixtreme.infer.streams._semaphore import FairSemaphore
from pixtreme.infer.streams._storage import Storage
from pixtreme.infer.streams._stream import Stream, consumers

_numbers = itertools.count(1)


class StreamContext(Storage):
    """One stream of one device, and the work and modules bound to it. Made by `open` and `adopt`.

    Invariants

    1. Host calls through one context take turns; only a module opens beside them.
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
        self._name = name if name is not None else f"{runtime.device}#{next(_numbers)}"
        self._stream = Stream(runtime, stream, f"context {self._name!r} ({runtime.device})")
        self._recorder = Recorder(self._stream, max_in_flight, timing=timing)
        self._in_flight = self._recorder.in_flight
        self._lifetime = Lifetime(self, self._recorder, owned=owned)
        consumers.setdefault(self._stream.key, self)

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
        --------------------
        None.
        """
        check_options(name=name, priority=priority, timing=timing, max_in_flight=max_in_flight)
        runtime = runtime_for(device)
        stream = runtime.create_stream(priority=priority)
        return cls(runtime, stream, owned=True, name=name, timing=timing, max_in_flight=max_in_flight)

    @classmethod
    def adopt(
        cls,
        stream: StreamLike,
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
        --------------------
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

        Host synchronization
        --------------------
        None.
        """
        entry = _scopes.current()
        if entry is None or not isinstance(entry.owner, StreamContext):
            _scopes.refuse_outside()
        return entry.owner

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        return self._stream.key.device

    @property
    def name(self) -> str:
        """The name given, or one made up."""
        return self._name

    @property
    def stream(self) -> NativeStream:
        """The native stream, for code that enqueues on it."""
        return self._stream.native

    @property
    def core_stream(self) -> Stream:
        """The stream as this library's own modules order it; no part of the stable API."""
        return self._stream

    @property
    def slots(self) -> FairSemaphore:
        """What bounds the handles in flight, for this library's own modules; no part of the stable API."""
        return self._in_flight

    @property
    def timing(self) -> bool:
        """Whether its events can be timed."""
        return self._recorder.timing

    @property
    def max_in_flight(self) -> int | None:
        """The bound on pending handles; None where there is none."""
        return self._in_flight.limit

    @property
    def in_flight(self) -> int:
        """How many handles are pending."""
        return self._in_flight.count

    @property
    def closed(self) -> bool:
        """True from the moment close() is called: no more work is taken."""
        return self._lifetime.status is not ContextStatus.OPEN

    @property
    def faulted(self) -> bool:
        """True once work is known to have failed: no more work is taken."""
        return self._in_flight.fault is not None

    def check_usable(self) -> None:
        """Raise what `submit` would raise now: `ClosedError`, or the `StreamFault` that broke the stream.

        Host synchronization
        --------------------
        None.
        """
        if not self._lifetime.takes_work:
            self._lifetime.check_open(self)
        if (fault := self._in_flight.fault) is not None:
            raise fault.retrieve()

    def use(self) -> _scopes.Scope:
        """Return a scope, ``with context.use():``, that makes device and stream current for this thread.

        Stream order
        ------------
        Adds nothing to the stream.

        Host synchronization
        --------------------
        None.

        Raises
        ------
        ContextError
            (On leaving) the scope is left by another thread or out of order, as happens when a task awaits inside.
        """
        return _scopes.Scope(self._enter)

    @overload  # a bound module's own handle is the submission's
    def submit[F: FrameLike](
        self, fn: BoundInference[F], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[F]: ...
    @overload
    def submit[T](
        self, fn: Callable[..., T], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[T]: ...
    def submit(
        self, fn: Callable[..., Any], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[Any]:
        """Call ``fn`` on this thread inside ``use()``, and return a handle to what it enqueued.

        Parameters
        ----------
        fn
            Enqueues work on the current stream and returns the result-to-be; or a `BoundInference` of this context.
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
            A handle belongs to another runtime, or a bound module to another context.
        ContractError
            ``fn`` is no callable, a coroutine function, or returned another handle; or a handle stands in a container
            that is not looked into, such as a set.

        An exception of ``fn`` comes straight out: there is no handle, the context stays usable, and what ``fn`` had
        enqueued keeps its arguments alive.

        Stream order
        ------------
        After everything submitted here before, and after the dependencies.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        ``fn`` with what it holds, arguments and result live until the recorded event completes.
        """
        self.check_usable()
        self._in_flight.take()
        return self.submit_promised(fn, args, kwargs, after)

    @overload  # a bound module's own handle is the submission's
    def submit_sync[F: FrameLike](
        self, fn: BoundInference[F], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[F]: ...
    @overload
    def submit_sync[T](
        self, fn: Callable[..., T], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[T]: ...
    def submit_sync(
        self, fn: Callable[..., Any], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[Any]:
        """Like `submit`, but at the bound wait on the host for a slot; slots are given in order of asking.

        For a bound module given host pixels it waits for a staging buffer as well.

        Raises
        ------
        ContextError
            This thread runs an event loop, which the wait would freeze: use `submit_async`.

        Stream order
        ------------
        As `submit`.

        Lifetime
        --------
        As `submit`.

        Host synchronization
        --------------------
        Blocks while ``max_in_flight`` handles are pending.
        """
        if isinstance(fn, BoundInference):
            fn.instance_on(self)
            return fn.submit_sync(*args, after=after, **kwargs)
        _loops.refuse_to_block("submit_sync()", "`await context.submit_async(...)`, or submit() and handle BusyError")
        self.check_usable()
        self._stream.refuse_own_thread("waiting for a slot")
        self._in_flight.take_blocking(self._stream.ensure_reporting)
        return self.submit_promised(fn, args, kwargs, after)

    @overload  # a bound module's own handle is the submission's
    async def submit_async[F: FrameLike](
        self, fn: BoundInference[F], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[F]: ...
    @overload
    async def submit_async[T](
        self, fn: Callable[..., T], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[T]: ...
    async def submit_async(
        self, fn: Callable[..., Any], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[Any]:
        """Like `submit`, but at the bound wait for a slot without blocking; slots are given in order of asking.

        For a bound module given host pixels it waits for a staging buffer as well.

        Stream order
        ------------
        As `submit`; ``"current"`` means the stream current when this is first awaited.

        Lifetime
        --------
        As `submit`; ``"current"`` means the stream current when this is first awaited.

        Host synchronization
        --------------------
        None.
        """
        if isinstance(fn, BoundInference):
            fn.instance_on(self)
            return await fn.submit_async(*args, after=after, **kwargs)
        self.check_usable()
        after = self.pin(after)  # other tasks, and their scopes, run while this one waits
        await self._in_flight.take_waiting(self._stream.ensure_reporting)
        return self.submit_promised(fn, args, kwargs, after)

    @overload  # a bound module's own handle is the submission's
    def enqueue[F: FrameLike](
        self, fn: BoundInference[F], /, *args: Any, after: After = "current", **kwargs: Any
    ) -> EventHandle[F]: ...
    @overload
    def enqueue[A](
        self, fn: Callable[..., Any], /, *args: Any, out: EventHandle[A], after: After = "current", **kwargs: Any
    ) -> EventHandle[A]: ...
    @overload
    def enqueue[A](
        self, fn: Callable[..., Any], /, *args: Any, out: A, after: After = "current", **kwargs: Any
    ) -> EventHandle[A]: ...
    @overload
    def enqueue[T](
        self, fn: Callable[..., T], /, *args: Any, out: None = None, after: After = "current", **kwargs: Any
    ) -> EventHandle[T]: ...
    def enqueue(
        self, fn: Callable[..., Any], /, *args: Any, out: Any = None, after: After = "current", **kwargs: Any
    ) -> EventHandle[Any]:
        """Make ``fn(*args, **kwargs)`` one operation of the stream: the same text on every device.

        On CUDA ``fn`` is called now, inside ``use()``, and what it enqueues is ordered. On the CPU, where functions
        work at once, the stream's worker calls it, in stream order, with every handle's value complete.

        Parameters
        ----------
        fn
            Works on arrays: a function of NumPy or CuPy, or of your own. On the CPU it must not use contexts.
        *args, **kwargs
            For ``fn``; handles among them as for `submit`.
        out
            Memory that ``fn`` receives as keyword ``out`` and fills: an array, a frame, a handle of one, or a tuple. It
            is the handle's value at once, so that modules and other streams take the handle before it is done.
            Without it the value is what ``fn`` returns: on the CPU it exists once the handle is complete, and only a
            further ``enqueue`` takes the handle earlier.
        after
            As for `submit`.

        Raises
        ------
        BusyError, ClosedError, StreamFault, ContextError, ContractError
            As `submit`; nothing was enqueued.

        What ``fn`` raises comes straight out on CUDA; on the CPU it faults the stream, as a failed kernel does.

        Stream order
        ------------
        After everything submitted here before, and after the dependencies. While the stream captures, the operation is
        recorded into the graph.

        Lifetime
        --------
        As `submit`.

        Host synchronization
        --------------------
        None. Outside ``use()`` the handle counts as in flight; inside, it is a part of what the scope does.
        """
        if isinstance(fn, BoundInference):
            return self.submit(fn, *args, after=after, **(kwargs if out is None else {**kwargs, "out": out}))
        self.check_usable()
        counts = _scopes.entry_of(self._stream) is None
        if counts:
            self._in_flight.take()
        completion, value = self._recorder.enqueue(self, fn, args, kwargs, out, after, counts=counts)
        return EventHandle(self, completion, value)

    def submit_promised(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], after: After
    ) -> EventHandle[Any]:
        """`submit` on a slot that `slots` promised before; no part of the stable API.

        Stream order
        ------------
        As `submit`.

        Lifetime
        --------
        As `submit`.

        Host synchronization
        --------------------
        None.
        """
        completion, value = self._recorder.submit(self, fn, args, kwargs, after)
        return EventHandle(self, completion, value)

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
        ------------
        The module opens with this stream current.

        Host synchronization
        --------------------
        As the factory's ``open``: a graph factory waits for its warm-up.

        Lifetime
        --------
        Closed with the context, in reverse order of binding, or by its own ``close()``.
        """
        _loops.warn_of_blocking("bind()", "`await context.bind_async(...)`")
        opened = self._lifetime.open_module(
            self, self.use(), lambda: factory.open(artifact, precision=precision, input_hw=input_hw)
        )
        close = partial(self._lifetime.close_opened, owner=self)
        return BoundInference(self, opened, self._lifetime.drain_for_module, close)

    async def bind_async[ArtifactIdentity, F: FrameLike](
        self,
        factory: StatelessInferenceFactory[ArtifactIdentity, F] | TemporalInferenceFactory[ArtifactIdentity, F],
        artifact: ArtifactIdentity,
        /,
        *,
        precision: Precision,
        input_hw: tuple[int, int],
    ) -> BoundInference[F]:
        """Like `bind`, in a thread of its own, without blocking the event loop.

        Cancelling it takes effect once the module is open, and closes it again. Meanwhile the context takes requests;
        they wait only while a `CudaGraphSession` of the module captures. A module that captures by other means opens
        before requests come.

        Stream order
        ------------
        As `bind`.

        Host synchronization
        --------------------
        None: it awaits.

        Lifetime
        --------
        As `bind`.
        """
        bind = partial(self.bind, factory, artifact, precision=precision, input_hw=input_hw)
        return await _loops.open_in_thread(bind)

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
        ------------
        Behind everything enqueued so far.

        Host synchronization
        --------------------
        None. It counts as in flight, but is never refused for ``max_in_flight``: the work is enqueued already.

        Lifetime
        --------
        ``value`` and ``keep_alive`` live until the event completes.
        """
        with self._stream.turn:
            self.check_usable()
            self._stream.refuse_while_capturing("record()")
            completion = self._recorder.publish((value, tuple(keep_alive)), "record", promised=False)
        return EventHandle(self, completion, value)

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
        ------------
        Later work waits on the device; a context or stream counts with what is enqueued on it now.

        Host synchronization
        --------------------
        None.
        """
        with self._stream.turn:
            self.check_usable()
            self._recorder.carry_out(plan_waits(self._stream, dependencies))

    def keep_alive(self, *values: object) -> None:
        """Keep objects alive that work on this stream uses.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        Inside a ``use()`` scope of this thread until what the scope enqueues is complete; elsewhere until the next
        event this context records is.
        """
        self._recorder.keep(values)

    def pin(self, after: After = "current") -> list[Any]:
        """Return what ``after`` means now, for a submission made later or from another thread.

        Stream order
        ------------
        ``"current"`` becomes an event recorded on this thread's current stream.

        Host synchronization
        --------------------
        None.
        """
        return [one.record() if isinstance(one, Stream) else one for one in named_by(after, self._stream)]

    def synchronize(self) -> None:
        """Block until everything enqueued so far is over.

        Raises
        ------
        StreamFault
            Something failed.

        Host synchronization
        --------------------
        Blocks this thread; Ctrl-C interrupts it.
        """
        self._lifetime.check_open(self)
        drained = self._recorder.drain("synchronize()")
        if not drained.done:
            _loops.warn_of_blocking("synchronize()", "`await context.record()`")
        drained.block()
        if (fault := self._in_flight.fault) is not None:
            raise fault.retrieve()

    def close(self, *, cancel_pending: bool = False) -> None:
        """Drain outstanding work, close what was bound in reverse order, release the stream. Idempotent.

        Parameters
        ----------
        cancel_pending
            Drop what has not started, as leaving ``with`` by Ctrl-C does: its handles, and those of work ordered after
            it, fault with `WorkCancelled`. What runs is waited for. CUDA has no such thing: there, and on a stream that
            somebody else owns, everything enqueued still runs.

        Raises
        ------
        ContextError
            This thread is inside a ``use()`` scope of the context, or reports its completions.

        A module whose ``close`` raises does not keep the rest from closing; the first such error is raised at the end.

        Host synchronization
        --------------------
        Blocks until the work is over (`aclose` does not); Ctrl-C interrupts it, and close() may be called again.
        """
        if (drained := self._lifetime.begin_close(self, cancel_pending=cancel_pending)) is not None:
            if not drained.done:
                _loops.warn_of_blocking("close()", "`await context.aclose()`, or `async with`")
            drained.block()
            self._finish_close()

    async def aclose(self, *, cancel_pending: bool = False) -> None:
        """Like `close`, without blocking the event loop.

        Cancelling it takes effect after the close is done: work under way cannot be abandoned.

        Host synchronization
        --------------------
        None while draining.
        """
        drained = self._lifetime.begin_close(self, cancel_pending=cancel_pending)
        if drained is None:
            await _loops.checkpoint()
            return
        cancelled = await drained.wait_in_any_case()
        self._finish_close()
        if cancelled is not None:
            raise cancelled

    def __enter__(self) -> Self:
        self._lifetime.check_open(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(cancel_pending=isinstance(error, KeyboardInterrupt))

    async def __aenter__(self) -> Self:
        self._lifetime.check_open(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.aclose(cancel_pending=isinstance(error, KeyboardInterrupt))

    def __repr__(self) -> str:
        state = "faulted" if self.faulted and not self.closed else self._lifetime.status.value
        return f"<StreamContext {self._name!r} on {self.device}: {state}, {self.in_flight} in flight, {self.stream!r}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the device name")

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return ``(0, pointer)``: what makes a CUDA context a stream for CuPy, cuda.core, numba-cuda and PyTorch."""
        if self.device == "cpu":
            raise ContextError(
                why="a host stream is no CUDA stream",
                what=f"{self!r} was passed where a CUDA stream is expected",
                how="open the context on a CUDA device",
            )
        return 0, self._stream.key.pointer

    def _enter(self) -> _scopes.Entry:
        self._lifetime.check_open(self)
        return _scopes.enter(self._stream, self, self._leave)

    def _leave(self, kept: list[object], epilogue: HostEpilogue | None) -> None:
        try:
            self._recorder.leave_scope(kept, epilogue)
        except Exception:
            if self._lifetime.status is not ContextStatus.CLOSED:
                raise  # else another thread closed the context meanwhile: its stream was drained and is gone

    def _finish_close(self) -> None:
        try:
            self._lifetime.finish_close(self)
        finally:
            if self.closed and consumers.get(self._stream.key) is self:
                del consumers[self._stream.key]
