"""Host pixels in and out of a device, by way of page-locked buffers, a bounded number for each device (A11, A12).

Everything here is called inside a scope of the stream it is given. `staging` and `StreamContext` make it public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import BusyError, ContractError
from pixtreme.infer.frames import FrameLike, HostFrame, with_pixels
from pixtreme.infer.runtimes import Runtime
from pixtreme.infer.streams import _scopes
from pixtreme.infer.streams._semaphore import FairSemaphore, take_first, take_first_blocking
from pixtreme.infer.streams._stream import Stream

Pixels = npt.NDArray[Any]
Copy = Callable[..., Any]
_BUFFERS = 8
_pools: dict[str, StagingPool] = {}
_pools_lock = Lock()


class StagingPool:
    """The page-locked buffers of one device, made when first needed and used again. Made by `pool`.

    Invariants

    1. At most ``limit`` leases are out; a lease is out from before its copy is enqueued until the event behind the copy
       is complete.
    2. A lease has one buffer, or two where what comes out is larger than what went in. At most ``limit`` free ones are
       kept: one that is too small is let go for a larger one.
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

    def give_back(self, *buffers: Pixels) -> None:
        """Take buffers back with their slot.

        Host synchronization
        --------------------
        None.
        """
        with self._lock:
            self._free = sorted((*self._free, *buffers), key=lambda free: free.nbytes)[-self.limit :]
        self.slots.give_back()


def pool_of(runtime: Runtime) -> StagingPool:
    """Return the pool of a device; there is one."""
    with _pools_lock:
        return _pools.setdefault(runtime.device, StagingPool(runtime))


class Lease:
    """A slot of a pool, and the buffers in it, until the copies are over or, on leaving ``with``, never came to be."""

    def __init__(self, owner: StagingPool) -> None:
        self.owner = owner
        self.taken = False  # by a copy that was enqueued, whose event gives it back
        self._buffers: list[Pixels] = []
        self._under_way = 0

    def view(self, stream: Stream, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Pixels | None = None) -> Pixels:
        """Return a buffer as an array; from here on the submission's event gives it back, come what may.

        ``fill`` is the caller's array, which the host fills from the buffer once the copy is over. A second copy may
        use the buffer of the first: it comes after it on the stream.
        """
        size = math.prod(shape) * dtype.itemsize
        if not self._buffers or self._buffers[-1].nbytes < size:
            self._buffers.append(self.owner.take(size))
        view = self._buffers[-1][:size].view(dtype).reshape(shape)
        self.taken = True
        self._under_way += 1
        _scopes.add_epilogue(stream, partial(self._finish, fill, view), fills_host=fill is not None)
        stream.ensure_reporting()  # buffers come back without anybody waiting for the handle
        return view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.taken:
            self.release()

    def release(self) -> None:
        """Give the slot back, and the buffers."""
        buffers, self._buffers = self._buffers, []
        self.owner.give_back(*buffers)

    def _finish(self, fill: Pixels | None, view: Pixels) -> None:
        try:
            if fill is not None:
                np.copyto(fill, view)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.release()


def lease_for(runtime: Runtime) -> Lease:
    """Return a buffer that is free now.

    Raises
    ------
    BusyError
        Every buffer is in use.
    """
    owner = pool_of(runtime)
    if not owner.slots.try_take():
        raise BusyError(
            why="page-locked memory is bounded",
            what=f"{owner!r}; accepted is a free one",
            how="await an earlier copy first, use a form that waits (bound.run, upload_async, download_async, or _sync "
            "without a loop), or raise staging.pool(device).limit",
        )
    return Lease(owner)


def lease_blocking(pools: Sequence[StagingPool]) -> AbstractContextManager[Lease | None]:
    """Block until one of several pools has a free buffer and return it for a ``with``; of no pools, none."""
    if not pools:
        return nullcontext()
    return Lease(pools[take_first_blocking([pool.slots for pool in pools], _nothing)])


async def lease_waiting(pools: Sequence[StagingPool]) -> AbstractContextManager[Lease | None]:
    """Like `lease_blocking`, but wait on the event loop."""
    if not pools:
        return nullcontext()
    return Lease(pools[await take_first([pool.slots for pool in pools], _nothing)])


def _nothing() -> None:
    """Copies under way are reported without being asked for: each made sure of it."""


def copied_in(stream: Stream, source: Pixels, lease: Lease | None = None) -> Any:
    """Enqueue a copy of a host array, as it is now, to the device; return the native array.

    Only pixels that earlier work of the host runtime is still to write are copied in stream order.
    """
    runtime = stream.runtime
    if not runtime.needs_staging and runtime.bare(source) is source:
        return source.copy()
    target = runtime.empty(source.shape, source.dtype)
    view = source
    if runtime.needs_staging:
        view = (lease or lease_for(runtime)).view(stream, source.shape, source.dtype)
        np.copyto(view, source)
    runtime.copy_from_host(target, view, stream.native)
    return target


def copied_out(stream: Stream, source: object, lease: Lease | None = None) -> Pixels:
    """Enqueue a copy of a frame or native array to the host; return the array that the host fills."""
    runtime = stream.runtime
    array = runtime.import_array(source, name="frame")
    result = np.empty(tuple(array.shape), array.dtype)
    view = result
    if runtime.needs_staging:
        view = (lease or lease_for(runtime)).view(stream, result.shape, result.dtype, fill=result)
    runtime.copy_to_host(view, array, stream.native)
    return result


def frame_in(stream: Stream, frame: HostFrame, lease: Lease | None = None) -> FrameLike:
    """Return a frame of the device with the pixels that a host frame has now.

    Where they are still to be written by earlier work of the host runtime, the frame itself.
    """
    runtime = stream.runtime
    if runtime.needs_staging:
        data = copied_in(stream, frame.data, lease)
        return runtime.make_frame(data, **labels_of(frame))
    return with_pixels(frame, frame.data.copy()) if runtime.bare(frame) is frame else frame


def to_host(value: Any, lease: Lease | None = None) -> Any:
    """Bring a frame or native array to the host; what is there already is returned itself."""
    stream = _scopes.current_stream("pixels are copied on the current stream")
    if not stream.runtime.needs_staging:
        stream.runtime.import_array(value, name="value")
        return value
    pixels = copied_out(stream, value, lease)
    return HostFrame(data=pixels, **labels_of(value)) if isinstance(value, FrameLike) else pixels


def from_host(value: Any) -> Any:
    """Bring a host frame or NumPy array to the device, as it is now."""
    stream = _scopes.current_stream("pixels are copied on the current stream")
    if isinstance(value, HostFrame):
        return frame_in(stream, value)
    if not isinstance(value, np.ndarray):
        raise ContractError(
            why="only host pixels are brought to a device",
            what=f"received {value!r:.200}; accepted are numpy.ndarray and HostFrame",
            how="pass numpy.asarray(data), or pass the value itself where it is on the device already",
        )
    return copied_in(stream, value)


def with_guard(runtime: Runtime, made: FrameLike, array: Any) -> FrameLike:
    """Return a frame that was made of pixels still to be written, guarded as they are."""
    return made if runtime.bare(array) is array else with_pixels(cast(HostFrame, made), array)


def labels_of(frame: FrameLike) -> dict[str, Any]:
    """Return a frame's metadata as keywords."""
    return {name: getattr(frame, name) for name in ("channels", "colorspace", "gamma", "matrix")}
