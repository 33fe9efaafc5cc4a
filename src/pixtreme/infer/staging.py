"""Pixels in and out of a device: copies that the host does not wait for (A11, A12).

On CUDA they go through page-locked buffers of a bounded pool, one pool a device; the host runtime copies directly.

* `upload` and `download` submit to a context and return handles. With an empty pool they raise `BusyError`;
  `upload_sync`, `download_sync` block and `upload_async`, `download_async` wait until a buffer is free.
* `copy_in` and `copy_out` are the same copies for code that already runs inside ``use()``: what a pipeline's stage or
  a submitted function calls.

A downloaded array is filled by the host, on the thread that reports completions, before its handle counts as complete:
await it before passing the array on. A pending one is refused by every other stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import BusyError, ContextError, ContractError
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.streams import EventHandle, StreamContext, loops
from pixtreme.infer.streams.devices import runtime_for
from pixtreme.infer.streams.runtime import Runtime
from pixtreme.infer.streams.slots import Slots

__all__ = (
    "StagingPool",
    "copy_in",
    "copy_out",
    "download",
    "download_async",
    "download_sync",
    "pool",
    "upload",
    "upload_async",
    "upload_sync",
)

Pixels = npt.NDArray[Any]
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
        self._slots = Slots(_BUFFERS)
        self._lock = Lock()
        self._free: list[Pixels] = []  # by size

    @property
    def limit(self) -> int:
        """How many buffers there may be. Lowering it takes effect as buffers come back."""
        return self._slots.limit or 0

    @limit.setter
    def limit(self, buffers: object) -> None:
        if not is_positive_int(buffers):
            raise ContractError(
                why="a pool holds a number of buffers",
                what=f"received limit={buffers!r}; accepted is a positive int",
                how="set limit to how many copies may be under way at once",
            )
        self._slots.limit = buffers
        self._slots.grant()

    @property
    def in_use(self) -> int:
        """How many buffers are out, or promised to a copy."""
        return self._slots.out

    def clear(self) -> None:
        """Let go of the buffers that are not in use."""
        with self._lock:
            self._free.clear()

    def __repr__(self) -> str:
        return f"<StagingPool of {self._runtime.device}: {self.in_use} of {self.limit} buffers in use>"

    def _buffer(self, size: int) -> Pixels:
        """Return the smallest free buffer that holds ``size`` bytes, or a new one; the caller has a slot."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.nbytes >= size:
                    return self._free.pop(index)
            if self._free:
                self._free.pop()  # too small: it makes room
        return self._runtime.staging_buffer(size)  # type: ignore[no-any-return]

    def _return(self, buffer: Pixels | None) -> None:
        """Take a buffer back with its slot."""
        if buffer is not None:
            with self._lock:
                if len(self._free) < self.limit:
                    self._free.append(buffer)
                    self._free.sort(key=lambda free: free.nbytes)
        self._slots.give_back()


def pool(device: str | int | StreamContext) -> StagingPool:
    """Return the pool of a device, named as for `StreamContext.open` or by a context on it.

    Raises
    ------
    ContextError
        The device cannot be used.

    Host synchronization
        None.
    """
    runtime = device._runtime if isinstance(device, StreamContext) else runtime_for(device)
    with _pools_lock:
        return _pools.setdefault(runtime.device, StagingPool(runtime))


def copy_in(array: Pixels, /, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None) -> FrameLike:
    """Enqueue a copy of an image to the current context's device; call it inside ``use()`` or a submission.

    Parameters
    ----------
    array
        NumPy array, shape ``(height, width, channels)``; float32, float16, uint8, uint16 or uint32.
    channels, colorspace, gamma, matrix
        The frame's metadata.

    Returns
    -------
    FrameLike
        A frame on the device whose pixels arrive in stream order.

    Raises
    ------
    ContractError
        Array or metadata are malformed; nothing was enqueued.
    ContextError
        This thread is inside no scope of a context.
    BusyError
        Every buffer of the pool is in use; nothing was enqueued.

    Stream order
        On the current context's stream.
    Host synchronization
        None. On CUDA the image is copied to a page-locked buffer before this returns.
    Lifetime
        Leave the array unchanged until the submission's handle is complete.
    """
    context = StreamContext.current()
    source = HostFrame(data=array, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
    return _copied_in(context, source)


def copy_out(frame: FrameLike, /) -> Pixels:
    """Enqueue a copy of a frame, or native array, to the host; call it inside ``use()`` or a submission.

    Returns
    -------
    numpy.ndarray
        Shape ``(height, width, channels)``; filled when the handle of the submission it belongs to is complete.

    Raises
    ------
    ContractError
        ``frame`` cannot be read on this device.
    ContextError, BusyError
        As `copy_in`.

    Stream order
        On the current context's stream.
    Host synchronization
        None. On CUDA the reporting thread fills the array, before the handle is complete.
    Lifetime
        The frame lives until the copy is done.
    """
    return _copied_out(StreamContext.current(), frame)


def upload(
    context: StreamContext, array: Pixels, /, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None
) -> EventHandle[FrameLike]:
    """Submit `copy_in` and return its handle.

    Raises
    ------
    ContractError, BusyError
        As `copy_in` and `StreamContext.submit`; nothing was enqueued.

    Stream order, lifetime
        As `copy_in`.
    Host synchronization
        None.
    """
    source = HostFrame(data=array, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
    return context.submit(_copied_in, context, source)


def download(context: StreamContext, frame: FrameLike | EventHandle[FrameLike], /) -> EventHandle[Pixels]:
    """Submit `copy_out` and return its handle.

    Raises
    ------
    ContractError, ContextError, BusyError
        As `copy_out` and `StreamContext.submit`; nothing was enqueued.

    Stream order, lifetime
        As `copy_out`.
    Host synchronization
        None.
    """
    return context.submit(_copied_out, context, frame)


def upload_sync(
    context: StreamContext, array: Pixels, /, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None
) -> EventHandle[FrameLike]:
    """Like `upload`, but wait on the host for a buffer and a slot of the context; given in order of asking.

    Host synchronization
        Blocks while all are in use; refused on a thread that runs an event loop.
    """
    source = HostFrame(data=array, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
    return _submitted_sync(context, _copied_in, source)


def download_sync(context: StreamContext, frame: FrameLike | EventHandle[FrameLike], /) -> EventHandle[Pixels]:
    """Like `download`, but wait as `upload_sync` does.

    Host synchronization
        As `upload_sync`.
    """
    return _submitted_sync(context, _copied_out, frame)


async def upload_async(
    context: StreamContext, array: Pixels, /, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None
) -> EventHandle[FrameLike]:
    """Like `upload`, but wait for a buffer and a slot of the context without blocking; given in order of asking.

    Host synchronization
        None.
    """
    source = HostFrame(data=array, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
    return await _submitted_async(context, _copied_in, source)


async def download_async(context: StreamContext, frame: FrameLike | EventHandle[FrameLike], /) -> EventHandle[Pixels]:
    """Like `download`, but wait as `upload_async` does.

    Host synchronization
        None.
    """
    return await _submitted_async(context, _copied_out, frame)


class _Lease:
    """A slot of a pool, and the buffer in it, until the copy is over or never came to be."""

    def __init__(self, owner: StagingPool) -> None:
        self.owner = owner
        self._buffer: Pixels | None = None
        self._view: Pixels | None = None
        self.taken = False  # by a copy that was enqueued, whose event gives it back

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Pixels:
        """Return the buffer as an array."""
        size = int(np.prod(shape)) * dtype.itemsize
        self._buffer = self.owner._buffer(size)
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
        self.owner._return(buffer)


_reserved: ContextVar[_Lease | None] = ContextVar("_reserved", default=None)


def takes_a_buffer(context: StreamContext, call: object) -> bool:
    """Tell whether ``call`` is `copy_in` or `copy_out`, perhaps with arguments, and needs a buffer of the device."""
    while isinstance(call, partial):
        call = call.func
    return context.device != "cpu" and call in (copy_in, copy_out)


@contextmanager
def reserved_sync(context: StreamContext) -> Iterator[None]:
    """Block until a buffer is free, for the copy that the block submits."""
    owner = pool(context)
    owner._slots.take_blocking(_nothing)
    with _held(_Lease(owner)):
        yield


@asynccontextmanager
async def reserved_async(context: StreamContext) -> AsyncIterator[None]:
    """Wait until a buffer is free, for the copy that the block submits."""
    owner = pool(context)
    await owner._slots.take_waiting(_nothing)
    with _held(_Lease(owner)):
        yield


@contextmanager
def _held(lease: _Lease) -> Iterator[None]:
    token = _reserved.set(lease)
    try:
        yield
    finally:
        _reserved.reset(token)
        if not lease.taken:
            lease.release()


def _copied_in(context: StreamContext, source: HostFrame) -> FrameLike:
    runtime = context._runtime
    target = runtime.empty(source.shape, source.dtype)
    frame = runtime.make_frame(
        target,
        channels=source.channels,
        colorspace=source.colorspace,
        gamma=source.gamma,
        matrix=source.matrix,
    )
    if context.device == "cpu":
        runtime.copy(target, source.data, context.stream)
        return frame
    view = _staged(context, source.shape, source.dtype)
    np.copyto(view, source.data)
    runtime.copy_from_host(target, view, context.stream)
    return frame


def _copied_out(context: StreamContext, frame: FrameLike) -> Pixels:
    runtime = context._runtime
    array = runtime.import_array(frame, name="frame")
    result = np.empty(tuple(array.shape), array.dtype)
    if context.device == "cpu":
        runtime.copy(result, array, context.stream)
        return result
    view = _staged(context, result.shape, result.dtype, fill=result)
    runtime.copy_to_host(view, array, context.stream)
    return result


def _staged(context: StreamContext, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Pixels | None = None) -> Pixels:
    """Return a buffer as an array; from here on the event recorded next gives it back, come what may."""
    lease = _lease(context)
    lease.taken = True
    context._finish_with(partial(lease.finish, fill), fills_host=fill is not None)
    context._demand()  # buffers come back without anybody waiting for the handle
    return lease.view(shape, dtype)


def _lease(context: StreamContext) -> _Lease:
    """Return the buffer reserved for this copy, or one that is free now."""
    owner, lease = pool(context), _reserved.get()
    if lease is not None and lease.owner is owner and not lease.taken:
        return lease
    if not owner._slots.try_take():
        raise BusyError(
            why="page-locked memory is bounded",
            what=f"{owner!r}; accepted is a free one",
            how="await an earlier copy first, use upload_async or download_async (or _sync without a loop), or raise "
            "staging.pool(device).limit",
        )
    return _Lease(owner)


def _submitted_sync[T](context: StreamContext, copy: Callable[..., T], source: Any) -> EventHandle[T]:
    if loops.loop_runs_here():
        raise ContextError(
            why="a blocking wait for a buffer would freeze the event loop of this thread",
            what=f"a copy on {context!r} was asked for with its _sync form where an event loop runs",
            how="use the _async form, or the plain one and handle BusyError",
        )
    context._check_usable()
    if context.device == "cpu":
        return context.submit_sync(copy, context, source)
    with reserved_sync(context):
        return context.submit_sync(copy, context, source)


async def _submitted_async[T](context: StreamContext, copy: Callable[..., T], source: Any) -> EventHandle[T]:
    context._check_usable()
    if context.device == "cpu":
        return await context.submit_async(copy, context, source)
    after = context._pinned("current")  # other tasks, and their scopes, run while this one waits
    async with reserved_async(context):
        return await context.submit_async(copy, context, source, after=after)


def _nothing() -> None:
    """Copies under way are reported without being asked for: each demanded it."""
