"""`BoundInference`: an opened module that runs on one context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from pixtreme.infer.contracts import (
    OpenedStatelessImageInference,
    StatefulImageInference,
    StatelessOpenContract,
    TemporalOpenContract,
)
from pixtreme.infer.errors import ClosedError, refuse_pickle
from pixtreme.infer.frames import FrameLike
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
    """A module opened by `StreamContext.bind`; calling it is ``submit`` of the instance."""

    def __init__(self, context: StreamContext, opened: Opened[F], close: Callable[[Opened[F]], object]) -> None:
        self._context = context
        self._opened = opened
        self._close = close  # waits for the context's work, then closes

    @property
    def context(self) -> StreamContext:
        """The context that owns the module."""
        return self._context

    @property
    def instance(self) -> OpenedStatelessImageInference[Any, F] | StatefulImageInference[Any, F]:
        """The opened module itself, for plain synchronous calls inside ``with context.use():``."""
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
        if self._opened.closed:
            raise ClosedError(
                why="a closed module takes no more requests",
                what=f"{self!r} was called after close()",
                how="bind the module again",
            )
        return self._context.submit(self._opened.instance, frame, after=after, **params)

    def close(self) -> None:
        """Wait until the context's work is over, then close the module. Idempotent.

        Host synchronization
        --------------------
        Blocks until everything submitted to the context so far is over.
        """
        if not self._opened.closed:
            self._close(self._opened)

    def __repr__(self) -> str:
        state = "closed" if self._opened.closed else "open"
        place = self._context.core_stream.place
        return f"<BoundInference {type(self._opened.instance).__qualname__} on {place}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the artifact's path")
