"""Values of an `EventHandle` that are more than an object: one still to come, and one that went abroad."""

from __future__ import annotations

from functools import partial
from typing import Any

from pixtreme.infer.streams import _captures
from pixtreme.infer.streams._stream import Stream


class Foreign:
    """The streams without a context that a handle's value was handed to. It goes with the handle (S16, S34)."""

    __slots__ = ("_value", "streams")

    def __init__(self, value: object) -> None:
        self._value = value
        self.streams: list[Stream] = []

    def __del__(self) -> None:
        for stream in self.streams:
            _captures.release(stream.key.device, partial(stream.keep_until_done, self._value))


class Later:
    """What an enqueued function will return: it exists once the function ran on its stream."""

    __slots__ = ("is_known", "value")

    def __init__(self) -> None:
        self.is_known = False
        self.value: Any = None

    def become(self, value: object) -> None:
        """The function returned; in a graph, once more."""
        self.value = value
        self.is_known = True
