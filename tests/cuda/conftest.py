"""Fixtures of the tests on a CUDA device: a real card, or the emulated one (`tests/cudaemu`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from pixtreme.infer.streams import StreamContext, available_devices


@pytest.fixture(autouse=True)
def device() -> None:
    """Skip where no CUDA device is usable."""
    if "cuda:0" not in available_devices():
        pytest.skip("no CUDA device; tests/cudaemu/run.sh runs this on an emulated one")


class Emulator:
    """Hooks of the emulated device: streams held in a known unfinished state, and faults."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._flags: list[ctypes.c_int] = []

    def hold(self, stream: Any) -> None:
        """Hold a stream until `release`."""
        flag = ctypes.c_int(0)
        self._flags.append(flag)
        assert self._library.emu_block(ctypes.c_void_p(stream.ptr), ctypes.byref(flag)) == 0

    def release(self) -> None:
        """Let every held stream go on."""
        for flag in self._flags:
            flag.value = 1

    def fault(self, stream: Any) -> None:
        """Enqueue work that fails the way an illegal address does: with an error that stays."""
        assert self._library.emu_fault(ctypes.c_void_p(stream.ptr), 700) == 0

    def reset(self) -> None:
        """Clear the fault, which no real device does."""
        self._library.emu_reset_fault()

    def live(self, what: int) -> int:
        """Count what lives: 0 streams, 1 events, 2 graphs, 3 graph execs, 4 allocations, 5 captures."""
        return int(self._library.emu_live(what))


@pytest.fixture
def emulator(device: None) -> Iterator[Emulator]:
    """The emulated device's hooks; a real card has none."""
    library = ctypes.CDLL("libcudart.so.12")
    if not hasattr(library, "emu_block"):
        pytest.skip("a real card has no hooks to hold or fault a stream")
    library.emu_live.restype = ctypes.c_long
    opened = Emulator(library)
    yield opened
    opened.release()
    opened.reset()


@pytest.fixture
def context(device: None) -> Iterator[StreamContext]:
    """An open context on the device."""
    with StreamContext.open("cuda:0", name="first") as opened:
        yield opened


@pytest.fixture
def other(device: None) -> Iterator[StreamContext]:
    """A second one."""
    with StreamContext.open("cuda:0", name="second") as opened:
        yield opened
