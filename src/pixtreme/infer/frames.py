"""The frame boundary: pixtreme's ``Frame`` on CUDA, `HostFrame` on the host runtime, `FrameLike` for both.

`HostFrame` takes its vocabulary from ``pixtreme.core`` and follows the rules of ``pixtreme.core.Frame``. It is not a
subclass: ``Frame`` is a pydantic model in pixtreme 1.x and a native handle in 2.0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
from pixtreme.core import Colorspace, Dtype, Gamma, Matrix, channels

from pixtreme.infer.errors import ContractError

__all__ = ("Colorspace", "FrameLike", "Gamma", "HostFrame", "Matrix")

HostArray = npt.NDArray[Any]

_TOKENS: dict[str, tuple[str, ...]] = {
    "colorspace": get_args(Colorspace),
    "gamma": get_args(Gamma),
    "matrix": get_args(Matrix),
}
_DTYPES = tuple(np.dtype(name) for name in get_args(Dtype))
# Short spellings pixtreme accepts beside its vocabulary; it does not publish them (a test compares).
_SHORT_SPELLINGS = {"logc4": "ARRI-LogC4", "22": "Gamma-2.2", "24": "Gamma-2.4", "26": "Gamma-2.6"}
_SEPARATORS = str.maketrans("", "", " .-_")
_FIELDS = ("data", "colorspace", "gamma", "channels", "matrix")


@runtime_checkable
class FrameLike(Protocol):
    """What generic code may rely on: the attributes shared by ``pixtreme.core.Frame`` and `HostFrame`."""

    @property
    def data(self) -> Any: ...
    @property
    def colorspace(self) -> Colorspace: ...
    @property
    def gamma(self) -> Gamma: ...
    @property
    def channels(self) -> tuple[str, ...]: ...
    @property
    def matrix(self) -> Matrix | None: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class HostFrame:
    """A mutable HWC image in host memory: the frame of the host runtime.

    Parameters
    ----------
    data
        NumPy array, shape ``(height, width, channels)``, each at least 1; dtype float32, float16, uint8, uint16 or
        uint32 in native byte order. C-contiguous data is borrowed, other layouts are copied.
    colorspace, gamma, matrix
        Tokens of ``pixtreme.core``; matched without regard to case and separators.
    channels
        A compact string such as ``"RGB"`` or a sequence of labels, one a channel.

    Raises
    ------
    ContractError
        A field breaks the rules above; on assignment the frame is left as it was.
    """

    __slots__ = ("__weakref__", "_channels", "_colorspace", "_data", "_gamma", "_matrix")
    __hash__ = None  # type: ignore[assignment]  # mutable, as Frame

    def __init__(
        self,
        *,
        data: HostArray,
        colorspace: str,
        gamma: str,
        channels: str | Sequence[str],
        matrix: str | None = None,
    ) -> None:
        pixels, labels = _checked_data(data), _checked_channels(channels)
        _check_count(pixels, labels)
        self._data, self._channels = pixels, labels
        self.colorspace = cast(Colorspace, colorspace)
        self.gamma = cast(Gamma, gamma)
        self.matrix = cast("Matrix | None", matrix)

    @classmethod
    def rgb(cls, pixels: HostArray) -> HostFrame:
        """Return a frame of RGB pixels in sRGB, what most image files decode to; shape ``(height, width, 3)``.

        Values are taken as they are: a network of 0 to 1 wants uint8 pixels divided by 255 first.
        """
        return cls(data=pixels, channels="RGB", colorspace="sRGB", gamma="sRGB")

    @property
    def data(self) -> HostArray:
        """C-contiguous pixels, shape ``(height, width, channels)``."""
        return self._data

    @data.setter
    def data(self, value: HostArray) -> None:
        pixels = _checked_data(value)
        _check_count(pixels, self._channels)
        self._data = pixels

    @property
    def channels(self) -> tuple[str, ...]:
        """One label a channel."""
        return self._channels

    @channels.setter
    def channels(self, value: str | Sequence[str]) -> None:
        labels = _checked_channels(value)
        _check_count(self._data, labels)
        self._channels = labels

    @property
    def colorspace(self) -> Colorspace:
        """Primaries and white point."""
        return self._colorspace

    @colorspace.setter
    def colorspace(self, value: str) -> None:
        self._colorspace = cast(Colorspace, _token("colorspace", value))

    @property
    def gamma(self) -> Gamma:
        """Transfer function."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: str) -> None:
        self._gamma = cast(Gamma, _token("gamma", value))

    @property
    def matrix(self) -> Matrix | None:
        """Y'CbCr matrix, or None."""
        return self._matrix

    @matrix.setter
    def matrix(self, value: str | None) -> None:
        self._matrix = None if value is None else cast(Matrix, _token("matrix", value))

    @property
    def width(self) -> int:
        """Image width in pixels."""
        return int(self._data.shape[1])

    @property
    def height(self) -> int:
        """Image height in pixels."""
        return int(self._data.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """HWC shape."""
        return cast(tuple[int, int, int], self._data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Storage dtype."""
        return self._data.dtype

    def replace_pixels(self, data: HostArray) -> None:
        """Set ``data`` unchecked: this library's own stand-in for an array, or an array known to fit."""
        self._data = data

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> HostArray:
        """Return the pixels for ``numpy.asarray(frame)``: the storage itself where neither dtype nor copy is asked."""
        if copy is False and dtype is not None and np.dtype(dtype) != self._data.dtype:
            raise ValueError(f"a {self._data.dtype} frame cannot be an array of {np.dtype(dtype)} without a copy")
        return self._data.astype(self._data.dtype if dtype is None else dtype, copy=bool(copy))

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Export the pixels as a CPU DLPack capsule; arguments as in the array API standard."""
        if max_version is None and dl_device is None and copy is None:
            return self._data.__dlpack__(stream=cast(None, stream))  # NumPy 1.26 knows no other argument
        return self._data.__dlpack__(
            stream=cast(None, stream),
            max_version=max_version,
            dl_device=cast(Any, dl_device),
            copy=copy,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCPU, 0)``."""
        return cast(tuple[int, int], self._data.__dlpack_device__())

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _FIELDS[1:])
        return f"HostFrame({self.width}x{self.height} {self.dtype}, {fields})"


def with_pixels(frame: HostFrame, data: HostArray) -> HostFrame:
    """Return a frame with the metadata of another, of the same kind, around an array of the same shape and dtype."""
    made = copy.copy(frame)
    made.replace_pixels(data)
    return made


def _checked_data(value: HostArray) -> HostArray:
    if not isinstance(value, np.ndarray):
        raise ContractError(
            why="HostFrame data must use host-resident numpy.ndarray storage",
            what=f"received HostFrame data as {type(value).__module__}.{type(value).__qualname__}",
            how="await the handle and pass its value"
            if hasattr(value, "__await__")
            else "pass a numpy.ndarray, such as numpy.asarray(data)",
        )
    if value.ndim != 3:
        raise ContractError(
            why="HostFrame data uses HWC rank 3 storage",
            what=f"received HostFrame data shape={value.shape!r}; accepted is (height, width, channels)",
            how="reshape or transpose data to (height, width, channels) before constructing HostFrame",
        )
    if 0 in value.shape:
        raise ContractError(
            why="HostFrame data height, width, and channel dimensions must all be nonempty",
            what=f"received HostFrame data shape={value.shape!r}; accepted is at least 1 on each axis",
            how="pass HWC data whose height, width, and channel count are each at least 1",
        )
    if value.dtype not in _DTYPES:
        raise ContractError(
            why="HostFrame data dtype must be one of float32, float16, uint8, uint16, or uint32",
            what=f"received HostFrame data dtype={value.dtype!s} ({value.dtype.str})",
            how="convert data with data.astype(numpy.float32) or another supported dtype before constructing HostFrame",
        )
    return np.ascontiguousarray(value)


def _checked_channels(value: str | Sequence[str]) -> tuple[str, ...]:
    try:
        return channels(value)
    except ValueError as error:  # pixtreme's own three-part text, under our class
        why, what, how = _parts(str(error))
        raise ContractError(why=why, what=what, how=how) from error


def _parts(text: str) -> tuple[str, str, str]:
    why, _, rest = text.removeprefix("why=").partition("; what=")
    what, _, how = rest.rpartition("; how=")
    return why, what, how


def _check_count(data: HostArray, labels: tuple[str, ...]) -> None:
    if len(labels) != data.shape[2]:
        raise ContractError(
            why="HostFrame data and channels metadata must describe the same channel count",
            what=f"received HostFrame data shape={data.shape!r} and channels={labels!r} with {len(labels)} labels",
            how=f"pass exactly {data.shape[2]} channel labels to match data.shape[2]",
        )


@cache
def _spellings(axis: str) -> dict[str, str]:
    tokens = _TOKENS[axis]
    spellings = {key: token for key, token in _SHORT_SPELLINGS.items() if token in tokens}
    return spellings | {_key(token): token for token in tokens}


def _key(text: str) -> str:
    return text.translate(_SEPARATORS).casefold()


def _token(axis: Literal["colorspace", "gamma", "matrix"], value: object) -> str:
    token = _spellings(axis).get(_key(value)) if isinstance(value, str) else None
    if token is None:
        raise ContractError(
            why=f"{axis} is a closed token axis with case-insensitive separator-normalized matching",
            what=f"received {axis}={value!r}",
            how=f"pass one of {_TOKENS[axis]!r}",
        )
    return token
