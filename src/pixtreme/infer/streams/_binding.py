"""`BoundInference`: an opened module that runs on one context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

from pixtreme.infer.contracts import (
    OpenedStatelessImageInference,
    StatefulImageInference,
    StatelessOpenContract,
    TemporalOpenContract,
)
from pixtreme.infer.errors import ClosedError, ContextError, refuse_pickle
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.streams import _loops
from pixtreme.infer.streams._completion import Completion
from pixtreme.infer.streams._handle import EventHandle
from pixtreme.infer.streams._planning import After

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
    """A module opened by `StreamContext.bind`; calling it is ``submit`` of the instance.

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

    def __call__(self, frame: F | EventHandle[F], /, *, after: After = "current", **params: Any) -> EventHandle[F]:
        """Enqueue one request and return its handle: ``context.submit(instance, frame, **params)``.

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
        return self._context.submit(self._opened.instance, frame, after=after, **params)

    async def submit_async(
        self, frame: F | EventHandle[F], /, *, after: After = "current", **params: Any
    ) -> EventHandle[F]:
        """Like a call, but at the context's bound wait for a slot without blocking; as `StreamContext.submit_async`.

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
        self._check_open()
        return await self._context.submit_async(self, frame, after=after, **params)

    def submit_sync(self, frame: F | EventHandle[F], /, *, after: After = "current", **params: Any) -> EventHandle[F]:
        """Like a call, but at the context's bound wait on the host for a slot; as `StreamContext.submit_sync`.

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
        self._check_open()
        return self._context.submit_sync(self, frame, after=after, **params)

    def instance_on(self, context: object) -> OpenedStatelessImageInference[Any, F] | StatefulImageInference[Any, F]:
        """Return the module for a submission to ``context``, as `StreamContext.submit` does with a bound module.

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
            if (drained := self._drain()) is not None:
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

    def __repr__(self) -> str:
        state = "closed" if self._opened.closed else "open"
        place = self._context.core_stream.place
        return f"<BoundInference {type(self._opened.instance).__qualname__} on {place}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the artifact's path")

    def _check_open(self) -> None:
        if self._opened.closed:
            raise ClosedError(
                why="a closed module takes no more requests",
                what=f"{self!r} was called after close()",
                how="bind the module again",
            )
