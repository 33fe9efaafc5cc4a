"""What several test files use."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import anyio.lowlevel
import numpy as np
import numpy.typing as npt
from anyio.abc import TaskGroup

from pixtreme.infer.frames import HostFrame
from pixtreme.infer.streams import EventHandle, StreamContext

WAIT_S = 20.0  # how long a test waits for something that must happen


async def park[T](group: TaskGroup, handles: list[EventHandle[T]]) -> list[T]:
    """Await each pending handle in a task of its own; return once all are parked, with the list that takes values."""
    values: list[T] = []

    async def take(handle: EventHandle[T]) -> None:
        values.append(await handle)

    for handle in handles:
        group.start_soon(take, handle)
    while not all(handle.completion.waiters for handle in handles):  # trio runs a batch in either order
        await anyio.lowlevel.checkpoint()
    return values


class Gate:
    """Holds streams in a known unfinished state until it is opened; no test sleeps instead."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()

    def hold(self, context: StreamContext) -> None:
        """Enqueue a task that waits for the gate."""
        context.stream.enqueue(self.wait)

    def wait(self) -> None:
        self._reached.set()
        assert self._open.wait(WAIT_S), "the gate was never opened"

    def wait_until_reached(self) -> None:
        """Block until a stream stands at the gate."""
        assert self._reached.wait(WAIT_S), "no stream reached the gate"

    def open(self) -> None:
        self._open.set()


class LogRecords(logging.Handler):
    """Collects messages."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    def take(self) -> list[str]:
        """Return the messages and forget them."""
        messages, self.records = self.messages, []
        return messages


def run_quietly(program: str) -> None:
    """Run a program in an interpreter of its own: it must end by itself, with exit code 0 and nothing on stderr."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")


class Boom(Exception):
    """Raised by host tasks on purpose."""


def fail(text: str = "boom") -> None:
    raise Boom(text)


def fault(context: StreamContext) -> None:
    """Break a context's stream on the device."""
    context.submit(context.stream.enqueue, fail).exception()


def frame(value: float = 0.0, *, shape: tuple[int, int, int] = (4, 6, 3), dtype: str = "float32") -> HostFrame:
    """A frame filled with one value."""
    return HostFrame(data=np.full(shape, value, dtype), channels="RGB"[: shape[2]], colorspace="sRGB", gamma="sRGB")


def doubled(context: StreamContext, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Enqueue ``2 * array`` and return where it arrives."""
    result = np.empty_like(array)
    context.stream.enqueue(np.multiply, array, 2, result)
    return result
