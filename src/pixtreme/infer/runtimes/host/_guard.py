"""Pixels that a host stream may still be writing, as a submitted function sees them.

On CUDA a function that is given a pending result enqueues on it, and stream order does the rest. NumPy would read at
once, whatever stands in memory. So a submission gets a stand-in: it tells shape and dtype, and every way to the pixels
raises until the work is over. The stream's own tasks, and modules, buffers and copies of this library, take the array
itself with `bare`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from pixtreme.infer._containers import is_looked_into, with_items
from pixtreme.infer.errors import ContextError
from pixtreme.infer.frames import HostArray, HostFrame, with_pixels


class Point(Protocol):
    """What says when the pixels are written: a record of an event."""

    done: bool
    fault: BaseException | None


# What reads no pixel.
_METADATA = ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags")
_ABOUT = (np.empty_like, np.zeros_like, np.ones_like, np.full_like, np.shape, np.ndim, np.size, np.result_type)


class Guarded:
    """Stands for an array until the work that fills it is over; from then on it does what the array does."""

    __slots__ = ("_array", "_label", "_point")
    _array: HostArray
    _label: object
    _point: Point

    def __init__(self, array: HostArray, point: Point, label: object) -> None:
        _put_array(self, array)
        _put_point(self, point)
        _put_label(self, label)

    @property
    def __class__(self) -> type:  # what a module checks; C code, which would read, looks at the real type
        return np.ndarray

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("the class of pending pixels cannot be changed")

    def unguarded(self) -> HostArray:
        """Return the array, for code that is ordered after the work by other means."""
        return self._array

    def read(self) -> HostArray:
        """Return the array, for code that reads it now.

        Raises
        ------
        ContextError
            The work is not over, or failed.
        """
        if not self._point.done or self._point.fault is not None:
            raise ContextError(
                why="the host reads at once, and these pixels are still to be written by work enqueued earlier",
                what=f"a {self._array.dtype} array of shape {self._array.shape}, the value of {self._label}, was read "
                "outside the stream",
                how="enqueue what reads it, context.enqueue(fn, handle, out=...), which runs in stream order; or await "
                "the handle first and pass its value",
            )
        return self._array

    def __getattr__(self, name: str) -> Any:
        if not hasattr(np.ndarray, name):
            raise AttributeError(f"'numpy.ndarray' object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._array if name in _METADATA else self.read(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.read(), name, value)

    def __len__(self) -> int:
        return len(self._array)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*_replaced(inputs, Guarded.read), **_replaced(options, Guarded.read))

    def __array_function__(self, function: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        of = Guarded.unguarded if function in _ABOUT else Guarded.read
        return function(*_replaced(args, of), **_replaced(kwargs, of))

    def __repr__(self) -> str:
        if self._point.done and self._point.fault is None:
            return repr(self._array)
        return f"<pending {self._array.dtype} array of shape {self._array.shape}: the value of {self._label}>"

    __hash__ = None  # type: ignore[assignment]  # as an array


# Assignment of attributes is the array's, so a stand-in's own go round it; one is made for each pending argument.
_put_array, _put_point, _put_label = (vars(Guarded)[name].__set__ for name in ("_array", "_point", "_label"))


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.read(), name)(*args, **kwargs)

    method.__name__ = name
    return method


# Python looks up special methods on the class: operators, indexing, iteration, conversion, the buffer, copies.
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_OWN = {*dir(object), *vars(Guarded)} - {"__reduce_ex__", *_COMPARISONS}
for _name in ("__buffer__", *dir(np.ndarray)):
    if _name.startswith("__") and _name not in _OWN and callable(getattr(np.ndarray, _name, len)):
        setattr(Guarded, _name, _forwarded(_name))


def _is_guarded(value: object) -> bool:
    return type(value) is Guarded


def guarded(value: Any, point: Point, label: object) -> Any:
    """Return a pending value with every array and frame in it guarded; what is neither stays itself."""
    if _is_guarded(value):
        return value
    if isinstance(value, np.ndarray):
        return Guarded(value, point, label)
    if isinstance(value, HostFrame):
        return with_pixels(value, guarded(value.data, point, label))
    return with_items(value, partial(guarded, point=point, label=label)) if is_looked_into(value) else value


def reading(task: Callable[..., object], *args: Any) -> None:
    """Run a task of a stream on the arrays themselves, which the stream has to be ordered after."""
    task(*_replaced(args, Guarded.read))


def bare(value: Any) -> Any:
    """Return a value with the arrays themselves in place of what stands for them, for code in stream order."""
    return _replaced(value, Guarded.unguarded)


def _replaced(value: Any, of: Callable[[Guarded], HostArray]) -> Any:
    if _is_guarded(value):
        return of(value)
    if isinstance(value, HostFrame):
        pixels: Any = value.data
        return with_pixels(value, of(pixels)) if _is_guarded(pixels) else value
    return with_items(value, partial(_replaced, of=of)) if is_looked_into(value) else value
