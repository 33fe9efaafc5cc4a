"""`EventHandle`: a result that is on its way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from pixtreme.infer._dir import public_dir
from pixtreme.infer.errors import (
    BusyError,
    ContextError,
    ContractError,
    HandleTimeout,
    StreamFault,
    refuse_argument,
    refuse_pickle,
)
from pixtreme.infer.runtimes import NativeEvent, NativeStream
from pixtreme.infer.streams import _loops
from pixtreme.infer.streams._completion import Completion, HandleStatus, checked_timeout
from pixtreme.infer.streams._loops import call_logged
from pixtreme.infer.streams._stream import Consumer, Stream, consumers
from pixtreme.infer.streams._values import Foreign, Later

if TYPE_CHECKING:
    from pixtreme.infer.streams._context import StreamContext


_SEAMS = ("completion", "unordered_value", "value_here", "value_in_order")  # for this library's own modules
# What asyncio.wait and concurrent.futures.wait ask of their own futures.
_FUTURE_NAMES = ("add_done_callback", "remove_done_callback", "cancel", "cancelled", "_condition", "_state")
_NO_FUTURE = (
    ": a handle is awaitable, and no future of a loop or a thread pool; pass asyncio.ensure_future(handle) where "
    "asyncio wants a future, use wait_all() and as_completed() of this library, or call_when_done(fn)"
)


class EventHandle[T]:
    """The result of work that a stream may still be doing.

    One handle serves every kind of program: ``await handle``, ``handle.result()``, ``other.submit(fn, handle)``, and
    ``handle.on(other)``, as often and from as many tasks, threads and event loops as wanted. Made by
    `StreamContext.submit` and `StreamContext.record`.

    Dropping the handle or cancelling a wait never touches the work: what it uses is kept alive until its event
    completes. A handle holds no event loop.
    """

    __slots__ = ("__weakref__", "_completion", "_context", "_foreign", "_value")

    def __init__(self, context: StreamContext, completion: Completion, value: T | Later) -> None:
        self._context = context
        self._completion = completion
        self._value = value
        self._foreign: Foreign | None = None

    @property
    def context(self) -> StreamContext:
        """The context whose stream does the work."""
        return self._context

    @property
    def event(self) -> NativeEvent:
        """The native event behind the work; recorded once, by us, and never again."""
        return self._completion.event

    @property
    def status(self) -> HandleStatus:
        """Pending, complete or faulted."""
        return self._completion.status

    @property
    def completion(self) -> Completion:
        """How far the work is: what waits and callbacks hang on. For this library's own modules."""
        return self._completion

    @property
    def unordered_value(self) -> T:
        """The value, which work may still be filling. For this library's own modules, which order themselves after it.

        Raises
        ------
        ContextError
            It does not exist yet: it is what an enqueued function will return.
        """
        value = self._value
        if not isinstance(value, Later):
            return value
        if not value.is_known:
            raise ContextError(
                why="what an enqueued function returns exists once it ran on its stream",
                what=f"the value of {self!r} was asked for",
                how="give the function memory to fill, context.enqueue(fn, ..., out=array), await the handle first, or "
                "pass it to a further enqueue()",
            )
        return value.value  # type: ignore[no-any-return]

    @property
    def value_here(self) -> T:
        """The value for a function called now: reading what is unwritten raises. For this library's own modules."""
        return self._outcome() if self._completion.done else self._guarded()

    @property
    def value_in_order(self) -> T | Later:
        """The value or what will hold it, for a function called in stream order. For this library's own modules."""
        value = self._value
        return value.value if isinstance(value, Later) and value.is_known else value

    def done(self) -> bool:
        """Tell whether the work is over, completed or faulted.

        Host synchronization
        --------------------
        None.
        """
        return self._completion.done

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
        --------------------
        Blocks this thread; Ctrl-C interrupts it. Use ``await`` where an event loop runs.
        """
        self._block(timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> StreamFault | None:
        """Block like `result` and return the fault, or None.

        Host synchronization
        --------------------
        As `result`.
        """
        self._block(timeout)
        fault = self._completion.fault
        return None if fault is None else fault.retrieve()

    def call_when_done(self, fn: Callable[[EventHandle[T]], object], /) -> None:
        """Call ``fn(handle)`` once the work is over.

        The name is not ``add_done_callback``, by which asyncio would take a handle for a future of its own. It runs on
        the thread that reports the stream's completions, or at once in this one if the work is over already. What it
        raises is logged. It must not wait for its own context.

        Host synchronization
        --------------------
        None.
        """
        if not callable(fn):
            raise ContractError(
                why="a done callback is called with the handle",
                what=f"received {fn!r}; accepted is a callable of one argument",
                how="pass a function",
            )
        notify = partial(fn, self)
        if not self._completion.add_waiter(notify):
            call_logged(notify)

    def __await__(self) -> Generator[Any, Any, T]:
        yield from self._completion.__await__()
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
        ------------
        Later work on ``target`` runs after this handle's event; on the handle's own stream nothing is added.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        Inside ``with target.use():`` the value lives until what that scope enqueued is complete; elsewhere until
        the next event ``target`` records is. For a stream without a context keep the handle until the use is
        enqueued: the value lives until what is enqueued there when the handle goes is complete.
        """
        stream = self._completion.stream
        consumer: Consumer | None = target if hasattr(target, "core_stream") else None
        if consumer is None and stream.runtime.is_stream(target):
            consumer = consumers.get(stream.runtime.key(target))
        if consumer is not None:
            consumer.core_stream.refuse_while_capturing("on()")
            value = self.value_here
            consumer.wait(self)
            if consumer.core_stream != stream:
                consumer.keep_alive(value)
        else:
            value = self.value_here
            self._hand_over(target)
        return value

    def then[U](self, context: StreamContext, fn: Callable[..., U], /, *args: Any, **kwargs: Any) -> EventHandle[U]:
        """Submit ``fn(value, *args, **kwargs)`` to ``context``, ordered after this handle on the device.

        Stream order
        ------------
        After this handle's work, on ``context``.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        As `StreamContext.submit`; this handle's value lives until the new work is complete.
        """
        return context.submit(fn, self, *args, **kwargs)

    def elapsed_ms(self, since: EventHandle[Any]) -> float:
        """Return device milliseconds from the event of ``since`` to this one's.

        Raises
        ------
        ContextError
            A context was opened without ``timing=True``, or the two are of different runtimes.
        BusyError
            One of them is still pending.

        Host synchronization
        --------------------
        None.
        """
        if not isinstance(since, EventHandle):
            refuse_argument(self, "since", since, "the EventHandle of the earlier work")
        contexts = (since.context, self._context)
        runtime = self._completion.stream.runtime
        if since.completion.stream.runtime is not runtime or not all(context.timing for context in contexts):
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
            handle.completion.raise_fault()
        return runtime.elapsed_ms(since.event, self.event)

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
        ------------
        As `on` with that stream.

        Host synchronization
        --------------------
        None on CUDA; on the CPU until the work is over.

        Lifetime
        --------
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
            self.on(self._completion.stream.runtime.stream_at(1 if stream is None else stream))
        return producer.__dlpack__(stream=-1, **options)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise ContractError(
            why="a handle is no array: its pixels may not be written yet",
            what=f"{self!r} was passed where NumPy expects an array",
            how="pass `await handle` or `handle.result()`, or submit the function with the handle as its argument",
        )

    if not TYPE_CHECKING:  # a type checker knows the names there are

        def __getattr__(self, name: str) -> NoReturn:
            advice = _NO_FUTURE if name in _FUTURE_NAMES else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{advice}", name=name, obj=self
            )

    def __dir__(self) -> Iterable[str]:
        return public_dir(self, _SEAMS)

    def __repr__(self) -> str:
        return f"<EventHandle {self.status.value}: {self._completion.label} on {self._completion.stream.place}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the result's pixels as a NumPy array")

    def _hand_over(self, target: NativeStream) -> None:
        """Order a stream without a context after the work, and keep the value for the use there."""
        stream = self._completion.stream
        if not stream.runtime.is_stream(target):
            raise ContextError(
                why="a value is handed to a context or stream of its own runtime",
                what=f"received target={target!r} for {self!r}; "
                f"accepted are contexts and native streams of {stream.key.device}",
                how="await the handle and pass its value, or stage the data to the other device",
            )
        refuse_unfilled(self, repr(target))
        self._completion.raise_fault()
        consumer = Stream(stream.runtime, target)
        consumer.refuse_while_capturing("on()")
        consumer.wait(self._completion.event)
        self._completion.hand_over()
        if self._foreign is None:
            self._foreign = Foreign(self._value)
        self._foreign.streams.append(consumer)

    def _guarded(self) -> T:
        completion = self._completion
        if completion.captured or completion.event is None:
            return self.unordered_value
        value: T = completion.stream.runtime.guarded(self.unordered_value, completion.event, completion)
        return value

    def _outcome(self) -> T:
        self._completion.raise_fault()
        return self.unordered_value

    def _exporter(self) -> Any:
        is_later = self._context.device == "cpu" and isinstance(self._value, Later)
        value: Any = self.result() if is_later else self.unordered_value
        if not hasattr(value, "__dlpack__"):
            raise ContractError(
                why="only a handle to an array or frame can be exported",
                what=f"{self!r} is for a {type(value).__module__}.{type(value).__qualname__}",
                how="await the handle and use its value",
            )
        return value

    def _block(self, timeout: float | None) -> None:
        seconds = checked_timeout(timeout)
        if not self._completion.done:
            _loops.warn_of_blocking("result() or exception() of a pending handle", "`await handle`")
        if not self._completion.block(seconds):
            raise HandleTimeout(
                why="the work did not complete in the time given",
                what=f"{self!r} after {timeout} s",
                how="wait again (the handle stays usable), or pass a larger timeout",
            )


def _refuse_stream(stream: object, accepted: str) -> NoReturn:
    raise ContractError(
        why="a DLPack consumer names the stream that will read",
        what=f"received stream={stream!r}; accepted are {accepted}",
        how="pass the stream as the array API standard spells it",
    )


def refuse_unfilled(handle: EventHandle[Any], place: str) -> None:
    """Raise where a handle's value is host memory that the host has not filled yet."""
    if handle.completion.fills_host and not handle.done():
        raise ContextError(
            why="host memory is filled by the host, which no stream can wait for on the device",
            what=f"{place} was given {handle!r}, whose value is host memory and not filled yet",
            how="await the handle and pass its value",
        )
