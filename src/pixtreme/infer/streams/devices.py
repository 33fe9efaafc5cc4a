"""Device names, and the runtime behind each."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pixtreme.infer.errors import ContextError
from pixtreme.infer.streams import scope
from pixtreme.infer.streams.host import RUNTIME as HOST
from pixtreme.infer.streams.runtime import NativeStream, Runtime

if TYPE_CHECKING:
    from pixtreme.infer.streams.context import StreamContext

__all__ = ("available_devices",)


def available_devices() -> tuple[str, ...]:
    """Return the devices a context can be opened on, the preferred one first.

    Returns
    -------
    tuple[str, ...]
        Names ``StreamContext.open`` takes; ``"cpu"`` is always among them.

    Host synchronization
        None; nothing is initialised on a device.
    """
    return ("cpu",)


def runtime_for(device: str | int) -> Runtime:
    """Return the runtime of ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or the CUDA ordinal ``N``.

    Raises
    ------
    ContextError
        The device does not exist or cannot be used; names those that can.
    """
    available = available_devices()
    name = _canonical_name(device)
    if name == "auto":
        name = available[0]
    if name == "cpu":
        return HOST
    raise ContextError(
        why="the device cannot be used" if name is not None else "the device name is not known",
        what=f"received device={device!r}; available here are {available!r} "
        "(accepted forms: 'auto', 'cpu', 'cuda', 'cuda:N', N)",
        how="open an available device, or 'auto' for the best of them"
        + ("; this version has no CUDA runtime yet" if name is not None else ""),
    )


def current_stream(why: str) -> tuple[Runtime, NativeStream, StreamContext | None]:
    """Return this thread's current runtime and stream, and the context of the ``use()`` scope that made it current.

    Raises
    ------
    ContextError
        No explicit stream is current; ``why`` says what needs one.
    """
    stream = HOST.current()
    if stream is None:
        raise ContextError(
            why=why,
            what="no explicit stream is current on this thread",
            how="call it inside `with context.use():`",
        )
    context = scope.current_context()
    if context is None or context._key != HOST.key(stream):
        return HOST, stream, None
    return HOST, stream, cast("StreamContext", context)


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
