"""Array import on the host runtime: what a caller passes as a NumPy view, or a refusal that names the input (G13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from pixtreme.infer.errors import ContractError
from pixtreme.infer.frames import HostArray, HostFrame

_DLPACK_CPU = 1
_NUMERIC_KINDS = "biuf"  # bool, signed and unsigned int, float


def import_array(source: object, *, name: str) -> HostArray:
    """View ``source`` as a NumPy array without copying.

    Accepts a `HostFrame`, a NumPy array, and any DLPack producer in CPU memory.

    Raises
    ------
    ContractError
        Device memory, no array at all, a foreign byte order, or a dtype that is not a plain number.
    """
    if isinstance(source, HostFrame):
        return source.data
    if isinstance(source, np.ndarray):
        view = np.asarray(source)
        check_dtype(view, name)
        return view
    if hasattr(source, "__cuda_array_interface__"):
        _refuse(name, source, "memory of a CUDA device (CUDA Array Interface)")
    if not hasattr(source, "__dlpack_device__"):
        _refuse(name, source, "no array")
    device = source.__dlpack_device__()
    if int(device[0]) != _DLPACK_CPU:
        _refuse(name, source, f"memory of another device (DLPack device {tuple(map(int, device))})")
    view = through_dlpack(np.from_dlpack, source, name, instead="numpy.ndarray")
    check_dtype(view, name)
    return view


def through_dlpack[A](load: Callable[[Any], A], source: object, name: str, *, instead: str) -> A:
    """Import a DLPack producer with ``load``; what its export raises is the cause of a refusal."""
    try:
        return load(source)
    except Exception as error:
        raise ContractError(
            why=f"input {name!r} is imported through DLPack",
            what=f"{type(source).__module__}.{type(source).__qualname__} refused the export: {error}",
            how=f"pass a {instead} of the same values",
        ) from error


def overlaps(first: HostArray, second: HostArray) -> bool:
    """Tell whether two arrays share at least one byte."""
    return np.may_share_memory(first, second) and np.shares_memory(first, second)


def same_storage(first: HostArray, second: HostArray) -> bool:
    """Tell whether two arrays are the same elements in the same order."""
    keys = ("data", "shape", "strides", "typestr")
    one, two = first.__array_interface__, second.__array_interface__
    return all(one[key] == two[key] for key in keys)


def copy(target: HostArray, source: HostArray) -> None:
    """Copy values; no cast, no broadcast (the caller compared shape and dtype)."""
    np.copyto(target, source, casting="no")


def check_dtype(array: Any, name: str) -> None:
    """Refuse an array that does not hold plain numbers in native byte order."""
    if array.dtype.kind not in _NUMERIC_KINDS or not array.dtype.isnative:
        raise ContractError(
            why=f"input {name!r} must hold plain numbers in native byte order",
            what=f"received dtype={array.dtype!s} ({array.dtype.str}); accepted are bool, int, uint and float dtypes",
            how="convert it, for example with array.astype(array.dtype.newbyteorder('='))",
        )


def _refuse(name: str, source: Any, observed: str) -> NoReturn:
    raise ContractError(
        why=f"input {name!r} must be in host memory, where this buffer is",
        what=f"received {type(source).__module__}.{type(source).__qualname__}: {observed}; accepted are HostFrame, "
        "numpy.ndarray and DLPack producers on the CPU",
        how="copy the data to the host first, or open the module on the device that holds it",
    )
