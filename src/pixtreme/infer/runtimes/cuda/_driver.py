"""The three driver calls CuPy does not bind, through ctypes, which also releases the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def _driver() -> Any:
    """Return the driver library, which any process that uses CUDA has loaded; None where it cannot be opened."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def is_installed() -> bool:
    """Tell whether the driver library can be opened."""
    return _driver() is not None


def relax_this_thread() -> None:
    """Let this thread make calls that would invalidate other threads' captures in global mode (S24). Best effort."""
    _exchange(_RELAXED)


@contextmanager
def relaxed() -> Iterator[None]:
    """`relax_this_thread` for a block."""
    before = _exchange(_RELAXED)
    try:
        yield
    finally:
        if before is not None:
            _exchange(before)


def node_count(graph: int) -> int:
    """Return the number of nodes of a ``CUgraph``."""
    driver = _driver()
    count = ctypes.c_size_t(0)
    status = driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)) if driver is not None else 999
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes returned {status}")
    return count.value


def _exchange(mode: int) -> int | None:
    driver = _driver()
    if driver is None:
        return None
    value = ctypes.c_int(mode)
    return value.value if driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(value)) == 0 else None
