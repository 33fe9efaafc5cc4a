"""The engine of pipelines and pools: a source's items, in order, through hops to whoever iterates (A2-A6).

A *hop* is a coroutine that submits one item to one or more stages. Each hop but the first is a task of its own, fed by
the one before; the first is fed by the source. Hops take items in source order, so every stage sees them in order.

Invariants

1. At most ``depth`` items are between the source and the consumer.
2. An item is delivered once, after every item before it; a cancelled wait for it loses nothing.
3. A failure travels with the items: whoever iterates meets it after the results before it, once.
4. A flow is finished when its tasks are over and everything they submitted is complete. Only then does whoever ended it
   go on: neither cancellation nor an early end leaves a task, a thread or work on a stream behind.
5. No cancel scope is open in the consumer's task: a flow works in tasks of the loop's own, so that an ``async with``
   around a ``yield``, a generator left half-way and a timeout around one step nest as everything else does.

Not guaranteed: an end to a source, stage call or device that never returns. They are waited for.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Self

import anyio
from anyio import CapacityLimiter
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from anyio.to_thread import run_sync

from pixtreme.infer.errors import BusyError, ClosedError, ContractError, PipelineError, StreamFault
from pixtreme.infer.streams import EventHandle, HandleStatus, _loops
from pixtreme.infer.streams._completion import Completion

Source = Iterable[Any] | AsyncIterable[Any]


class Item:
    """One item on its way, and every handle that was made for it."""

    __slots__ = ("handles", "index", "stage", "value")

    def __init__(self, index: int, value: Any) -> None:
        self.index = index
        self.value = value  # as the source gave it; then the handle of the last stage
        self.stage = "source"
        self.handles: list[tuple[str, EventHandle[Any]]] = []

    def submitted(self, stage: str, handle: EventHandle[Any]) -> None:
        """A stage took the item."""
        self.value = handle
        self.handles.append((stage, handle))

    def failed_in(self) -> str:
        """Return the stage whose work failed: the first one with a fault, or the one that raised."""
        faulted = (stage for stage, handle in self.handles if handle.status is HandleStatus.FAULTED)
        return next(faulted, self.stage)


@dataclass(frozen=True, slots=True)
class Failure:
    """What comes instead of an item that failed; nothing comes after it."""

    index: int
    stage: str
    cause: Exception


class End(Enum):
    """What comes after the last item."""

    END = "end"


Message = Item | Failure | Literal[End.END]
Hop = Callable[[Item], Awaitable[None]]
Channel = tuple[MemoryObjectSendStream[Message], MemoryObjectReceiveStream[Message]]


class Flow:
    """One run of a source through hops."""

    def __init__(
        self, hops: Sequence[Hop], source: Source, before: Flow | None, *, depth: int, blocking_source: bool
    ) -> None:
        self._before = before  # the run before this one, which may have been left early
        self._hops = hops
        self._source = source
        self._blocking = blocking_source
        self._started = False
        self._room = anyio.Semaphore(depth)
        self._scope = anyio.CancelScope()
        self._intake = anyio.CancelScope()
        self._finished = anyio.Event()
        self._undelivered: deque[Item] = deque()
        self._reported: list[Completion] = []  # of the item delivered last
        self._crash: BaseException | None = None  # no failure of an item: what ends the program
        self._channels: list[Channel] = []

    async def start(self) -> None:
        """Begin to read the source, once, after the flow before has settled."""
        await self._settle_before()
        if not self._started:
            self._started = True
            # What comes in at 0 left the first hop; what comes out of the last is for whoever iterates.
            self._channels = [anyio.create_memory_object_stream[Message](math.inf) for _ in self._hops]
            _loops.current().spawn(self._drive, "pixtreme.infer run")

    async def settle(self) -> None:
        """Stop, and wait until everything is finished; a cancellation waits as well."""
        await self._settle_before()
        if self._started:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._finished.wait()
        for send, receive in self._channels:
            send.close()
            receive.close()

    async def _settle_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            await before.settle()

    async def receive(self) -> Message:
        """Return what comes next for whoever iterates."""
        try:
            return await self._channels[-1][1].receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            if self._crash is not None:
                raise self._crash from None
            raise ClosedError(
                why="a run ends with the pipeline or pool it belongs to, and with the next run there",
                what="the run was iterated after that",
                how="iterate inside the `async with` block, one run to its end before the next",
            ) from None

    def delivered(self, item: Item) -> None:
        """The first undelivered item reaches its consumer."""
        first = self._undelivered.popleft()
        assert first is item
        # Its last stage is over, and so is the device with the others; their own threads may still be about to say so.
        self._reported = [handle.completion for _, handle in item.handles]
        self._room.release()

    def retrieve_faults(self) -> None:
        """The failure is being raised, after `settle`: faults of the items behind it are no news."""
        for item in self._undelivered:
            for _, handle in item.handles:
                handle.exception()

    async def _drive(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as group:
                    for number in range(1, len(self._hops)):
                        group.start_soon(self._relay, number)
                    await self._read()
        except _loops.current().CANCELLED:
            raise  # the loop is ending
        except BaseException as error:
            self._crash = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        finally:
            # Both at once, before the first await: meanwhile items go on to the consumer.
            left = [handle.completion for item in self._undelivered for _, handle in item.handles]
            reported = self._reported
            try:
                with anyio.CancelScope(shield=True):
                    for completion in (*reported, *left):
                        await completion
            finally:
                self._channels[-1][0].close()
                self._finished.set()

    async def _read(self) -> None:
        """Take items from the source through the first hop, until it ends, fails, or somebody stops it."""
        index = 0
        with self._intake:
            try:
                pull = _puller(self._source, blocking=self._blocking)
                while True:
                    await self._room.acquire()
                    value = await pull()
                    if value is End.END:
                        break
                    item = Item(index, value)
                    self._undelivered.append(item)
                    index += 1
                    if not await self._advance(0, item):
                        return
            except Exception as error:
                self._send(0, Failure(index, "source", error))
            else:
                self._send(0, End.END)

    async def _relay(self, number: int) -> None:
        """Take what left the hop before through hop ``number``."""
        receive = self._channels[number - 1][1]
        while True:
            message = await receive.receive()
            if not isinstance(message, Item):
                self._send(number, message)
                return
            if not await self._advance(number, message):
                return

    async def _advance(self, number: int, item: Item) -> bool:
        """Take one item through a hop and pass it on; a failure is passed on in its place and stops the source."""
        try:
            await self._hops[number](item)
        except Exception as error:
            self._send(number, Failure(item.index, item.failed_in(), error))
            self._intake.cancel()
            return False
        self._send(number, item)
        return True

    def _send(self, number: int, message: Message) -> None:
        self._channels[number][0].send_nowait(message)


class Run[T](AsyncIterator[T]):
    """The results of one source, in its order: what ``run()`` and ``map()`` return.

    Iterate it inside the ``async with`` block of its pipeline or pool. It may be left early; `aclose`, leaving that
    block, or the next run waits for what is under way. A cancelled wait loses no result: iterate on.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._next: Message | None = None  # received, and not delivered yet
        self._busy = False
        self.over = False  #: nothing comes any more
        self.interrupted = False  #: the last wait for a result was cancelled: the next run may begin

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next result.

        Raises
        ------
        PipelineError
            The item failed: names it and the stage. What was under way is complete, and the run is over.
        BusyError
            Another task waits for the next result.
        """
        if self._busy:
            raise BusyError(
                why="results come one at a time, in order",
                what="a second task asked for the next result while the first still waits; accepted is one",
                how="iterate in one task and send the results on from there",
            )
        self._busy, self.interrupted = True, False
        try:
            return await self._advance()
        except Exception:
            raise
        except BaseException:
            self.interrupted = True
            raise
        finally:
            self._busy = False

    async def aclose(self) -> None:
        """Stop reading the source and wait until what is under way is complete. Idempotent.

        Host synchronization
        --------------------
        None: it awaits.
        """
        self.over = True
        await self._flow.settle()

    async def _advance(self) -> T:
        if self.over:
            raise StopAsyncIteration
        await self._flow.start()
        if self._next is None:
            self._next = await self._flow.receive()
        message = self._next
        if isinstance(message, Item):
            try:
                value: T = await message.value
            except StreamFault as fault:
                message = Failure(message.index, message.failed_in(), fault)
            else:
                self._next = None
                self._flow.delivered(message)
                return value
        self.over = True
        await self._flow.settle()
        if isinstance(message, Failure):
            self._flow.retrieve_faults()
            raise _pipeline_error(message) from message.cause
        raise StopAsyncIteration


class Owner:
    """What runs belong to: an ``async with`` block, one run at a time."""

    def __init__(self) -> None:
        self._entered = False
        self._flow: Flow | None = None
        self._run: weakref.ref[Run[Any]] | None = None  # a run that was dropped no longer runs

    def _run_of(self, hops: Sequence[Hop], source: Source, *, depth: int, blocking_source: bool) -> Run[Any]:
        """Return a run of ``source``; nothing is read before it is iterated."""
        check_source(source, blocking=blocking_source)
        if not self._entered:
            raise ClosedError(
                why="a run belongs to an entered pipeline or pool, which waits for it on leaving",
                what=f"{self!r} is not entered; accepted is a run inside its `async with` block",
                how="write `async with ... as pipeline:` around it",
            )
        current = self._run() if self._run is not None else None
        if current is not None and not (current.over or current.interrupted):
            raise BusyError(
                why="two runs at once would mix their items on the streams",
                what=f"{self!r} has a run that is not over; accepted is one at a time",
                how="iterate it to its end, leave its loop, or `await run.aclose()` first; or use a second pipeline",
            )
        if current is not None:
            current.over = True
        flow = Flow(hops, source, self._flow, depth=depth, blocking_source=blocking_source)
        run: Run[Any] = Run(flow)
        self._flow, self._run = flow, weakref.ref(run)
        return run

    async def _enter(self) -> None:
        if self._entered:
            raise BusyError(
                why="a pipeline or pool is entered once at a time",
                what=f"{self!r} is entered already",
                how="leave the other `async with` block first",
            )
        self._entered = True
        await _loops.checkpoint()

    async def _leave(self) -> None:
        """Finish the run that is under way."""
        flow, self._flow, self._run = self._flow, None, None
        self._entered = False
        if flow is not None:
            await flow.settle()


def _pipeline_error(failure: Failure) -> PipelineError:
    error = PipelineError(
        why="an item of the run failed, so the run ended with it",
        what=f"item {failure.index}, stage {failure.stage!r}: {failure.cause!r}",
        how="look at the cause; results before it were delivered, and a new run can begin after them",
    )
    error.index, error.stage = failure.index, failure.stage
    return error


def _puller(source: Source, *, blocking: bool) -> Callable[[], Awaitable[Any]]:
    """Return a function that takes the next value of a source, or its end."""
    if isinstance(source, AsyncIterable):
        asynchronous = aiter(source)

        async def pull_async() -> Any:
            return await anext(asynchronous, End.END)

        return pull_async
    synchronous = iter(source)

    async def pull() -> Any:
        return next(synchronous, End.END)

    if not blocking:
        return pull
    limiter = CapacityLimiter(1)  # never the one that everybody shares (S37)

    async def pull_in_thread() -> Any:
        return await run_sync(next, synchronous, End.END, limiter=limiter)

    return pull_in_thread


def check_source(source: object, *, blocking: object) -> None:
    """Reject what cannot be iterated."""
    if not isinstance(source, Iterable | AsyncIterable) or isinstance(source, str | bytes):
        raise ContractError(
            why="a run takes its items from a source",
            what=f"received source={source!r}; accepted is an iterable or async iterable of items",
            how="pass an iterable, such as a list or generator of frames",
        )
    if not isinstance(blocking, bool) or (blocking and isinstance(source, AsyncIterable)):
        raise ContractError(
            why="only a plain iterable can be read in a thread",
            what=f"received blocking_source={blocking!r} for {type(source).__qualname__}; accepted is True for a plain "
            "iterable, else False",
            how="leave blocking_source out for an async source",
        )
