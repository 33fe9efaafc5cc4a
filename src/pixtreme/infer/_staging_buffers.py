"""Page-locked buffers of a device, a bounded number, and the copies that borrow them (A12). Public via `staging`."""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import Lock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import BusyError, ContractError
from pixtreme.infer.runtimes import Runtime, runtime_for
from pixtreme.infer.streams import StreamContext
from pixtreme.infer.streams._semaphore import FairSemaphore

Pixels = npt.NDArray[Any]
Copy = Callable[..., Any]
_BUFFERS = 8
_pools: dict[str, StagingPool] = {}
_pools_lock = Lock()


class StagingPool:
    """The page-locked buffers of one device, made when first needed and used again. Made by `pool`.

    Invariants

    1. At most ``limit`` buffers are out; a buffer is out from before its copy is enqueued until the event behind the
       copy is complete.
    2. At most ``limit`` buffers exist: one that is too small is let go for a larger one.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.slots = FairSemaphore(_BUFFERS)
        self._lock = Lock()
        self._free: list[Pixels] = []  # by size

    @property
    def limit(self) -> int:
        """How many buffers there may be. Lowering it takes effect as buffers come back."""
        return self.slots.limit or 0

    @limit.setter
    def limit(self, buffers: object) -> None:
        if not is_positive_int(buffers):
            raise ContractError(
                why="a pool holds a number of buffers",
                what=f"received limit={buffers!r}; accepted is a positive int",
                how="set limit to how many copies may be under way at once",
            )
        self.slots.limit = buffers
        self.slots.grant()

    @property
    def in_use(self) -> int:
        """How many buffers are out, or promised to a copy."""
        return self.slots.out

    def clear(self) -> None:
        """Let go of the buffers that are not in use.

        Host synchronization
        --------------------
        None.
        """
        with self._lock:
            self._free.clear()

    def __repr__(self) -> str:
        return f"<StagingPool of {self._runtime.device}: {self.in_use} of {self.limit} buffers in use>"

    def take(self, size: int) -> Pixels:
        """Return the smallest free buffer that holds ``size`` bytes, or a new one; the caller has a slot.

        Host synchronization
        --------------------
        None; the memory is allocated where no buffer is free.
        """
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.nbytes >= size:
                    return self._free.pop(index)
            if self._free:
                self._free.pop()  # too small: it makes room
        return self._runtime.staging_buffer(size)  # type: ignore[no-any-return]

    def give_back(self, buffer: Pixels | None) -> None:
        """Take a buffer back with its slot.

        Host synchronization
        --------------------
        None.
        """
        if buffer is not None:
            with self._lock:
                if len(self._free) < self.limit:
                    self._free.append(buffer)
                    self._free.sort(key=lambda free: free.nbytes)
        self.slots.give_back()


def pool(device: str | int | StreamContext) -> StagingPool:
    """Return the pool of a device, named as for `StreamContext.open` or by a context on it.

    Raises
    ------
    ContextError
        The device cannot be used.

    Host synchronization
    --------------------
    None.
    """
    runtime = device.core_stream.runtime if isinstance(device, StreamContext) else runtime_for(device)
    with _pools_lock:
        return _pools.setdefault(runtime.device, StagingPool(runtime))


class Lease:
    """A slot of a pool, and the buffer in it, until the copy is over or never came to be."""

    def __init__(self, owner: StagingPool) -> None:
        self.owner = owner
        self._buffer: Pixels | None = None
        self._view: Pixels | None = None
        self.taken = False  # by a copy that was enqueued, whose event gives it back

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Pixels:
        """Return the buffer as an array."""
        size = math.prod(shape) * dtype.itemsize
        self._buffer = self.owner.take(size)
        self._view = self._buffer[:size].view(dtype).reshape(shape)
        return self._view

    def finish(self, fill: Pixels | None) -> None:
        """The copy is over: fill the caller's array, where there is one, and give the buffer back."""
        try:
            if fill is not None and self._view is not None:
                np.copyto(fill, self._view)
        finally:
            self.release()

    def release(self) -> None:
        """Give the buffer back."""
        buffer, self._buffer, self._view = self._buffer, None, None
        self.owner.give_back(buffer)


def lease_for(context: StreamContext) -> Lease:
    """Return a buffer that is free now.

    Raises
    ------
    BusyError
        Every buffer is in use.
    """
    owner = pool(context)
    if not owner.slots.try_take():
        raise BusyError(
            why="page-locked memory is bounded",
            what=f"{owner!r}; accepted is a free one",
            how="await an earlier copy first, use upload_async or download_async (or _sync without a loop), or raise "
            "staging.pool(device).limit",
        )
    return Lease(owner)


class Reservation:
    """A copy with its buffer: entering waits for one, leaving gives it back unless the copy has taken it.

    Enter it with ``with``, which blocks, or ``async with``; both give the callable to submit. Where the device needs no
    buffers nothing waits. Made by `staging.Upload.reserve` and `staging.Download.reserve`.
    """

    def __init__(self, context: StreamContext, copy: Copy, name: str) -> None:
        self.__qualname__ = name  # what messages call the submission
        self._copy = copy
        self._pool = pool(context) if context.core_stream.runtime.needs_staging else None
        self._lease: Lease | None = None

    def __call__(self, source: Any, /) -> Any:
        """Enqueue the copy inside ``use()`` or a submission.

        Stream order
        ------------
        As `staging.copy_in` and `staging.copy_out`.

        Host synchronization
        --------------------
        As `staging.copy_in` and `staging.copy_out`.

        Lifetime
        --------
        As `staging.copy_in` and `staging.copy_out`.
        """
        return self._copy(source, self._lease)

    def __enter__(self) -> Self:
        if self._pool is not None:
            self._pool.slots.take_blocking(_nothing)
            self._lease = Lease(self._pool)
        return self

    async def __aenter__(self) -> Self:
        if self._pool is not None:
            await self._pool.slots.take_waiting(_nothing)
            self._lease = Lease(self._pool)
        return self

    def __exit__(self, *_: object) -> None:
        lease, self._lease = self._lease, None
        if lease is not None and not lease.taken:
            lease.release()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def _nothing() -> None:
    """Copies under way are reported without being asked for: each made sure of it."""
