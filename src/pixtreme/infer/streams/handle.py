"""`EventHandle`: a result that is on its way, and waiting for several of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from pixtreme.infer.errors import BusyError, ContextError, ContractError, HandleTimeout, StreamFault, refuse_pickle
from pixtreme.infer.streams import capture, loops
from pixtreme.infer.streams.completion import Flight, FlightStatus, keep_until_done
from pixtreme.infer.streams.loops import Notify, call_logged
from pixtreme.infer.streams.runtime import NativeEvent, NativeStream, Runtime

if TYPE_CHECKING:
    from pixtreme.infer.streams.context import StreamContext


class _Foreign:
    """The streams without a context that a handle's value was handed to. It goes with the handle (S16, S34)."""

    __slots__ = ("_runtime", "_value", "streams")

    def __init__(self, runtime: Runtime, value: object) -> None:
        self._runtime = runtime
        self._value = value
        self.streams: list[NativeStream] = []

    def __del__(self) -> None:
        for stream in self.streams:
            capture.release(self._runtime.device, partial(keep_until_done, self._runtime, stream, self._value))


class EventHandle[T]:
    """The result of work that a stream may still be doing.

    One handle serves every kind of program: ``await handle``, ``handle.result()``, ``other.submit(fn, handle)``, and
    ``handle.on(other)``, as often and from as many tasks, threads and event loops as wanted. Made by
    `StreamContext.submit` and `StreamContext.record`.

    Dropping the handle or cancelling a wait never touches the work: what it uses is kept alive until its event
    completes. A handle holds no event loop.
    """

    __slots__ = ("__weakref__", "_context", "_event", "_flight", "_foreign", "_value")

    def __init__(self, context: StreamContext, flight: Flight, event: NativeEvent, value: T) -> None:
        self._context = context
        self._flight = flight
        self._event = event
        self._value = value
        self._foreign: _Foreign | None = None

    @property
    def context(self) -> StreamContext:
        """The context whose stream does the work."""
        return self._context

    @property
    def event(self) -> NativeEvent:
        """The native event behind the work; recorded once, by us, and never again."""
        return self._event

    @property
    def status(self) -> FlightStatus:
        """Pending, complete or faulted."""
        return self._flight.status

    def done(self) -> bool:
        """Tell whether the work is over, completed or faulted.

        Host synchronization
            None.
        """
        return self._flight.done

    def result(self, timeout: float | None = None) -> T:
        """Block until the work is over and return its value.

        Parameters
        ----------
        timeout
            Seconds; None waits as long as it takes, 0 only looks.

        Raises
        ------
        StreamFault
            The work failed; the cause is the backend's exception.
        HandleTimeout
            Time ran out. The work goes on and the handle stays usable.
        ContextError
            This thread reports the stream's completions and would wait for itself.

        Host synchronization
            Blocks this thread; Ctrl-C interrupts it. Use ``await`` where an event loop runs.
        """
        self._block(timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> StreamFault | None:
        """Block like `result` and return the fault, or None."""
        self._block(timeout)
        fault = self._flight.fault
        return None if fault is None else fault.retrieve()

    def add_done_callback(self, fn: Callable[[EventHandle[T]], object], /) -> None:
        """Call ``fn(handle)`` once the work is over, as ``concurrent.futures`` does.

        It runs on the thread that reports the stream's completions, or at once in this one if the work is over
        already. What it raises is logged. It must not wait for its own context.

        Host synchronization
            None.
        """
        if not callable(fn):
            raise ContractError(
                why="a done callback is called with the handle",
                what=f"received {fn!r}; accepted is a callable of one argument",
                how="pass a function",
            )
        notify = partial(fn, self)
        self._context._demand()
        if not self._flight.add_waiter(notify):
            call_logged(notify)

    def __await__(self) -> Generator[Any, Any, T]:
        self._context._demand()
        yield from loops.until(self._flight).__await__()
        return self._outcome()

    def on(self, target: StreamContext | NativeStream) -> T:
        """Make ``target`` wait for the work, and return the value for use there.

        Parameters
        ----------
        target
            A context, or a native stream of the same runtime.

        Raises
        ------
        StreamFault
            The work is known to have failed.
        ContextError
            ``target`` belongs to another runtime: ``await`` the handle, or stage the data over.

        Stream order
            Later work on ``target`` runs after this handle's event; on the handle's own stream nothing is added.
        Host synchronization
            None.
        Lifetime
            Inside ``with target.use():`` the value lives until what that scope enqueued is complete; elsewhere until
            the next event ``target`` records is. For a stream without a context keep the handle until the use is
            enqueued: the value lives until what is enqueued there when the handle goes is complete.
        """
        self._context._hand_over(self, target)
        return self._value

    def then[U](self, context: StreamContext, fn: Callable[..., U], /, *args: Any, **kwargs: Any) -> EventHandle[U]:
        """Submit ``fn(value, *args, **kwargs)`` to ``context``, ordered after this handle on the device."""
        return context.submit(fn, self, *args, **kwargs)

    def elapsed_ms(self, since: EventHandle[Any]) -> float:
        """Return device milliseconds from the event of ``since`` to this one's.

        Raises
        ------
        ContextError
            A context was opened without ``timing=True``, or the two are of different runtimes.
        BusyError
            One of them is still pending.
        """
        if not isinstance(since, EventHandle):
            raise ContractError(
                why="elapsed time is measured between two handles",
                what=f"received since={since!r}; accepted is an EventHandle",
                how="pass the handle of the earlier work",
            )
        contexts = (since._context, self._context)
        if contexts[0]._runtime is not contexts[1]._runtime or not all(context._timing for context in contexts):
            raise ContextError(
                why="elapsed time needs two timing events of one runtime",
                what=f"received handles of {contexts[0]!r} and {contexts[1]!r}",
                how="open both contexts on one device with timing=True",
            )
        for handle in (since, self):
            if not handle.done():
                raise BusyError(
                    why="elapsed time is known once both events are complete",
                    what=f"{handle!r} is pending",
                    how="await both handles first",
                )
            handle._outcome()
        return self._context._runtime.elapsed_ms(since._event, self._event)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._exporter().__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Export the value's memory (DLPack), ordered after the work.

        Parameters
        ----------
        stream
            The consumer's stream, which waits for the work: None and 1 are CUDA's legacy default stream, 2 the
            per-thread one, larger numbers pointers; -1 asks for no wait. 0 is ambiguous and refused. On the CPU, where
            a consumer reads at once, only None is taken, and the host waits.
        **options
            ``max_version``, ``dl_device`` and ``copy``, for the value's own export.

        Raises
        ------
        ContractError
            The value is no array or frame, or ``stream`` names none.
        StreamFault
            The work failed.

        Stream order
            As `on` with that stream.
        Host synchronization
            None on CUDA; on the CPU until the work is over.
        Lifetime
            The consumer keeps the memory; it is not reused before what the stream does now is complete.
        """
        producer = self._exporter()
        if self._context.device == "cpu":
            if stream is not None:
                _refuse_stream(stream, "None: a host array has no stream")
            self._block(None)
            self._outcome()
            return producer.__dlpack__(**options)
        if isinstance(stream, bool) or not isinstance(stream, int | None) or stream == 0 or (stream or 1) < -1:
            _refuse_stream(stream, "None, -1, 1, 2 and pointers of streams")
        if stream != -1:
            self._context._hand_over(self, self._context._runtime.stream_at(1 if stream is None else stream))
        return producer.__dlpack__(stream=-1, **options)

    def __repr__(self) -> str:
        return f"<EventHandle {self.status.value}: {self._flight.label} on {self._context._place}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the result's pixels as a NumPy array")

    def _keep_for(self, stream: NativeStream) -> None:
        if self._foreign is None:
            self._foreign = _Foreign(self._context._runtime, self._value)
        self._foreign.streams.append(stream)

    def _outcome(self) -> T:
        fault = self._flight.fault
        if fault is not None:
            raise fault.retrieve()
        return self._value

    def _exporter(self) -> Any:
        if not hasattr(self._value, "__dlpack__"):
            raise ContractError(
                why="only a handle to an array or frame can be exported",
                what=f"{self!r} is for a {type(self._value).__module__}.{type(self._value).__qualname__}",
                how="await the handle and use its value",
            )
        return self._value

    def _block(self, timeout: float | None) -> None:
        seconds = _checked_timeout(timeout)
        if self._flight.done:
            return
        self._context._refuse_own_thread("waiting for a handle")
        self._context._demand()
        if not self._flight.block(seconds):
            raise HandleTimeout(
                why="the work did not complete in the time given",
                what=f"{self!r} after {timeout} s",
                how="wait again (the handle stays usable), or pass a larger timeout",
            )

    async def _arrive(self) -> None:
        self._context._demand()
        await loops.until(self._flight)


async def wait_all[T](handles: Iterable[EventHandle[T]], /) -> list[T]:
    """Wait for every handle and return their values in order.

    Raises
    ------
    StreamFault
        One handle faulted.
    ExceptionGroup
        Several did: one `StreamFault` each. Everything was waited for in both cases.
    """
    waited = _checked_handles(handles)
    if all(handle.done() for handle in waited):
        await loops.checkpoint()
    for handle in waited:
        if not handle.done():
            await handle._arrive()
    faults = [fault.retrieve() for handle in waited if (fault := handle._flight.fault) is not None]
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ExceptionGroup(f"{len(faults)} of {len(waited)} handles faulted", faults)
    return [handle._value for handle in waited]


async def as_completed[T](handles: Iterable[EventHandle[T]], /) -> AsyncIterator[EventHandle[T]]:
    """Yield the handles in the order in which they finish; a faulted one is yielded like any other."""
    waited = _checked_handles(handles)
    arrived: deque[EventHandle[T]] = deque()
    parked: deque[Notify] = deque(maxlen=1)

    def arrive(handle: EventHandle[T]) -> None:
        arrived.append(handle)
        try:
            notify = parked.pop()
        except IndexError:
            return  # nobody is parked: the handle is found before the next one parks
        notify()

    arrivals = [(handle._flight, partial(arrive, handle)) for handle in waited]
    try:
        for (flight, notify), handle in zip(arrivals, waited, strict=True):
            handle._context._demand()
            if not flight.add_waiter(notify):
                arrived.append(handle)
        for _ in waited:
            if arrived:
                await loops.checkpoint()
            while not arrived:
                waiter = loops.make_waiter()
                parked.append(waiter.notify)
                if not arrived:
                    await waiter.wait()
            yield arrived.popleft()
    finally:
        for flight, notify in arrivals:
            flight.discard_waiter(notify)


def _checked_handles[T](handles: Iterable[EventHandle[T]]) -> list[EventHandle[T]]:
    waited = list(handles)
    for position, handle in enumerate(waited):
        if not isinstance(handle, EventHandle):
            raise ContractError(
                why="only handles can be waited for",
                what=f"received {handle!r} at position {position}; accepted are EventHandle objects",
                how="pass what submit() returned",
            )
    return waited


def _refuse_stream(stream: object, accepted: str) -> NoReturn:
    raise ContractError(
        why="a DLPack consumer names the stream that will read",
        what=f"received stream={stream!r}; accepted are {accepted}",
        how="pass the stream as the array API standard spells it",
    )


def _checked_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not math.isfinite(timeout) or timeout < 0:
        raise ContractError(
            why="a timeout is a number of seconds",
            what=f"received timeout={timeout!r}; accepted are None and finite numbers from 0",
            how="pass seconds, or None to wait as long as it takes",
        )
    return float(timeout)
