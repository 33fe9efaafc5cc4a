"""`CudaGraphBuffers`: the fixed storage a graph reads and writes, and the copies in and out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from pixtreme.infer.errors import CaptureError, ClosedError, ContractError, refuse_pickle
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.runtimes import NativeArray
from pixtreme.infer.streams._scopes import current_stream
from pixtreme.infer.streams._stream import Stream

_RESERVED = ("frame", "reset")


class CudaGraphBuffers:
    """Fixed input, output and parameter storage of one graph session.

    Parameters
    ----------
    input_frame, output_frame
        Frames on the current device, shape ``(height, width, channels)``, C-contiguous. Their storage is what the
        captured operations read and write.
    params
        Fixed arrays by parameter name: identifiers other than ``frame`` and ``reset``.

    Raises
    ------
    ContractError
        A frame or array is malformed, of another device, or overlaps another input.
    ContextError
        No explicit stream is current.

    Host synchronization
    --------------------
    None.

    Lifetime
    --------
    The buffers keep the storage alive until ``close()``; ``copy_output`` never hands out the fixed output.
    """

    def __init__(
        self, input_frame: FrameLike, output_frame: FrameLike, *, params: Mapping[str, Any] | None = None
    ) -> None:
        runtime = current_stream("fixed buffers belong to the current device").runtime
        names = dict(params) if isinstance(params, Mapping) else {} if params is None else _refuse_params(params)
        for name in names:
            if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
                _refuse("params", repr(name), f"identifiers other than {_RESERVED!r}", "rename the parameter")
        self._runtime = runtime
        self._output = self._fixed("output_frame", _frame_checked("output_frame", output_frame))
        self._inputs = {"frame": self._fixed("input_frame", _frame_checked("input_frame", input_frame))}
        for name, array in names.items():
            fixed = self._fixed(name, array)
            for other, taken in self._inputs.items():
                if runtime.overlaps(fixed, taken):
                    _refuse(name, f"storage that overlaps {other!r}", "separate storage", "allocate an array each")
            self._inputs[name] = fixed
        self.input_frame = input_frame
        self.output_frame = output_frame
        self.params = MappingProxyType(names)
        self._closed = False

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._closed

    def copy_inputs(self, frame: FrameLike, /, **params: Any) -> None:
        """Validate every source, then enqueue the copies into the fixed inputs on the current stream.

        Parameters
        ----------
        frame
            A frame of the fixed input's exact shape and dtype, on this device and ready on the current stream.
        **params
            Exactly the declared names: a frame, a native array or any DLPack producer on this device, each of the exact
            shape and dtype. Strided sources are fine; nothing is cast or broadcast.

        Raises
        ------
        ContractError
            Names the input, the observed and the accepted value. No copy was enqueued.
        ClosedError, CaptureError, ContextError
            The buffers are closed, the current stream captures, or none is current.

        Stream order
        ------------
        The copies run on the current stream; a source that is exactly the fixed storage is not copied.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        Sources are kept alive until they are copied; do not overwrite them before.
        """
        stream = self._current("copy_inputs()")
        runtime = stream.runtime
        sources = {"frame": _frame_checked("frame", frame), **params}
        if sources.keys() != self._inputs.keys():
            missing = sorted(self._inputs.keys() - sources.keys())
            undeclared = sorted(sources.keys() - self._inputs.keys())
            _refuse(
                "params",
                f"missing {missing!r}, undeclared {undeclared!r}",
                f"exactly {sorted(self.params)!r}",
                "pass every declared parameter by keyword and nothing else",
            )
        arrays = {name: self._checked_source(name, source) for name, source in sources.items()}
        for name, array in arrays.items():
            if not runtime.same_storage(array, self._inputs[name]):
                runtime.copy(self._inputs[name], array, stream.native)

    def copy_output(
        self, *, channels: str | Sequence[str], colorspace: str, gamma: str, matrix: str | None = None
    ) -> FrameLike:
        """Enqueue a copy of the fixed output into storage of its own, and return it as a frame.

        Parameters
        ----------
        channels, colorspace, gamma, matrix
            Metadata of this request's output.

        Raises
        ------
        ContractError
            The metadata is malformed; no copy was enqueued.
        ClosedError, CaptureError, ContextError
            As `copy_inputs`.

        Stream order
        ------------
        After everything enqueued on the current stream so far.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        The returned frame is independent: later requests, resets and ``close()`` never change it.
        """
        stream = self._current("copy_output()")
        runtime = stream.runtime
        data = runtime.empty(tuple(self._output.shape), self._output.dtype)
        frame = runtime.make_frame(data, channels=channels, colorspace=colorspace, gamma=gamma, matrix=matrix)
        runtime.copy(data, self._output, stream.native)
        return frame

    def fixed_storage(self) -> tuple[Mapping[str, NativeArray], NativeArray]:
        """Return the fixed inputs by name, and the fixed output: what ``verify=True`` perturbs and compares.

        Host synchronization
        --------------------
        None.
        """
        return self._inputs, self._output

    def close(self) -> None:
        """Refuse further copies. Idempotent; frames already returned stay as they are.

        Host synchronization
        --------------------
        None.
        """
        self._closed = True

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(array.shape)}" for name, array in self._inputs.items())
        return f"<CudaGraphBuffers {shapes} → {tuple(self._output.shape)}: {'closed' if self._closed else 'open'}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the frames' pixels as NumPy arrays")

    def _current(self, what: str) -> Stream:
        if self._closed:
            raise ClosedError(
                why="closed buffers copy nothing",
                what=f"{what} was called on {self!r} after close()",
                how="open the module again",
            )
        stream = current_stream(f"{what} enqueues on the current stream")
        if stream.runtime is not self._runtime:
            _refuse("current device", stream.runtime.device, self._runtime.device, "make the module's context current")
        stream.refuse_while_capturing(what)
        if stream.is_capturing:
            raise CaptureError(
                why="a captured copy would replay this request's pixels",
                what=f"{what} was called while {stream.native!r} captures",
                how="copy in and out around the replay, never inside an operation",
            )
        return stream

    def _fixed(self, name: str, source: object) -> NativeArray:
        array = self._runtime.import_array(source, name=name)
        if not array.flags.c_contiguous or not is_writeable(array):
            _refuse(
                name,
                f"shape={tuple(array.shape)}, strides={tuple(array.strides)}, writeable={is_writeable(array)}",
                "writeable C-contiguous storage",
                "allocate it with empty() of the exact shape",
            )
        return array

    def _checked_source(self, name: str, source: object) -> NativeArray:
        fixed = self._inputs[name]
        array = self._runtime.import_array(source, name=name)
        if tuple(array.shape) != tuple(fixed.shape) or array.dtype != fixed.dtype:
            _refuse(
                name,
                f"shape={tuple(array.shape)}, dtype={np.dtype(array.dtype)}",
                f"shape={tuple(fixed.shape)}, dtype={np.dtype(fixed.dtype)}",
                "convert the data first: nothing is cast, broadcast or resized here",
            )
        for other, target in self._inputs.items():
            exact = other == name and self._runtime.same_storage(array, target)
            if not exact and self._runtime.overlaps(array, target):
                _refuse(
                    name,
                    f"storage that overlaps the fixed storage of {other!r}",
                    "separate storage, or exactly the fixed storage itself",
                    "copy the source first",
                )
        return array


def is_writeable(array: NativeArray) -> bool:
    """Tell whether an array can be written."""
    return bool(getattr(array.flags, "writeable", True))  # CuPy arrays have no such flag: all are


def _frame_checked(name: str, frame: object) -> FrameLike:
    if not isinstance(frame, FrameLike):
        kind = f"{type(frame).__module__}.{type(frame).__qualname__}"
        _refuse(name, kind, "a frame (pixtreme.core.Frame or HostFrame)", "wrap the pixels in a frame")
    return frame


def _refuse_params(params: object) -> NoReturn:
    _refuse("params", repr(params), "None or a mapping of names to arrays", "pass a dict")


def _refuse(name: str, observed: str, accepted: str, how: str) -> NoReturn:
    raise ContractError(
        why=f"input {name!r} does not fit the fixed buffers",
        what=f"received {observed}; accepted is {accepted}",
        how=how,
    )
