"""`Storage`: memory of a context's device, and host pixels in and out of it, with no word about which device it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pixtreme.infer._dir import public_dir
from pixtreme.infer.errors import ContractError
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.runtimes import NativeArray
from pixtreme.infer.streams import _copies
from pixtreme.infer.streams._handle import EventHandle
from pixtreme.infer.streams._planning import After
from pixtreme.infer.streams._scopes import Scope
from pixtreme.infer.streams._stream import Stream

_SEAMS = ("core_stream", "slots", "submit_promised")  # for this library's own modules


class Storage:
    """The part of `StreamContext` that an author needs to write a module once for every device."""

    if TYPE_CHECKING:  # what the context has

        @property
        def core_stream(self) -> Stream: ...
        def use(self) -> Scope: ...
        def submit(
            self, fn: Callable[..., Any], /, *args: Any, after: After = "current", **kwargs: Any
        ) -> EventHandle[Any]: ...

    def __dir__(self) -> Iterable[str]:
        return public_dir(self, _SEAMS)

    @property
    def xp(self) -> ModuleType:
        """The array module of the device: ``numpy`` or ``cupy``."""
        return self.core_stream.runtime.xp

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> NativeArray:
        """Allocate an uninitialised C-contiguous array on the device, for this context's work.

        Stream order
        ------------
        On CUDA memory that an earlier operation of this stream used may be given out again: only work of this stream,
        or after it, may use it.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        As any array's; what work of this context is given stays alive until that work is complete.
        """
        with self.use():
            return self.core_stream.runtime.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)

    def frame(
        self, array: Any, *, channels: str | Sequence[str], colorspace: str, gamma: str, matrix: str | None = None
    ) -> FrameLike:
        """Wrap an array of the device in the device's kind of frame, without a copy where it is C-contiguous.

        Parameters
        ----------
        array
            Shape ``(height, width, channels)``; float32, float16, uint8, uint16 or uint32.
        channels, colorspace, gamma, matrix
            The frame's metadata.

        Raises
        ------
        ContractError
            Array or metadata are malformed, or ``array`` is a handle.

        Stream order
        ------------
        Reads no pixel; ``array`` may still be written by work of this context.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        The frame keeps the array alive.
        """
        if isinstance(array, EventHandle):
            raise ContractError(
                why="a frame is made of an array",
                what=f"received {array!r}",
                how="make the frame first and fill it, context.enqueue(fn, ..., out=frame), or submit this: "
                "context.submit(context.frame, handle, channels=..., ...)",
            )
        runtime = self.core_stream.runtime
        with self.use():
            data = runtime.import_array(array, name="array")
            made = runtime.make_frame(data, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
        return _copies.with_guard(runtime, made, array)

    def from_host(self, value: Any, /) -> EventHandle[Any]:
        """Submit a copy of host pixels to the device, as they are now; return its handle.

        Parameters
        ----------
        value
            A `HostFrame`, which becomes a frame of the device, or a NumPy array.

        Raises
        ------
        ContractError
            Anything else.
        BusyError
            As `submit`; or every page-locked buffer is in use.

        Stream order
        ------------
        As `submit`.

        Host synchronization
        --------------------
        None; the pixels are copied to a buffer before this returns, so the array may be filled again.

        Lifetime
        --------
        As `submit`.
        """
        return self.submit(_copies.from_host, value)

    def to_host(self, value: Any, /) -> EventHandle[Any]:
        """Submit a copy of a frame or array to the host; return its handle. On the CPU its value is the same object.

        Parameters
        ----------
        value
            A frame, which becomes a `HostFrame`, or an array of the device, which becomes a NumPy array; or a handle.

        Raises
        ------
        ContractError
            It is no memory of this device.
        BusyError
            As `submit`; or every page-locked buffer is in use.

        Stream order
        ------------
        As `submit`.

        Host synchronization
        --------------------
        None. On CUDA the reporting thread fills the array, before the handle is complete: await it, no stream takes it.

        Lifetime
        --------
        As `submit`.
        """
        return self.submit(_copies.to_host, value)
