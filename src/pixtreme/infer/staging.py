"""Pixels in and out of a device: copies that the host does not wait for.

On CUDA they go through page-locked buffers of a bounded pool, one pool a device; the host runtime copies directly.

* `upload` and `download` submit to a context and return handles. With an empty pool they raise `BusyError`;
  `upload_sync`, `download_sync` block and `upload_async`, `download_async` wait until a buffer is free.
* `copy_in` and `copy_out` are the same copies for code that already runs inside ``use()``: a submitted function, say.
* `Upload` and `Download` are the same copies as stages of a pipeline, which waits for their buffers.

A downloaded array is filled by the host, on the thread that reports completions, before its handle counts as complete:
await it before passing the array on. A pending one is refused by every other stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pixtreme.infer._staging_buffers import Reservation, pool
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.streams import EventHandle, StreamContext, _loops
from pixtreme.infer.streams._copies import Copy, Lease, Pixels, StagingPool, copied_in, copied_out, labels_of

__all__ = (
    "Download",
    "Reservation",
    "Upload",
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


class Upload:
    """`copy_in` with its metadata filled in: a pipeline's stage, called with each image.

    Parameters
    ----------
    channels, colorspace, gamma, matrix
        The frames' metadata.
    """

    def __init__(
        self, *, channels: str | Sequence[str], colorspace: str, gamma: str, matrix: str | None = None
    ) -> None:
        self._metadata: dict[str, Any] = {
            "channels": channels,
            "colorspace": colorspace,
            "gamma": gamma,
            "matrix": matrix,
        }

    def __call__(self, array: Pixels, /) -> FrameLike:
        """Enqueue the copy of one image, as `copy_in` does.

        Stream order
        ------------
        As `copy_in`.

        Host synchronization
        --------------------
        As `copy_in`.

        Lifetime
        --------
        As `copy_in`.
        """
        return self._copied(array)

    def reserve(self, context: StreamContext) -> Reservation:
        """Return a block, ``with`` or ``async with``, that waits for a buffer and gives the copy that will use it.

        Host synchronization
        --------------------
        None; entering it with ``with`` blocks while every buffer is in use.
        """
        return Reservation(context, self._copied, "Upload")

    def _copied(self, array: Pixels, lease: Lease | None = None) -> FrameLike:
        return _copied_in(HostFrame(data=array, **self._metadata), lease)


class Download:
    """`copy_out` as a pipeline's stage, called with each frame."""

    def __call__(self, frame: FrameLike, /) -> Pixels:
        """Enqueue the copy of one frame, as `copy_out` does.

        Stream order
        ------------
        As `copy_out`.

        Host synchronization
        --------------------
        As `copy_out`.

        Lifetime
        --------
        As `copy_out`.
        """
        return _copied_out(frame)

    def reserve(self, context: StreamContext) -> Reservation:
        """As `Upload.reserve`.

        Host synchronization
        --------------------
        As `Upload.reserve`.
        """
        return Reservation(context, _copied_out, "Download")


def copy_in(
    array: Pixels, /, *, channels: str | Sequence[str], colorspace: str, gamma: str, matrix: str | None = None
) -> FrameLike:
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
    ------------
    On the current context's stream.

    Host synchronization
    --------------------
    None. The image is copied before this returns, on CUDA to a page-locked buffer.

    Lifetime
    --------
    The array may be filled again at once.
    """
    return Upload(channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)(array)


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
    ------------
    On the current context's stream.

    Host synchronization
    --------------------
    None. On CUDA the reporting thread fills the array, before the handle is complete.

    Lifetime
    --------
    The frame lives until the copy is done.
    """
    return _copied_out(frame)


def upload(
    context: StreamContext,
    array: Pixels,
    /,
    *,
    channels: str | Sequence[str],
    colorspace: str,
    gamma: str,
    matrix: str | None = None,
) -> EventHandle[FrameLike]:
    """Submit `copy_in` and return its handle.

    Raises
    ------
    ContractError, BusyError
        As `copy_in` and `StreamContext.submit`; nothing was enqueued.

    Stream order
    ------------
    As `copy_in`.

    Lifetime
    --------
    As `copy_in`.

    Host synchronization
    --------------------
    None.
    """
    source = HostFrame(data=array, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
    return context.submit(_copied_in, source)


def download(context: StreamContext, frame: FrameLike | EventHandle[FrameLike], /) -> EventHandle[Pixels]:
    """Submit `copy_out` and return its handle.

    Raises
    ------
    ContractError, ContextError, BusyError
        As `copy_out` and `StreamContext.submit`; nothing was enqueued.

    Stream order
    ------------
    As `copy_out`.

    Lifetime
    --------
    As `copy_out`.

    Host synchronization
    --------------------
    None.
    """
    return context.submit(_copied_out, frame)


def upload_sync(
    context: StreamContext,
    array: Pixels,
    /,
    *,
    channels: str | Sequence[str],
    colorspace: str,
    gamma: str,
    matrix: str | None = None,
) -> EventHandle[FrameLike]:
    """Like `upload`, but wait on the host for a buffer and a slot of the context; given in order of asking.

    Host synchronization
    --------------------
    Blocks while all are in use; refused on a thread that runs an event loop.

    Stream order
    ------------
    On the context's stream.

    Lifetime
    --------
    As `upload` and `download`.
    """
    source = HostFrame(data=array, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
    return _submitted_sync(context, _copied_in, source)


def download_sync(context: StreamContext, frame: FrameLike | EventHandle[FrameLike], /) -> EventHandle[Pixels]:
    """Like `download`, but wait as `upload_sync` does.

    Host synchronization
    --------------------
    As `upload_sync`.

    Stream order
    ------------
    On the context's stream.

    Lifetime
    --------
    As `upload` and `download`.
    """
    return _submitted_sync(context, _copied_out, frame)


async def upload_async(
    context: StreamContext,
    array: Pixels,
    /,
    *,
    channels: str | Sequence[str],
    colorspace: str,
    gamma: str,
    matrix: str | None = None,
) -> EventHandle[FrameLike]:
    """Like `upload`, but wait for a buffer and a slot of the context without blocking; given in order of asking.

    Host synchronization
    --------------------
    None.

    Stream order
    ------------
    On the context's stream.

    Lifetime
    --------
    As `upload` and `download`.
    """
    source = HostFrame(data=array, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
    return await _submitted_async(context, _copied_in, source)


async def download_async(context: StreamContext, frame: FrameLike | EventHandle[FrameLike], /) -> EventHandle[Pixels]:
    """Like `download`, but wait as `upload_async` does.

    Host synchronization
    --------------------
    None.

    Stream order
    ------------
    On the context's stream.

    Lifetime
    --------
    As `upload` and `download`.
    """
    return await _submitted_async(context, _copied_out, frame)


def _copied_in(source: HostFrame, lease: Lease | None = None) -> FrameLike:
    stream = StreamContext.current().core_stream
    data = copied_in(stream, source.data, lease)
    return stream.runtime.make_frame(data, **labels_of(source))


def _copied_out(frame: FrameLike, lease: Lease | None = None) -> Pixels:
    return copied_out(StreamContext.current().core_stream, frame, lease)


def _submitted_sync(context: StreamContext, copy: Copy, source: Any) -> EventHandle[Any]:
    _loops.refuse_to_block(
        f"the _sync form of a copy on {context!r}", "the _async form, or the plain one and handle BusyError"
    )
    context.check_usable()
    with Reservation(context, copy, copy.__name__) as reserved:
        return context.submit_sync(reserved, source)


async def _submitted_async(context: StreamContext, copy: Copy, source: Any) -> EventHandle[Any]:
    context.check_usable()
    after = context.pin()  # other tasks, and their scopes, run while this one waits
    async with Reservation(context, copy, copy.__name__) as reserved:
        return await context.submit_async(reserved, source, after=after)
