"""`Request`: one call of a bound module with host pixels, on whatever device it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any, Protocol

import numpy as np

from pixtreme.infer.contracts import Exact, FrameContract
from pixtreme.infer.errors import ContractError
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.streams._copies import Lease, Pixels, frame_in, to_host
from pixtreme.infer.streams._stream import Consumer


class Bound(Protocol):
    """A bound module, as far as a request needs it."""

    @property
    def context(self) -> Consumer: ...
    @property
    def instance(self) -> Any: ...
    @property
    def contract(self) -> Any: ...


class Request:
    """One call of a bound module with host pixels: brought in first, and the result brought out if asked."""

    def __init__(self, bound: Bound, *, host: bool = False) -> None:
        self._bound = bound
        self._host = host
        self.lease: Lease | None = None  # waited for before; else the copies take what is free
        self.__qualname__ = type(bound.instance).__qualname__  # what messages call the submission

    def __call__(self, frame: Any, /, **params: Any) -> Any:
        instance, stream = self._bound.instance, self._bound.context.core_stream
        if isinstance(frame, np.ndarray) and stream.runtime.bare(frame) is frame:
            frame = _labelled(frame, self._bound.contract.module_contract.input_frame)
        if isinstance(frame, HostFrame):
            frame = frame_in(stream, frame, self.lease)
        result = instance(frame, **params)
        return to_host(result, self.lease) if self._host else result


def _labelled(pixels: Pixels, contract: FrameContract) -> HostFrame:
    """Make a frame of NumPy pixels with the labels a contract names."""
    fields: dict[str, Any] = {
        name: field.value if isinstance(field := getattr(contract, name), Exact) else field.reference
        for name in ("channels", "colorspace", "gamma", "matrix")
    }
    return HostFrame(data=pixels, **fields)


async def iterated(source: object) -> AsyncGenerator[Any]:
    if isinstance(source, AsyncIterable):
        async for one in source:
            yield one
    elif isinstance(source, Iterable) and not isinstance(source, str | bytes):
        for one in source:
            yield one
    else:
        raise ContractError(
            why="map takes its frames from a source",
            what=f"received source={source!r}; accepted is an iterable or async iterable of frames",
            how="pass an iterable, such as a list or generator of frames",
        )
