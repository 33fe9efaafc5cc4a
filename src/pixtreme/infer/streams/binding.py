"""`BoundInference`: an opened module that runs on one context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pixtreme.infer.contracts import (
    OpenedStatelessImageInference,
    StatefulImageInference,
    StatelessOpenContract,
    TemporalOpenContract,
)
from pixtreme.infer.errors import ClosedError, refuse_pickle
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.streams.handle import EventHandle

if TYPE_CHECKING:
    from pixtreme.infer.streams.context import StreamContext
    from pixtreme.infer.streams.lane import After


class BoundInference[F: FrameLike]:
    """A module opened by `StreamContext.bind`; calling it is ``submit`` of the instance."""

    def __init__(
        self, context: StreamContext, instance: OpenedStatelessImageInference[Any, F] | StatefulImageInference[Any, F]
    ) -> None:
        self._context = context
        self._instance = instance
        self._closed = False

    @property
    def context(self) -> StreamContext:
        """The context that owns the module."""
        return self._context

    @property
    def instance(self) -> OpenedStatelessImageInference[Any, F] | StatefulImageInference[Any, F]:
        """The opened module itself, for plain synchronous calls inside ``with context.use():``."""
        return self._instance

    @property
    def contract(self) -> StatelessOpenContract[Any] | TemporalOpenContract[Any]:
        """What was opened."""
        return self._instance.contract

    @property
    def scale(self) -> int:
        """Output pixels a side for each input pixel."""
        return self._instance.scale

    @property
    def closed(self) -> bool:
        """True after close(), the context's included."""
        return self._closed

    def __call__(self, frame: F | EventHandle[F], /, *, after: After = "current", **params: Any) -> EventHandle[F]:
        """Enqueue one request and return its handle: ``context.submit(instance, frame, **params)``.

        Raises
        ------
        ClosedError
            The module or its context is closed.
        BusyError, StreamFault, CaptureError, ContractError
            As `StreamContext.submit` and the module say; nothing was enqueued.

        Stream order, lifetime
            As `StreamContext.submit`.
        Host synchronization
            None.
        """
        if self._closed:
            raise ClosedError(
                why="a closed module takes no more requests",
                what=f"{self!r} was called after close()",
                how="bind the module again",
            )
        return self._context.submit(self._instance, frame, after=after, **params)

    def close(self) -> None:
        """Wait until the context's work is over, then close the module. Idempotent.

        Host synchronization
            Blocks until everything submitted to the context so far is over.
        """
        if not self._closed:
            self._context._close_bound(self)

    def _close_instance(self) -> None:
        """Close the module; no work of it is under way any more."""
        if not self._closed:
            self._closed = True
            self._instance.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<BoundInference {type(self._instance).__qualname__} on {self._context._place}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the artifact's path")
