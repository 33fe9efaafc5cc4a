"""`Pipeline`: stages on streams, chained on the device (A1-A7)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from pixtreme.infer.aio._flow import Hop, Item, Owner, Run, Source
from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import refuse_argument
from pixtreme.infer.streams import BoundInference, EventHandle, StreamContext
from pixtreme.infer.streams._planning import After


class Stage:
    """One step of a pipeline: a context, and what is called on it for each item.

    Parameters
    ----------
    context
        Where the work is enqueued. Several stages may share one. A `BoundInference` alone, ``Stage(bound)``, brings its
        own.
    call
        ``call(value)`` enqueues on the current stream and returns the result-to-be, as for `StreamContext.submit`; or a
        `BoundInference` of this context. A bound module given host pixels, `staging.Upload` and `staging.Download` wait
        until a page-locked buffer is free, as does any callable with their ``reserve(context)``. A function of your own
        that copies does not, and raises `BusyError` when all are in use: make the copy a stage, or let
        ``staging.pool(device).limit`` be ``depth`` times the copies it makes.
    in_thread
        Call it in a thread of the stage's own: for calls that keep the host busy, which would block the event loop.
    name
        For errors; made from the call and the context where it is left out.
    """

    def __init__(
        self,
        context: StreamContext | BoundInference[Any],
        call: Callable[[Any], Any] | BoundInference[Any] | None = None,
        *,
        in_thread: bool = False,
        name: str | None = None,
    ) -> None:
        if isinstance(context, BoundInference) and call is None:
            bound = context
            context, call = bound.context, bound
        if not isinstance(context, StreamContext):
            refuse_argument("a pipeline's stage", "context", context, "a StreamContext")
        if not callable(call) or _is_asynchronous(call):
            accepted = "a callable of one argument that is no coroutine function, or a BoundInference"
            refuse_argument("a pipeline's stage", "call", call, accepted)
        if not isinstance(in_thread, bool):
            refuse_argument("a pipeline's stage", "in_thread", in_thread, "True or False")
        if name is not None and (not isinstance(name, str) or not name):
            refuse_argument("a pipeline's stage", "name", name, "None or a non-empty string")
        named: Any = call.instance_on(context) if isinstance(call, BoundInference) else call
        self.context = context
        self.call = call
        self.in_thread = in_thread
        self.reserve: Callable[[StreamContext], Any] | None = getattr(call, "reserve", None)
        label = getattr(named, "__name__", None) or type(named).__name__
        self.name = name if name is not None else f"{label} on {context.name}"

    def waits(self, value: Any) -> bool:
        """Tell whether submitting ``value`` may have to wait. For this library's own modules.

        Host synchronization
        --------------------
        None.
        """
        call = self.call
        needs_buffer = isinstance(call, BoundInference) and bool(call.pools_for(value, host=False))
        return needs_buffer or self.context.max_in_flight is not None

    def __repr__(self) -> str:
        return f"<Stage {self.name!r}{' in a thread' if self.in_thread else ''}>"


class Pipeline(Owner):
    """Items pass through stages, in order, several at once; each waits for the stage before on the device.

    Parameters
    ----------
    *stages
        At least one. Where a stage is on another runtime than the one before (host decode, CUDA compute), the program
        awaits in between.
    depth
        How many items may be between the source and the consumer.

    Use it as ``async with Pipeline(...) as pipeline``, on asyncio (uvloop too) or trio. It owns no context: close those
    after it. Leaving the block, for whatever reason, stops the source and waits for what is under way.
    """

    def __init__(self, *stages: Stage, depth: int = 4) -> None:
        super().__init__()
        if not stages or not all(isinstance(stage, Stage) for stage in stages):
            refuse_argument("a pipeline", "stages", stages, "at least one Stage")
        if not is_positive_int(depth):
            refuse_argument("a pipeline", "depth", depth, "a positive int")
        self._stages = stages
        self._depth = depth

    def run(self, source: Source, /, *, blocking_source: bool = False) -> Run[Any]:
        """Send every item of a source through the stages; iterate what this returns for the results, in source order.

        Parameters
        ----------
        source
            An iterable or async iterable. It is read no further than ``depth`` items ahead of the consumer.
        blocking_source
            Read an iterable that may block (a decoder, a file) in a thread.

        Raises
        ------
        BusyError
            A run of this pipeline is not over.
        ClosedError
            The pipeline is not entered.
        PipelineError
            (While iterating) the first failure of source, stage or device, once, after the results before it.

        Stream order
        ------------
        Each stage's work on an item is ordered after the stage before's, and on one context in source order.

        Host synchronization
        --------------------
        None; iterating awaits the last stage only, and the stages before a change of runtime.

        Lifetime
        --------
        An item and its intermediate results live until the work that uses them is complete.
        """
        return self._run_of(_hops(self._stages), source, depth=self._depth, blocking_source=blocking_source)

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave()

    def __repr__(self) -> str:
        return f"<Pipeline {' → '.join(stage.name for stage in self._stages)}, depth {self._depth}>"


def _hops(stages: Sequence[Stage]) -> list[Hop]:
    """Put consecutive stages into one hop, as far as one task can submit them in one go.

    A stage in a thread is a hop of its own. So is every other stage on its context, which would otherwise wait, on the
    loop, for the thread to leave the context.
    """
    threaded = {stage.context for stage in stages if stage.in_thread}
    hops: list[Hop] = []
    together: list[Stage] = []

    def close() -> None:
        if together:
            hops.append(partial(_submit, tuple(together)))
            together.clear()

    before: Stage | None = None
    for stage in stages:
        if before is not None and stage.context.core_stream.runtime is not before.context.core_stream.runtime:
            close()
            hops.append(_cross)
        if stage.context in threaded:
            close()
            hops.append(partial(_submit_in_thread, stage, CapacityLimiter(1)))
        else:
            together.append(stage)
        before = stage
    close()
    return hops


async def _submit(stages: Sequence[Stage], item: Item) -> None:
    """Submit an item to stages one after the other; where a context or the staging pool is full, wait."""
    for stage in stages:
        item.stage = stage.name
        context, after = stage.context, _first_only(item)
        if stage.reserve is not None:
            after = context.pin(after)  # other tasks, and their scopes, run while this one waits
            async with stage.reserve(context) as call:
                handle = await context.submit_async(call, item.value, after=after)
        elif stage.waits(item.value):
            handle = await context.submit_async(stage.call, item.value, after=after)
        else:
            handle = context.submit(stage.call, item.value, after=after)
        item.submitted(stage.name, handle)


async def _submit_in_thread(stage: Stage, limiter: CapacityLimiter, item: Item) -> None:
    """Submit an item from a thread."""
    item.stage = stage.name
    context = stage.context
    after = context.pin(_first_only(item))  # the thread has another current stream than the loop

    def submit() -> EventHandle[Any]:
        with stage.reserve(context) if stage.reserve is not None else nullcontext(stage.call) as call:
            return context.submit_sync(call, item.value, after=after)

    item.submitted(stage.name, await run_sync(submit, limiter=limiter))


async def _cross(item: Item) -> None:
    """Await the stage before: the next one is on another runtime (A7)."""
    item.value = await item.value


def _first_only(item: Item) -> After:
    """Only the first stage may be given something the caller's current stream just made."""
    return None if item.handles else "current"


def _is_asynchronous(call: object) -> bool:
    """Tell whether calling ``call`` gives something to await, as far as can be seen without calling it."""
    while isinstance(call, partial):
        call = call.func
    return any(
        check(one)
        for check in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        for one in (call, getattr(call, "__call__", None))  # noqa: B004
    )
