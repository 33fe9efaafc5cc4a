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

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pixtreme.infer.errors import ContextError
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.staging_buffers import Pixels, StagingPool, lease_for, pool, reserved_async, reserved_sync
from pixtreme.infer.streams import EventHandle, StreamContext, loops

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


def takes_a_buffer(context: StreamContext, call: object) -> bool:
    """Tell whether ``call`` is `copy_in` or `copy_out`, perhaps with arguments, and needs a buffer of the device."""
    while isinstance(call, partial):
        call = call.func
    return context.device != "cpu" and call in (copy_in, copy_out)


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
    view = source.data
    if context.device != "cpu":
        view = _staged(context, source.shape, source.dtype)
        np.copyto(view, source.data)
    runtime.copy_from_host(target, view, context.stream)
    return frame


def _copied_out(context: StreamContext, frame: FrameLike) -> Pixels:
    runtime = context._runtime
    array = runtime.import_array(frame, name="frame")
    result = np.empty(tuple(array.shape), array.dtype)
    view = result
    if context.device != "cpu":
        view = _staged(context, result.shape, result.dtype, fill=result)
    runtime.copy_to_host(view, array, context.stream)
    return result


def _staged(context: StreamContext, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Pixels | None = None) -> Pixels:
    """Return a buffer as an array; from here on the event recorded next gives it back, come what may."""
    lease = lease_for(context)
    lease.taken = True
    context._finish_with(partial(lease.finish, fill), fills_host=fill is not None)
    context._demand()  # buffers come back without anybody waiting for the handle
    return lease.view(shape, dtype)


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
