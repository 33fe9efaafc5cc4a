"""Waiting for several handles: all of them, or each as it finishes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable
from functools import partial

from pixtreme.infer.errors import ContractError
from pixtreme.infer.streams import _loops
from pixtreme.infer.streams._handle import EventHandle
from pixtreme.infer.streams._loops import Notify


async def wait_all[T](handles: Iterable[EventHandle[T]], /) -> list[T]:
    """Wait for every handle and return their values in order.

    Raises
    ------
    StreamFault
        One handle faulted.
    ExceptionGroup
        Several did: one `StreamFault` each. Everything was waited for in both cases.

    Host synchronization
    --------------------
    None: it awaits.
    """
    waited = _checked_handles(handles)
    if all(handle.done() for handle in waited):
        await _loops.checkpoint()
    for handle in waited:
        if not handle.done():
            await handle.completion
    faults = [fault.retrieve() for handle in waited if (fault := handle.completion.fault) is not None]
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ExceptionGroup(f"{len(faults)} of {len(waited)} handles faulted", faults)
    return [handle.unordered_value for handle in waited]


async def as_completed[T](handles: Iterable[EventHandle[T]], /) -> AsyncIterator[EventHandle[T]]:
    """Yield the handles in the order in which they finish; a faulted one is yielded like any other.

    Host synchronization
    --------------------
    None: it awaits.
    """
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

    arrivals = [(handle.completion, partial(arrive, handle)) for handle in waited]
    try:
        for (completion, notify), handle in zip(arrivals, waited, strict=True):
            if not completion.add_waiter(notify):
                arrived.append(handle)
        for _ in waited:
            if arrived:
                await _loops.checkpoint()
            while not arrived:
                waiter = _loops.current().make_waiter()
                parked.append(waiter.notify)
                if not arrived:
                    await waiter.wait()
            yield arrived.popleft()
    finally:
        for completion, notify in arrivals:
            completion.discard_waiter(notify)


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
