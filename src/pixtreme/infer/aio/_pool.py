"""`StreamPool`: one stateless module on several streams (A8-A10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from pixtreme.infer.aio._flow import Item, Owner, Run, Source
from pixtreme.infer.contracts import StatelessInferenceFactory
from pixtreme.infer.declarations import Precision, TemporalFamilyContract, TemporalOpenContract
from pixtreme.infer.errors import ClosedError, ContractError, StreamFault, refuse_argument
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.streams import BoundInference, EventHandle, StreamContext, _loops
from pixtreme.infer.streams._copies import Lease, Pixels, StagingPool, lease_blocking, lease_waiting
from pixtreme.infer.streams._planning import After
from pixtreme.infer.streams._request import Request
from pixtreme.infer.streams._semaphore import FairSemaphore, take_first, take_first_blocking

_UNBOUNDED_AHEAD = 2  # how far map() goes on a member without a bound: one that runs and one that waits


class StreamPool[F: FrameLike](Owner):
    """Members, each a context with an opened instance; a request goes to the member with the fewest in flight.

    Made by `open`; used with ``with`` or ``async with``, which close it. `map` needs ``async with``.

    A member that faults is taken out, and the others go on.
    """

    def __init__(self, members: Sequence[BoundInference[F]]) -> None:
        super().__init__()
        self._members = tuple(members)
        self._turn = 0

    @classmethod
    def open[ArtifactIdentity, G: FrameLike](
        cls,
        devices: Sequence[str | int],
        factory: StatelessInferenceFactory[ArtifactIdentity, G],
        artifact: ArtifactIdentity,
        /,
        *,
        precision: Precision,
        input_hw: tuple[int, int],
        max_in_flight: int | None = None,
    ) -> StreamPool[G]:
        """Open one context and one instance for each entry of ``devices``.

        Parameters
        ----------
        devices
            Names as for `StreamContext.open`; ``["cuda:0"] * 3`` is three streams on one device.
        factory, artifact, precision, input_hw
            As for `StreamContext.bind`; a stateless factory.
        max_in_flight
            Bound of each context; at the bounds of all `submit` raises `BusyError`.

        Raises
        ------
        ContractError
            A temporal factory: a sequence's state lives in one instance. Or another argument is malformed.
        ContextError
            A device cannot be used.

        After an error nothing is left open.

        Host synchronization
        --------------------
        As the factory's ``open``, once a member; not for a thread that runs an event loop.
        """
        _loops.warn_of_blocking("StreamPool.open()", "`await StreamPool.open_async(...)`")
        if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
            refuse_argument("a pool", "devices", devices, "a sequence of at least one device name")
        _refuse_temporal(getattr(factory, "family_contract", None))
        members: list[BoundInference[G]] = []
        with ExitStack() as stack:
            for number, device in enumerate(devices):
                context = StreamContext.open(device, name=f"member {number}", max_in_flight=max_in_flight)
                stack.enter_context(context)
                members.append(context.bind(factory, artifact, precision=precision, input_hw=input_hw))
                _refuse_temporal(members[-1].contract)
            stack.pop_all()
        return StreamPool(members)

    @classmethod
    async def open_async[ArtifactIdentity, G: FrameLike](
        cls,
        devices: Sequence[str | int],
        factory: StatelessInferenceFactory[ArtifactIdentity, G],
        artifact: ArtifactIdentity,
        /,
        *,
        precision: Precision,
        input_hw: tuple[int, int],
        max_in_flight: int | None = None,
    ) -> StreamPool[G]:
        """Like `open`, in a thread of its own, without blocking the event loop.

        Cancelling it takes effect once the pool is open, and closes it again.

        Host synchronization
        --------------------
        None: it awaits.
        """
        opening = partial(
            cls.open, devices, factory, artifact, precision=precision, input_hw=input_hw, max_in_flight=max_in_flight
        )
        return await _loops.open_in_thread(opening)

    @property
    def members(self) -> tuple[BoundInference[F], ...]:
        """Every member, those that were taken out as well."""
        return self._members

    @property
    def live(self) -> tuple[BoundInference[F], ...]:
        """The members that take requests."""
        return tuple(member for member in self._members if _takes_requests(member))

    @property
    def in_flight(self) -> int:
        """How many handles of all members are pending."""
        return sum(member.context.in_flight for member in self._members)

    def submit(self, frame: F | HostFrame | Pixels | EventHandle[F], /, **params: Any) -> EventHandle[F]:
        """Enqueue one request on the member with the fewest in flight.

        Raises
        ------
        StreamFault
            No member is left; the cause is the first one's.
        ClosedError
            The pool is closed.
        BusyError
            Every member left is at its bound.
        ContractError
            As the module says; nothing was enqueued.

        Stream order
        ------------
        As `StreamContext.submit` on that member.

        Lifetime
        --------
        As `StreamContext.submit` on that member.

        Host synchronization
        --------------------
        None.
        """
        while True:
            member = self._idlest_first()[0]
            try:
                return member(frame, **params)
            except StreamFault:
                if not member.context.faulted:
                    raise  # the frame's own fault

    def submit_sync(
        self, frame: F | HostFrame | Pixels | EventHandle[F], /, *, after: After = "current", **params: Any
    ) -> EventHandle[F]:
        """Like `submit`, but where every member is at its bound wait, on the host, for the first that is not.

        Stream order
        ------------
        As `submit`.

        Lifetime
        --------
        As `submit`.

        Host synchronization
        --------------------
        Blocks while every member is at its bound; refused on a thread that runs an event loop.
        """
        _loops.refuse_to_block("submit_sync()", "`await pool.submit_async(...)`")
        while True:
            attempt = _Attempt(self._idlest_first(), frame, after, host=False)
            with lease_blocking(attempt.pools) as lease:
                slots, before = attempt.slots_with(lease)
                if (handle := attempt.submit(take_first_blocking(slots, before), params)) is not None:
                    return handle

    async def submit_async(
        self, frame: F | HostFrame | Pixels | EventHandle[F], /, *, after: After = "current", **params: Any
    ) -> EventHandle[F]:
        """Like `submit`, but where every member is at its bound wait, without blocking, for the first that is not.

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
        return await self._begin(frame, False, after, params)

    async def run(
        self,
        frame: F | HostFrame | Pixels | EventHandle[F],
        /,
        *,
        host: bool = False,
        after: After = "current",
        **params: Any,
    ) -> Any:
        """Send one request to the first member that is free and return its result; as `BoundInference.run`.

        Stream order
        ------------
        As `submit`.

        Host synchronization
        --------------------
        None: it awaits. Cancelling it abandons the wait, not the work.
        """
        return await (await self._begin(frame, host, after, params))

    def map(self, source: Source, /, *, blocking_source: bool = False, host: bool = False, **params: Any) -> Run[Any]:
        """Send every frame of a source through the pool; iterate what this returns for the results, in source order.

        Parameters
        ----------
        source, blocking_source
            As for `Pipeline.run`.
        host
            Bring the results to the host, on every device.
        **params
            Passed with every request.

        As many frames are under way as the members' bounds allow, two a member without a bound.

        Raises
        ------
        BusyError, ClosedError, PipelineError
            As `Pipeline.run`; the stage is the member's context.

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
        depth = sum(member.context.max_in_flight or _UNBOUNDED_AHEAD for member in self._members)
        hop = partial(self._submit_item, host, params)
        return self._run_of([hop], source, depth=depth, blocking_source=blocking_source)

    def close(self) -> None:
        """Close every context. Idempotent; the first error is raised at the end.

        Host synchronization
        --------------------
        Blocks until the work is over (`aclose` does not).
        """
        with ExitStack() as stack:
            for member in self._members:
                stack.callback(member.context.close)

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop.

        Host synchronization
        --------------------
        None while draining.
        """
        first: BaseException | None = None
        for member in self._members:
            try:
                await member.context.aclose()
            except BaseException as error:  # a cancellation, too, must not keep the others open
                first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._leave()
        finally:
            await self.aclose()

    def __repr__(self) -> str:
        return f"<StreamPool of {len(self.live)} live members of {len(self._members)}, {self.in_flight} in flight>"

    async def _submit_item(self, host: bool, params: dict[str, Any], item: Item) -> None:
        item.stage = repr(self)
        handle = await self._begin(item.value, host, "current", params)
        item.submitted(handle.context.name, handle)

    async def _begin(self, frame: Any, host: bool, after: After, params: dict[str, Any]) -> EventHandle[Any]:
        while True:
            attempt = _Attempt(self._idlest_first(), frame, after, host=host)
            with await lease_waiting(attempt.pools) as lease:
                slots, before = attempt.slots_with(lease)
                if (handle := attempt.submit(await take_first(slots, before), params)) is not None:
                    return handle

    def _idlest_first(self) -> list[BoundInference[F]]:
        """Return the live members, the one with the fewest in flight first; they take turns where several have."""
        live = self.live
        if not live:
            self._refuse_empty()
        self._turn += 1
        start = self._turn % len(live)
        return sorted((*live[start:], *live[:start]), key=lambda member: member.context.in_flight)

    def _refuse_empty(self) -> NoReturn:
        for member in self._members:
            if not member.context.closed:
                member.context.check_usable()  # raises the first cause
        raise ClosedError(
            why="a closed pool takes no requests",
            what=f"{self!r} was used after it was closed",
            how="open a new pool",
        )


class _Attempt:
    """One request on its way to the first member that is free; where members need a staging buffer, with that first."""

    def __init__(self, members: list[BoundInference[Any]], frame: Any, after: After, *, host: bool) -> None:
        self._frame = frame
        self._members = members
        self._pinned = {member: member.context.pin(after) for member in members}  # other tasks' scopes run meanwhile
        self._requests = {member: Request(member, host=host) for member in members}  # one may be closed meanwhile
        self._needed = {member: member.pools_for(frame, host) for member in members}
        self._lease: Lease | None = None

    @property
    def pools(self) -> list[StagingPool]:
        """The pools of which one buffer will do; none where a member needs none."""
        needed = self._needed.values()
        return list(dict.fromkeys(pool for pools in needed for pool in pools)) if all(needed) else []

    def slots_with(self, lease: Lease | None) -> tuple[list[FairSemaphore], Callable[[], object]]:
        """Return what to wait for: a slot of the members that the buffer, if any, is for; and what to call before."""
        self._lease = lease
        if lease is not None:
            self._members = [member for member in self._members if lease.owner in self._needed[member]]
        contexts = [member.context for member in self._members]
        return [context.slots for context in contexts], partial(_ensure_reporting, contexts)

    def submit(self, taken: int, params: dict[str, Any]) -> EventHandle[Any] | None:
        """Submit on a slot of a member; None where it closed or faulted meanwhile."""
        member = self._members[taken]
        request = self._requests[member]
        request.lease = self._lease
        try:
            return member.context.submit_promised(request, (self._frame,), params, self._pinned[member])
        except (StreamFault, ClosedError):
            if all(_takes_requests(member) for member in self._members):
                raise  # the frame's own fault
            return None


def _ensure_reporting(contexts: Sequence[StreamContext]) -> None:
    for context in contexts:
        context.core_stream.ensure_reporting()


def _takes_requests(member: BoundInference[Any]) -> bool:
    return not (member.closed or member.context.closed or member.context.faulted)


def _refuse_temporal(contract: object) -> None:
    if isinstance(contract, TemporalFamilyContract | TemporalOpenContract):
        raise ContractError(
            why="a sequence's state lives in one instance, and a pool gives each frame to another one",
            what="received a temporal factory; accepted is a stateless one",
            how="bind it to one context, or give each sequence a context of its own",
        )
