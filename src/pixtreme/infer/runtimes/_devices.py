"""Device names, and the runtime behind each."""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib import metadata
from typing import Any

from pixtreme.infer.errors import ContextError
from pixtreme.infer.runtimes._protocol import NativeStream, Runtime
from pixtreme.infer.runtimes.host import RUNTIME as HOST

logger = logging.getLogger("pixtreme.infer")
DEFAULT_STREAMS = (0, 1, 2)  # null, legacy, per-thread


def available_devices() -> tuple[str, ...]:
    """Return the devices a context can be opened on, the preferred one first.

    Returns
    -------
    tuple[str, ...]
        Names ``StreamContext.open`` takes; ``"cpu"`` is always among them.

    Host synchronization
    --------------------
    None; nothing is initialised on a device.
    """
    try:
        count = _cuda().device_count()
    except ImportError:  # no CuPy
        count = 0
    return (*(f"cuda:{ordinal}" for ordinal in range(count)), "cpu")


def runtime_for(device: str | int) -> Runtime:
    """Return the runtime of ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or the CUDA ordinal ``N``.

    Raises
    ------
    ContextError
        The device does not exist or cannot be used; names those that can.
    """
    name = _canonical_name(device)
    available = ("cpu",) if name == "cpu" else available_devices()
    if name == "auto":
        name = available[0]
        if name == "cpu":
            _say_why_cpu()
    if name == "cpu":
        return HOST
    if name not in available:
        raise ContextError(
            why="the device cannot be used" if name is not None else "the device name is not known",
            what=f"received device={device!r}; available here are {available!r} "
            "(accepted forms: 'auto', 'cpu', 'cuda', 'cuda:N', N)"
            + (f"; CUDA cannot be used: {why_no_cuda()}" if name is not None and available == ("cpu",) else ""),
            how="open an available device, or 'auto' for the best of them",
        )
    return _runtime(name)


def why_no_cuda() -> str:
    """Return why no CUDA device can be used, and the remedy."""
    try:
        reason: str = _cuda().why_unusable()
    except ImportError as error:
        reason = f"CuPy cannot be imported ({error}); install the CuPy distribution of your CUDA version"
    found = sorted(
        one.name for one in metadata.distributions() if one.name and re.fullmatch(r"cupy(-cuda.*|-rocm.*)?", one.name)
    )
    if len(found) > 1:
        reason += f"; CuPy is installed more than once, as {found}: uninstall all of them and install one"
    return reason


@cache
def _say_why_cpu() -> None:
    logger.info("'auto' opens the CPU: %s", why_no_cuda())


def pci_bus_id(device: str | int) -> str:
    """Return the PCI address of a CUDA device, which names the same card to CUDA and to NVML.

    Raises
    ------
    ContextError
        No such device can be used.
    """
    name = runtime_for(device).device
    if name == "cpu":
        raise ContextError(
            why="only a CUDA device has a PCI address",
            what=f"received device={device!r}; accepted are 'cuda', 'cuda:N' and N",
            how="name a CUDA device",
        )
    address: str = _cuda().pci_bus_id(int(name.removeprefix("cuda:")))
    return address


def native_stream(stream: object) -> tuple[Runtime, NativeStream]:
    """Return the runtime of a stream that somebody else owns, and the stream as that runtime knows it.

    Raises
    ------
    ContextError
        It is no stream, or a default stream.
    """
    if HOST.is_stream(stream):
        return HOST, stream
    if not hasattr(stream, "__cuda_stream__"):
        raise ContextError(
            why="only a native stream can be adopted",
            what=f"received {stream!r}; accepted are host streams, CuPy streams and objects with __cuda_stream__",
            how="pass a native stream, or open a context of its own with StreamContext.open()",
        )
    runtime, native = _cuda().native_stream(stream)
    if native.ptr in DEFAULT_STREAMS:
        raise ContextError(
            why="a default stream orders itself with other streams and cannot be captured",
            what=f"received {stream!r}, default stream {native.ptr}; any other will do",
            how="pass a stream of its own, such as cupy.cuda.Stream(non_blocking=True)",
        )
    return runtime, native


def current_runtime() -> Runtime:
    """Return CUDA's runtime where this thread made a CuPy stream current, else the host's."""
    runtime: Runtime | None = _cuda().current_runtime()
    return HOST if runtime is None else runtime


def _runtime(name: str) -> Runtime:
    runtime: Runtime = _cuda().runtime_of(int(name.removeprefix("cuda:")))
    return runtime


def _cuda() -> Any:
    """The CUDA adapter, imported when a device is asked for."""
    from pixtreme.infer.runtimes.cuda import _runtime

    return _runtime


def _canonical_name(device: str | int) -> str | None:
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"cuda:{device}"
    if device in ("auto", "cpu"):
        return str(device)
    if device == "cuda":
        return "cuda:0"
    if isinstance(device, str) and device.startswith("cuda:") and device[5:].isdecimal():
        return f"cuda:{int(device[5:])}"
    return None
