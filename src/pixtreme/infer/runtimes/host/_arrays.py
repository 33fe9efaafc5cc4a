"""Array import on the host runtime: what a caller passes as a NumPy view, or a refusal that names the input (G13)."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from pixtreme.infer.errors import ContractError
from pixtreme.infer.frames import HostArray, HostFrame
from pixtreme.infer.runtimes._array_checks import check_dtype, through_dlpack
from pixtreme.infer.runtimes.host._guard import bare

_DLPACK_CPU = 1


def import_array(source: object, *, name: str) -> HostArray:
    """View ``source`` as a NumPy array without copying.

    Accepts a `HostFrame`, a NumPy array, and any DLPack producer in CPU memory.

    Raises
    ------
    ContractError
        Device memory, no array at all, a foreign byte order, or a dtype that is not a plain number.
    """
    source = bare(source)
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


def _refuse(name: str, source: Any, observed: str) -> NoReturn:
    raise ContractError(
        why=f"input {name!r} must be in host memory, where this buffer is",
        what=f"received {type(source).__module__}.{type(source).__qualname__}: {observed}; accepted are HostFrame, "
        "numpy.ndarray and DLPack producers on the CPU",
        how="copy the data to the host first, or open the module on the device that holds it",
    )
