"""CUDA-graph sessions and fixed buffers: capture backend operations once, replay them for every request.

The core captures *backend operations that enqueue work on fixed storage*. It never captures a module's public frame
call and imports no inference backend. The module still validates each request, picks the operation, owns its history
and reset, and sets the output's metadata. Both classes work on every runtime; the name is the one modules import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import NoReturn

from pixtreme.infer._cuda_graph_buffers import CudaGraphBuffers
from pixtreme.infer._cuda_graph_verify import verify_operations
from pixtreme.infer.errors import CaptureError, ClosedError, ContextError, StreamFault, refuse_argument, refuse_pickle
from pixtreme.infer.runtimes import DEFAULT_STREAMS, NativeGraph, PrivateMemory
from pixtreme.infer.streams import EventHandle, StreamContext, _captures, _scopes
from pixtreme.infer.streams._stream import Stream

__all__ = ("CudaGraphBuffers", "CudaGraphSession")

Operation = Callable[[], object]


class SessionStatus(Enum):
    """How long a session still replays."""

    PREPARING = "preparing"  #: operations are being captured
    READY = "ready"  #: replays
    CLOSED = "closed"  #: released


_TRANSITIONS: dict[tuple[SessionStatus, str], SessionStatus] = {
    (SessionStatus.PREPARING, "prepared"): SessionStatus.READY,
    (SessionStatus.PREPARING, "close"): SessionStatus.CLOSED,
    (SessionStatus.READY, "close"): SessionStatus.CLOSED,
    (SessionStatus.CLOSED, "close"): SessionStatus.CLOSED,
}


def fire(status: SessionStatus, event: str) -> SessionStatus:
    """Return the status after an event; an unknown pair is a KeyError and changes nothing."""
    return _TRANSITIONS[status, event]


class CudaGraphSession:
    """Named operations, each captured once as a graph and replayed on one stream.

    Parameters
    ----------
    operations
        Non-empty mapping of names to callables without arguments. Each enqueues its work on the current stream and on
        fixed storage.
    resources
        Everything the operations use: `CudaGraphBuffers`, history, engines. Kept alive until ``close()``.
    after_prepare
        Called once all are captured, to undo what warm-up and capture did to history and host controls; it consumes no
        request.
    context
        The context to bind to. Without it the session binds to this thread's current device and stream.
    verify
        Replay each operation once on perturbed inputs and compare with an eager call, before ``after_prepare``. It
        needs `CudaGraphBuffers` among the resources, and catches work that ran at capture time instead of being
        recorded.

    Raises
    ------
    ContractError
        The arguments are malformed.
    ContextError
        No explicit stream is current, or it is a default stream; no operation ran.
    CaptureError
        An operation recorded nothing, did something a capture does not allow, or replays differently than it runs.
    Exception
        Whatever an operation (with a note naming it) or ``after_prepare`` raised, unchanged.

    Stream order
    ------------
    Each operation runs once as warm-up, is waited for, and is captured. After a failure no partial session is left:
    the stream is out of capture and everything is released.

    Host synchronization
    --------------------
    Opening waits for the stream; replaying never does.

    Lifetime
    --------
    The fixed output is never handed out by the library. A view of it that a module returns changes with the next
    replay: that is the module's own risk (``CudaGraphBuffers.copy_output`` gives independent storage).

    Calls must not overlap; they may come from any thread on which the stream is current.
    """

    def __init__(
        self,
        operations: Mapping[str, Operation],
        *,
        resources: Iterable[object] = (),
        after_prepare: Callable[[], object] | None = None,
        context: StreamContext | None = None,
        verify: bool = False,
    ) -> None:
        self._operations = _checked_operations(operations)
        self._names = tuple(self._operations)
        if after_prepare is not None and not callable(after_prepare):
            refuse_argument("CudaGraphSession", "after_prepare", after_prepare, "None or a callable without arguments")
        if context is not None and not isinstance(context, StreamContext):
            refuse_argument("CudaGraphSession", "context", context, "None or a StreamContext")
        self._resources = tuple(resources)
        self._graphs: dict[str, NativeGraph] = {}
        self._status = SessionStatus.PREPARING
        self._memory: PrivateMemory | None = None
        with ExitStack() as stack:
            if context is not None:
                stack.enter_context(context.use())
            self._stream, self._context = _binding()
            self._check_no_capture("opening it")
            try:
                self._prepare(after_prepare, verify=verify)
            except BaseException as error:
                self._abandon(error)
                raise
        self._status = fire(self._status, "prepared")

    @property
    def context(self) -> StreamContext | None:
        """The context the session is bound to; None where it was opened on a plain native stream."""
        return self._context

    @property
    def names(self) -> tuple[str, ...]:
        """The operations, in the order of capture."""
        return self._names

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._status is SessionStatus.CLOSED

    def check_context(self) -> None:
        """Raise unless this thread's current device and stream are the session's; cheap enough for every request.

        Raises
        ------
        ClosedError
            The session is closed.
        ContextError
            Another device or stream is current, or something captures on the stream; says what is and what must be.

        Host synchronization
        --------------------
        None.
        """
        if self._status is SessionStatus.CLOSED:
            raise ClosedError(
                why="a closed session replays nothing",
                what=f"{self!r} was used after close()",
                how="open a new session",
            )
        if not self._stream.is_current:
            current = self._stream.runtime.current()
            observed = "no explicit stream" if current is None else f"{current!r}"
            device = self._stream.key.device
            raise ContextError(
                why="a session replays on the stream it was captured for",
                what=f"current is {observed} ({device}); required is {self._stream.native!r} of {self._place}",
                how="call it inside `with context.use():` of that context, or open a session for this stream",
            )
        self._check_no_capture("using it")

    def replay(self, name: str) -> None:
        """Launch the graph of one operation on the session's stream; the Python operation is not called again.

        Raises
        ------
        ContractError
            No operation has this name; lists those that exist.
        ClosedError, ContextError
            As `check_context`.

        Stream order
        ------------
        After everything enqueued on the stream so far.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        The graph and its storage live until what is enqueued when the session closes is complete.
        """
        self.check_context()
        graph = self._graphs.get(name)
        if graph is None:
            refuse_argument("CudaGraphSession", "name", name, f"one of {self.names!r}")
        self._stream.runtime.launch(graph, self._stream.native)

    def launch(self, name: str) -> EventHandle[None]:
        """`replay`, and a handle to its completion.

        Raises
        ------
        ContextError
            The session is bound to no context, so nobody can own the handle.

        Stream order
        ------------
        As `replay`.

        Lifetime
        --------
        As `replay`.

        Host synchronization
        --------------------
        None.
        """
        if self._context is None:
            raise ContextError(
                why="a handle belongs to a context",
                what=f"{self!r} was opened on a plain native stream",
                how="open the session with context=..., or inside `with context.use():`",
            )
        self.replay(name)
        return self._context.record(None, keep_alive=(self._graphs[name],))

    def close(self) -> None:
        """Release graphs, operations and resources once work under way is complete. Idempotent.

        Host synchronization
        --------------------
        None. What is enqueued already runs to its end; during a capture the release waits until it ends.
        """
        if self._status is not SessionStatus.CLOSED:
            self._status = fire(self._status, "close")
            self._release()

    def __repr__(self) -> str:
        return f"<CudaGraphSession {', '.join(self._names)}: {self._status.value} on {self._place}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the artifact and its settings")

    def __del__(self) -> None:
        if getattr(self, "_stream", None) is not None and self._graphs:
            self._release()

    @property
    def _place(self) -> str:
        return self._stream.place

    def _prepare(self, after_prepare: Callable[[], object] | None, *, verify: bool) -> None:
        memory = self._memory = self._stream.runtime.private_memory()
        for name, operation in self._operations.items():
            try:
                with memory.use():
                    operation()
                    self._wait_for_stream()
                    self._graphs[name] = self._capture(name, operation)
                _refuse_outside(name, memory.outside)
            except BaseException as error:
                error.add_note(f"while preparing operation {name!r} of a CudaGraphSession")
                raise
        if verify:
            verify_operations(
                self._stream.runtime,
                self._operations,
                replay=lambda name: self._stream.runtime.launch(self._graphs[name], self._stream.native),
                wait=self._wait_for_stream,
                resources=self._resources,
            )
        if after_prepare is not None:
            after_prepare()
        self.check_context()

    def _capture(self, name: str, operation: Operation) -> NativeGraph:
        runtime, stream = self._stream.runtime, self._stream.native
        with self._stream.turn, _captures.open_capture(self._stream.key, f"operation {name!r} of {self!r}"):
            try:
                runtime.begin_capture(stream)
                operation()
            except BaseException as error:  # Ctrl-C included: the stream is never left capturing (G4)
                try:
                    if runtime.is_capturing(stream):
                        runtime.end_capture(stream)
                except Exception as second:
                    error.add_note(f"ending the capture failed as well: {second!r}")
                raise
            try:
                graph = runtime.end_capture(stream)
            except Exception as error:
                raise CaptureError(
                    why="an operation did something that a capture does not allow",
                    what=f"operation {name!r} on {self._place}: {error}",
                    how="only enqueue work on the current stream: no synchronisation, no query, join every fork back",
                ) from error
        if runtime.node_count(graph) == 0:
            raise CaptureError(
                why="an operation must record its work, or its replay would return stale output without a word",
                what=f"operation {name!r} recorded nothing on {self._place}",
                how="enqueue on the current stream (the session's), not on another stream and not on the host",
            )
        return graph

    def _wait_for_stream(self) -> None:
        event = self._stream.record()
        try:
            self._stream.runtime.synchronize(event)
        except Exception as error:
            raise StreamFault(
                why="work of an operation failed on the device",
                what=f"the stream of {self._place} is faulted: {error}",
                how="look at the cause; then close the context and open a new one",
            ) from (error.__cause__ or error)

    def _check_no_capture(self, what: str) -> None:
        owner = _captures.capturer(self._stream.key)
        if owner is None and self._stream.is_capturing:
            owner = "other code"
        if owner is not None:
            raise ContextError(
                why="while a stream captures, no session may be used on it",
                what=f"{owner} captures on {self._place}; {what} was asked for on {self!r}; required is no capture",
                how="call it after the capture has ended",
            )

    def _abandon(self, error: BaseException) -> None:
        """Leave nothing of a session that could not be opened; a second failure becomes a note (G4)."""
        try:
            self._wait_for_stream()
        except Exception as second:
            error.add_note(f"waiting for the work of the failed session: {second!r}")
        self.close()

    def _release(self) -> None:
        """Let go of everything once what is enqueued now is complete."""
        kept = (self._graphs, self._operations, self._resources, self._memory)
        self._graphs, self._operations, self._resources, self._memory = {}, {}, (), None
        _captures.release(self._stream.key.device, partial(self._stream.keep_until_done, kept))


def _binding() -> tuple[Stream, StreamContext | None]:
    """Return this thread's current stream, and the context whose scope made it current."""
    stream = _scopes.current_stream("a graph session is bound to an explicit stream")
    entry = _scopes.current()
    context = entry.owner if entry is not None and entry.stream == stream else None
    if not isinstance(context, StreamContext):
        context = None
    runtime = stream.runtime
    if context is not None and runtime.orders_itself_with_the_default_stream(stream.native):
        raise ContextError(
            why="a blocking stream waits for the legacy default stream and it for the stream, which a capture forbids",
            what=f"{context!r} adopted a blocking stream; accepted are streams made with non_blocking=True",
            how="adopt cupy.cuda.Stream(non_blocking=True), or open a context of its own",
        )
    if stream.key.pointer in DEFAULT_STREAMS:
        raise ContextError(
            why="a default stream cannot be captured, and orders itself with other streams",
            what=f"current is default stream {stream.key.pointer} of {runtime.device}; any other will do",
            how="open the session inside `with context.use():` or on a non-default stream",
        )
    return stream, context


def _refuse_outside(name: str, allocations: int) -> None:
    if allocations:
        raise CaptureError(
            why="what an operation allocates must live as long as its graph, or a replay overwrites strangers' memory",
            what=f"operation {name!r} made {allocations} allocations from another pool than the session's own",
            how="use CuPy's current allocator inside the operation, or allocate before opening the session",
        )


def _checked_operations(operations: Mapping[str, Operation]) -> dict[str, Operation]:
    if not isinstance(operations, Mapping) or not operations:
        refuse_argument("CudaGraphSession", "operations", operations, "a non-empty mapping of names to callables")
    for name, operation in operations.items():
        if not isinstance(name, str) or not name:
            refuse_argument("CudaGraphSession", "operations", name, "names that are non-empty strings")
        if not callable(operation):
            refuse_argument("CudaGraphSession", "operations", {name: operation}, "callables without arguments")
    return dict(operations)
