"""The verbs everything else is written on: what a device runtime must offer, one protocol for each concern.

A runtime is one device. `host.HostRuntime` executes on the CPU, `cuda.CudaRuntime` over ``cupy.cuda``. Streams, events,
graphs and arrays are the runtime's native objects (``cupy.cuda.Stream``, `host.HostStream`, …) and opaque to everyone
else.

Semantics are CUDA's on every runtime: an event never recorded counts as complete, a wait refers to the last record
before the wait was issued, waiting twice is fine, a query never blocks, and an error during a capture invalidates it.
A failed verb raises the backend's own exception, which carries CUDA's numeric code as ``status``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from pixtreme.infer.frames import FrameLike

NativeStream: TypeAlias = Any
NativeEvent: TypeAlias = Any
NativeGraph: TypeAlias = Any
NativeArray: TypeAlias = Any


class CudaStreamLike(Protocol):
    """A stream of CuPy 14, cuda.core, numba-cuda or PyTorch."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class HostStreamLike(Protocol):
    """A stream of the host runtime."""

    def enqueue(self, task: Callable[..., object], /, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


StreamLike: TypeAlias = CudaStreamLike | HostStreamLike

Notify = Callable[[BaseException | None], object]

NOT_PERMITTED = 800
"""Status of the error for a call made inside a host task or host function, where a runtime takes none."""


def enqueueing_blocks() -> bool:
    """Tell whether PIXTREME_INFER_LAUNCH_BLOCKING asks for work that is over when its enqueueing returns (S32)."""
    return os.environ.get("PIXTREME_INFER_LAUNCH_BLOCKING", "") not in ("", "0")


class StreamKey(NamedTuple):
    """Identity of a stream. Drivers reuse pointer values, so the pointer alone says nothing across time."""

    device: str
    pointer: int
    generation: int


class PrivateMemory(Protocol):
    """A memory pool that lives as long as this object."""

    @property
    def outside(self) -> int:
        """How many allocations inside `use` blocks went to other pools so far."""
        ...

    def use(self) -> AbstractContextManager[object]:
        """Let this thread allocate from the pool while the block runs."""
        ...


class StreamVerbs(Protocol):
    """Native streams: their life, identity, and which one is current."""

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        ...

    def create_stream(self, *, priority: int) -> NativeStream:
        """Create a stream that orders itself with no default stream."""
        ...

    def destroy_stream(self, stream: NativeStream) -> None:
        """Release a stream; work already enqueued on it still runs to its end."""
        ...

    def cancel_pending(self, stream: NativeStream) -> None:
        """Drop what has not started, where that can be done: it and what is ordered after it fault."""
        ...

    def attach(self, stream: NativeStream) -> None:
        """Say that a context begins to use a stream, its own or somebody else's."""
        ...

    def detach(self, stream: NativeStream) -> None:
        """Say that it has ended; what the runtime keeps for the stream's contexts goes with the last one."""
        ...

    def key(self, stream: NativeStream) -> StreamKey:
        """Return the stream's identity."""
        ...

    def is_stream(self, value: object) -> bool:
        """Tell whether ``value`` is a native stream of this runtime."""
        ...

    def stream_at(self, pointer: int) -> NativeStream:
        """Return the stream that a DLPack consumer names by its pointer."""
        ...

    def orders_itself_with_the_default_stream(self, stream: NativeStream) -> bool:
        """Tell whether a stream is a blocking one, as CUDA calls it."""
        ...

    def current(self) -> NativeStream | None:
        """Return this thread's current stream, or None where the thread has none."""
        ...

    def here(self) -> Runtime:
        """Return the runtime, of this kind, of the device that is current on this thread."""
        ...

    def enqueue(self, stream: NativeStream, task: Callable[[], object]) -> None:
        """Enqueue what ``task`` does: a device whose own calls enqueue calls it now, the host's worker does later.

        On this thread the stream is current.
        """
        ...

    def activate(self, stream: NativeStream) -> Callable[[], None]:
        """Make device and stream current for this thread; the returned callable puts back what was found."""
        ...


class EventVerbs(Protocol):
    """Native events: recording, waiting, and being told that they completed."""

    def is_event(self, value: object) -> bool:
        """Tell whether ``value`` is a native event of this runtime."""
        ...

    def create_event(self, *, timing: bool = False) -> NativeEvent:
        """Create an event whose synchronisation blocks instead of spinning."""
        ...

    def record(self, event: NativeEvent, stream: NativeStream) -> None:
        """Record the event behind everything enqueued on the stream so far."""
        ...

    def wait(self, stream: NativeStream, event: NativeEvent) -> None:
        """Make the stream's later work wait for the event's last record; the host does not wait."""
        ...

    def query(self, event: NativeEvent) -> bool:
        """Return whether the event is complete, without blocking; raises the fault of a faulted one."""
        ...

    def synchronize(self, event: NativeEvent) -> None:
        """Block this thread until the event is complete; raises the fault of a faulted one."""
        ...

    def elapsed_ms(self, start: NativeEvent, end: NativeEvent) -> float:
        """Return device milliseconds between two complete events made with ``timing=True``."""
        ...

    def report(self, event: NativeEvent, stream: NativeStream, notify: Notify) -> None:
        """Call ``notify`` once, with the fault or None, after ``event`` (just recorded on ``stream``) completes.

        Calls come in stream order, on the runtime's own thread for that stream. The runtime holds ``notify``, and so
        everything it refers to, until then.
        """
        ...

    def ensure_reporting(self, stream: NativeStream) -> None:
        """Say that somebody now waits: from here on reports must come without any further call of ours.

        A runtime whose streams report by themselves (the host's worker) does nothing; CUDA starts its completion
        thread.
        """
        ...

    def reports_here(self, stream: NativeStream) -> bool:
        """Tell whether this thread is the one that reports for ``stream``: it must never wait for that stream."""
        ...

    def hold(self, stream: NativeStream) -> Callable[[], object]:
        """Hold the stream until the returned callable is called, which may be called again; for tests."""
        ...


class CaptureVerbs(Protocol):
    """Graphs: recording what is enqueued instead of running it, and launching it later."""

    def begin_capture(self, stream: NativeStream) -> None:
        """Record what is enqueued on the stream from now on, instead of running it."""
        ...

    def end_capture(self, stream: NativeStream) -> NativeGraph:
        """End the capture; the stream is out of it whether this returns a graph or raises."""
        ...

    def is_capturing(self, stream: NativeStream) -> bool:
        """Tell whether the stream is part of a capture, without disturbing it."""
        ...

    def node_count(self, graph: NativeGraph) -> int:
        """Return how many pieces of work the graph holds."""
        ...

    def launch(self, graph: NativeGraph, stream: NativeStream) -> None:
        """Enqueue the whole graph on the stream."""
        ...

    def private_memory(self) -> PrivateMemory:
        """Make a memory pool of its own for one graph session."""
        ...


class ArrayVerbs(Protocol):
    """Storage of the device: importing, allocating, comparing and copying it."""

    @property
    def needs_staging(self) -> bool:
        """Tell whether copies to and from the host need page-locked buffers to go on without the host."""
        ...

    @property
    def xp(self) -> ModuleType:
        """The array module of the device: ``numpy`` or ``cupy``."""
        ...

    def guarded(self, value: Any, event: NativeEvent, label: object) -> Any:
        """Return a value that work recorded by ``event`` fills, as a caller's function may see it before it is over.

        Where functions read at once, every way to the pixels raises until then; where they enqueue, the value itself.
        """
        ...

    def bare(self, value: Any) -> Any:
        """Return what `guarded` was given, for code that runs in stream order; anything else is returned itself."""
        ...

    def import_array(self, source: object, *, name: str) -> NativeArray:
        """View ``source`` as a native array of this device without copying; refusals name the input ``name``."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NativeArray:
        """Allocate an uninitialised C-contiguous array, ordered on the current stream."""
        ...

    def copy(self, target: NativeArray, source: NativeArray, stream: NativeStream) -> None:
        """Enqueue ``target[...] = source`` for arrays of one shape and dtype, which the caller keeps alive."""
        ...

    def address(self, array: NativeArray) -> int:
        """Return the address of an array's first element."""
        ...

    def overlaps(self, first: NativeArray, second: NativeArray) -> bool:
        """Tell whether two arrays share memory."""
        ...

    def same_storage(self, first: NativeArray, second: NativeArray) -> bool:
        """Tell whether two arrays are the same elements in the same order."""
        ...

    def staging_buffer(self, size: int) -> Any:
        """Allocate ``size`` bytes of host memory the device copies from and to asynchronously, as a NumPy array."""
        ...

    def copy_from_host(self, target: NativeArray, source: Any, stream: NativeStream) -> None:
        """Enqueue ``target[...] = source`` from a C-contiguous NumPy array, which the caller keeps alive."""
        ...

    def copy_to_host(self, target: Any, source: NativeArray, stream: NativeStream) -> None:
        """Enqueue ``target[...] = source`` to a C-contiguous NumPy array, which the caller keeps alive."""
        ...

    def to_host(self, array: NativeArray) -> Any:
        """Return a NumPy copy of an array no work is pending on."""
        ...

    def from_host(self, target: NativeArray, values: Any) -> None:
        """Overwrite an array no work is pending on with a NumPy array's values."""
        ...

    def make_frame(
        self, data: NativeArray, *, channels: Any, colorspace: Any, gamma: Any, matrix: Any = None
    ) -> FrameLike:
        """Wrap an array in this runtime's kind of frame; checks the metadata and touches no pixel."""
        ...


class Runtime(StreamVerbs, EventVerbs, CaptureVerbs, ArrayVerbs, Protocol):
    """One device and all its verbs."""
