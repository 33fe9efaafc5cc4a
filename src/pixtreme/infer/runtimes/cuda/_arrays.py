"""Array import on the CUDA runtime: what a caller passes as a CuPy view, or a refusal that names the input (G13)."""

from __future__ import annotations

from typing import Any, NoReturn

import cupy
import numpy as np
from cupy.cuda.runtime import CUDARuntimeError

from pixtreme.infer.errors import ContractError
from pixtreme.infer.runtimes._array_checks import check_dtype, through_dlpack
from pixtreme.infer.runtimes._protocol import NativeArray

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def import_array(source: object, *, name: str, ordinal: int) -> NativeArray:
    """View ``source`` as a CuPy array without copying; ready on the current stream, as it must have been.

    Accepts a CuPy array, a frame or other DLPack producer, and a producer of the CUDA Array Interface, version 3, whose
    ``stream`` causes no host synchronisation.

    Raises
    ------
    ContractError
        Host memory, another device, a foreign byte order, a dtype that is not a plain number, a null pointer, a mask.
    """
    if isinstance(source, cupy.ndarray):
        array = source
    elif hasattr(source, "__dlpack_device__"):
        array = _from_dlpack(source, name, ordinal)
    elif hasattr(source, "__cuda_array_interface__"):
        array = _from_interface(source, name)
    elif isinstance(source, np.ndarray) or hasattr(source, "__array_interface__"):
        _refuse(name, source, "host memory", ordinal)
    else:
        _refuse(name, source, "no array", ordinal)
    check_dtype(array, name)
    if array.size and array.device.id != ordinal:
        _refuse(name, source, f"memory of cuda:{array.device.id}", ordinal)
    return array


def overlaps(first: NativeArray, second: NativeArray) -> bool:
    """Tell whether two arrays share at least one byte."""
    one, two = _shadow(first), _shadow(second)
    return np.may_share_memory(one, two) and np.shares_memory(one, two)


def same_storage(first: NativeArray, second: NativeArray) -> bool:
    """Tell whether two arrays are the same elements in the same order."""
    return (first.data.ptr, first.shape, first.strides, first.dtype) == (
        second.data.ptr,
        second.shape,
        second.strides,
        second.dtype,
    )


def _from_dlpack(source: Any, name: str, ordinal: int) -> NativeArray:
    kind, index = (int(part) for part in source.__dlpack_device__())
    if kind not in _DLPACK_CUDA:
        _refuse(name, source, f"memory that is not a CUDA device's (DLPack device {(kind, index)})", ordinal)
    if index != ordinal:
        _refuse(name, source, f"memory of cuda:{index}", ordinal)
    # from_dlpack asks the producer for the current stream
    return through_dlpack(cupy.from_dlpack, source, name, instead="cupy.ndarray")


def _from_interface(source: Any, name: str) -> NativeArray:
    interface = source.__cuda_array_interface__
    version, data = interface.get("version"), interface.get("data")
    if version != 3:
        _refuse_interface(name, f"version {version!r}", "version 3")
    if interface.get("mask") is not None:
        _refuse_interface(name, "a mask", "none")
    shape = tuple(interface["shape"])
    try:
        dtype = np.dtype(interface["typestr"])
    except TypeError:
        _refuse_interface(name, f"typestr {interface['typestr']!r}", "one that NumPy knows")
    size = int(np.prod(shape, dtype=object)) if shape else 1
    if not (isinstance(data, tuple) and len(data) == 2) or (not data[0] and size):
        _refuse_interface(name, f"data {data!r}", "a device pointer")
    if not size:
        return cupy.empty(shape, dtype)
    if not dtype.isnative:
        _refuse_interface(name, f"typestr {dtype.str!r}", "native order")
    try:
        attributes = cupy.cuda.runtime.pointerGetAttributes(data[0])
    except CUDARuntimeError as error:
        _refuse_interface(name, f"pointer {data[0]:#x} ({error})", "memory of a CUDA device")
    if attributes.type not in (cupy.cuda.runtime.memoryTypeDevice, cupy.cuda.runtime.memoryTypeManaged):
        _refuse_interface(name, f"pointer {data[0]:#x} in host memory", "memory of a CUDA device")
    strides = interface.get("strides")
    reach = sum((length - 1) * abs(step) for length, step in zip(shape, strides, strict=True)) if strides else 0
    extent = max(size * dtype.itemsize, reach + dtype.itemsize)
    memory = cupy.cuda.UnownedMemory(data[0], extent, source, attributes.device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)


def _shadow(array: NativeArray) -> Any:
    """Return a NumPy array at the device's addresses, for arithmetic on them: nothing reads what it points to."""
    return np.asarray(_AtAddresses(array))


class _AtAddresses:
    def __init__(self, array: NativeArray) -> None:
        pointer = array.data.ptr or 1  # NumPy takes no null pointer, an empty array's included
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
            "data": (pointer, True),
        }


def _refuse(name: str, source: Any, observed: str, ordinal: int) -> NoReturn:
    raise ContractError(
        why=f"input {name!r} must be in the memory of cuda:{ordinal}, where this buffer is",
        what=f"received {type(source).__module__}.{type(source).__qualname__}: {observed}; accepted are frames, "
        f"cupy.ndarray, DLPack and CUDA Array Interface producers on cuda:{ordinal}",
        how="copy the data to that device first, or open the module on the device that holds it",
    )


def _refuse_interface(name: str, observed: str, accepted: str) -> NoReturn:
    raise ContractError(
        why=f"input {name!r} is imported through the CUDA Array Interface",
        what=f"received {observed}; accepted is {accepted}",
        how="pass a cupy.ndarray, or correct the producer",
    )
