"""`BoundInference`: an opened module that runs on one context."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from pixtreme.infer._dir import public_dir
from pixtreme.infer.contracts import (
    OpenedStatelessImageInference,
    StatefulImageInference,
    StatelessOpenContract,
    TemporalOpenContract,
)
from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import ClosedError, ContextError, refuse_argument, refuse_pickle
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.streams import _loops
from pixtreme.infer.streams._completion import Completion
from pixtreme.infer.streams._copies import Pixels, StagingPool, lease_blocking, lease_waiting, pool_of
from pixtreme.infer.streams._handle import EventHandle
from pixtreme.infer.streams._planning import After
from pixtreme.infer.streams._request import Request, iterated

_SEAMS = ("call_on", "instance_on", "pools_for")  # for this library's own modules
_AHEAD = 2  # how far map() goes on a context without a bound: one request that runs and one that waits

if TYPE_CHECKING:
    from pixtreme.infer.streams._context import StreamContext


class Opened[F: FrameLike]:
    """An opened module, as the context that owns it keeps it."""

    def __init__(self, instance: OpenedStatelessImageInference[Any, F] | StatefulImageInference[Any, F]) -> None:
        self.instance = instance
        self.closed = False

    def close(self) -> None:
        """Close the module, once; no work of it is under way any more."""
        if not self.closed:
            self.closed = True
            self.instance.close()


class BoundInference[F: FrameLike]:
    """A module opened by `StreamContext.bind`: called, awaited (`run`) or given to any form of ``submit``.

    Requests are frames of the device, handles of such, and, on every device, host pixels: a `HostFrame`, or a NumPy
    array, which gets the labels of the contract: the exact ones, and the reference where any is taken. Host pixels
    count as they are at the call: the buffer may be filled again at once.

    ``with`` and ``async with`` close it, before the context it lives on.
    """

    def __init__(
        self,
        context: StreamContext,
        opened: Opened[F],
        drain: Callable[[], Completion | None],
        close: Callable[[Opened[F]], object],
    ) -> None:
        self._context = context
        self._opened = opened
        self._drain = drain  # what to wait for before closing
        self._close = close

    @property
    def context(self) -> StreamContext:
        """The context that owns the module."""
        return self._context

    @property
    def instance(self) -> OpenedStatelessImageInference[Any, F] | StatefulImageInference[Any, F]:
        """The opened module itself, for plain synchronous calls inside ``with context.use():``.

        Raises
        ------
        ClosedError
            It is closed.
        """
        self._check_open()
        return self._opened.instance

    @property
    def contract(self) -> StatelessOpenContract[Any] | TemporalOpenContract[Any]:
        """What was opened."""
        return self._opened.instance.contract

    @property
    def scale(self) -> int:
        """Output pixels a side for each input pixel."""
        return self._opened.instance.scale

    @property
    def closed(self) -> bool:
        """True after close(), the context's included."""
        return self._opened.closed

    def __call__(
        self, frame: F | HostFrame | Pixels | EventHandle[F], /, *, after: After = "current", **params: Any
    ) -> EventHandle[F]:
        """Enqueue one request and return its handle: ``context.submit(bound, frame, **params)``.

        Raises
        ------
        ClosedError
            The module or its context is closed.
        BusyError, StreamFault, CaptureError, ContractError
            As `StreamContext.submit` and the module say; nothing was enqueued.

        Stream order
        ------------
        As `StreamContext.submit`.

        Lifetime
        --------
        As `StreamContext.submit`.

        Host synchronization
        --------------------
        None.
        """
        self._check_open()
        return self._context.submit(self, frame, after=after, **params)

    async def run(
        self,
        frame: F | HostFrame | Pixels | EventHandle[F],
        /,
        *,
        host: bool = False,
        after: After = "current",
        **params: Any,
    ) -> Any:
        """Send one request and return its result: waits for a slot, a staging buffer and the work, never blocking.

        Parameters
        ----------
        host
            Bring the result to the host: a `HostFrame`, on every device.

        Raises
        ------
        ClosedError, StreamFault, CaptureError, ContractError
            As a call.

        Stream order
        ------------
        As `submit_async`.

        Host synchronization
        --------------------
        None: it awaits. Cancelling it abandons the wait, not the work.
        """
        return await (await self._begin(frame, host, after, params))

    def run_sync(
        self,
        frame: F | HostFrame | Pixels | EventHandle[F],
        /,
        *,
        host: bool = False,
        after: After = "current",
        **params: Any,
    ) -> Any:
        """Like `run`, for a program without an event loop.

        Stream order
        ------------
        As `submit_sync`.

        Host synchronization
        --------------------
        Blocks until the result is there; Ctrl-C interrupts it.
        """
        _loops.refuse_to_block("run_sync()", "`await bound.run(...)`")
        return self._begin_blocking(frame, host, after, params).result()

    async def map(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        ahead: int | None = None,
        host: bool = False,
        **params: Any,
    ) -> AsyncGenerator[Any]:
        """Yield the results of a source's frames, in order, with a bounded number under way.

        Parameters
        ----------
        source
            Frames, host pixels or handles. One that blocks (a decoder) belongs into a `Pipeline`.
        ahead
            How many requests may be under way; None takes the context's ``max_in_flight``, or 2.
        host, **params
            As for `run`.

        Raises
        ------
        ClosedError, StreamFault, CaptureError, ContractError
            As a call, for the item it happened with; those before it were yielded.

        Stream order
        ------------
        As `submit_async`, in source order.

        Host synchronization
        --------------------
        None: it awaits. Left early, what is under way runs to its end, and nothing waits for it.
        """
        if ahead is None:
            ahead = self._context.max_in_flight or _AHEAD
        elif not is_positive_int(ahead):
            refuse_argument(self, "ahead", ahead, "None or a positive int")
        under_way: deque[EventHandle[Any]] = deque()
        async with aclosing(iterated(source)) as frames:
            async for frame in frames:
                if len(under_way) >= ahead:
                    yield await under_way.popleft()
                under_way.append(await self._begin(frame, host, "current", params))
        while under_way:
            yield await under_way.popleft()

    async def submit_async(
        self, frame: F | HostFrame | Pixels | EventHandle[F], /, *, after: After = "current", **params: Any
    ) -> EventHandle[F]:
        """Like a call, but wait, without blocking, for a slot of the context and, for host pixels, a staging buffer.

        Stream order
        ------------
        As `StreamContext.submit_async`.

        Lifetime
        --------
        As `StreamContext.submit`.

        Host synchronization
        --------------------
        None.
        """
        return await self._begin(frame, False, after, params)

    def submit_sync(
        self, frame: F | HostFrame | Pixels | EventHandle[F], /, *, after: After = "current", **params: Any
    ) -> EventHandle[F]:
        """Like a call, but wait, on the host, for a slot of the context and, for host pixels, a staging buffer.

        Stream order
        ------------
        As `StreamContext.submit`.

        Lifetime
        --------
        As `StreamContext.submit`.

        Host synchronization
        --------------------
        As `StreamContext.submit_sync`.
        """
        _loops.refuse_to_block("submit_sync()", "`await bound.submit_async(...)`")
        return self._begin_blocking(frame, False, after, params)

    def pools_for(self, frame: object, host: bool) -> list[StagingPool]:
        """Return the pool whose buffer a request takes; none where it needs none. For this library's own modules.

        Host synchronization
        --------------------
        None.
        """
        if not isinstance(host, bool):
            refuse_argument(self, "host", host, "True or False")
        runtime = self._context.core_stream.runtime
        needed = runtime.needs_staging and (host or isinstance(frame, HostFrame | np.ndarray))
        return [pool_of(runtime)] if needed else []

    def call_on(self, context: object, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the module for ``args``, or a `Request` for host pixels. For this library's own modules.

        Host synchronization
        --------------------
        None.
        """
        instance = self.instance_on(context)
        return Request(self) if args and isinstance(args[0], HostFrame | np.ndarray) else instance

    def instance_on(self, context: object) -> OpenedStatelessImageInference[Any, F] | StatefulImageInference[Any, F]:
        """Return the module for a submission to ``context``. For this library's own modules.

        Raises
        ------
        ClosedError
            The module is closed.
        ContextError
            It lives on another context.

        Host synchronization
        --------------------
        None.
        """
        self._check_open()
        if context is not self._context:
            raise ContextError(
                why="a bound module runs on the context that owns it",
                what=f"received {self!r} for {context!r}; accepted is {self._context!r}",
                how="submit it to its own context, or bind the module to this one as well",
            )
        return self._opened.instance

    def close(self) -> None:
        """Wait until the context's work is over, then close the module. Idempotent.

        Host synchronization
        --------------------
        Blocks until everything submitted to the context so far is over (`aclose` does not).
        """
        if not self._opened.closed:
            if (drained := self._drain()) is not None and not drained.done:
                _loops.warn_of_blocking("close() of a module", "`await bound.aclose()`")
                drained.block()
            self._close(self._opened)

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop while work is under way.

        Cancelling it takes effect after the close is done: work under way cannot be abandoned.

        Host synchronization
        --------------------
        None while draining.
        """
        drained = None if self._opened.closed else self._drain()
        if drained is None:
            await _loops.checkpoint()
            cancelled = None
        else:
            cancelled = await drained.wait_in_any_case()
        if not self._opened.closed:
            self._close(self._opened)
        if cancelled is not None:
            raise cancelled

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __dir__(self) -> Iterable[str]:
        return public_dir(self, _SEAMS)

    def __repr__(self) -> str:
        state = "closed" if self._opened.closed else "open"
        place = self._context.core_stream.place
        return f"<BoundInference {type(self._opened.instance).__qualname__} on {place}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the artifact's path")

    async def _begin(self, frame: Any, host: bool, after: After, params: dict[str, Any]) -> EventHandle[Any]:
        """Submit one request once a slot, and where one is needed a staging buffer, is free."""
        self._check_open()
        request = Request(self, host=host)
        after = self._context.pin(after)  # other tasks, and their scopes, run while this one waits
        with await lease_waiting(self.pools_for(frame, host)) as request.lease:
            return await self._context.submit_async(request, frame, after=after, **params)

    def _begin_blocking(self, frame: Any, host: bool, after: After, params: dict[str, Any]) -> EventHandle[Any]:
        self._check_open()
        request = Request(self, host=host)
        with lease_blocking(self.pools_for(frame, host)) as request.lease:
            return self._context.submit_sync(request, frame, after=after, **params)

    def _check_open(self) -> None:
        if self._opened.closed:
            raise ClosedError(
                why="a closed module takes no more requests",
                what=f"{self!r} was called after close()",
                how="bind the module again",
            )
