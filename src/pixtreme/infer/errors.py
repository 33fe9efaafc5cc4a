"""Errors that say why, what was observed and is accepted, and how to go on.

The tree (each class is also the builtin that a caller would catch)::

    InferError
    ├── ContractError       ValueError    an argument, shape, dtype, name or artifact breaks a contract
    ├── ContextError        ValueError    wrong device, stream, thread or process
    ├── BusyError           RuntimeError  a bound is reached; try again
    ├── ClosedError         RuntimeError  used after close()
    ├── CaptureError        RuntimeError  work that cannot be captured, or a call refused during a capture
    ├── StreamFault         RuntimeError  device work failed; the backend's exception is the __cause__
    │   └── WorkCancelled                 work that was dropped before it started, by close(cancel_pending=True)
    ├── PipelineError       RuntimeError  an item of a pipeline failed; what it raised is the __cause__
    ├── HandleTimeout       TimeoutError  result(timeout) ran out; the handle stays usable
    └── NotPicklableError   TypeError     streams, handles and sessions do not leave their process

What holds after an exception is written in ``docs/errors.md``.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = (
    "actionable_error",
    "InferError",
    "ContractError",
    "ContextError",
    "BusyError",
    "ClosedError",
    "CaptureError",
    "StreamFault",
    "WorkCancelled",
    "PipelineError",
    "HandleTimeout",
    "NotPicklableError",
    "LoopBlockedWarning",
)


def actionable_error(*, why: str, what: str, how: str) -> str:
    """Return the library's error text, ``why=<why>; what=<what>; how=<how>``.

    Parameters
    ----------
    why
        The rule that was broken.
    what
        The observed value and what is accepted.
    how
        An action the reader can take now.
    """
    return f"why={why}; what={what}; how={how}"


class InferError(Exception):
    """Base of every error this library raises on purpose.

    Attributes
    ----------
    why, what, how
        The three parts of the message, for programs that show them apart.
    """

    def __init__(self, *, why: str, what: str, how: str) -> None:
        super().__init__(actionable_error(why=why, what=what, how=how))
        self.why = why
        self.what = what
        self.how = how

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors do travel between processes (a pool's worker raises one); keyword-only arguments need help there.
        return _rebuild, (type(self), self.why, self.what, self.how), self.__dict__


def _rebuild(kind: type[InferError], why: str, what: str, how: str) -> InferError:
    return kind(why=why, what=what, how=how)


class ContractError(InferError, ValueError):
    """An argument, shape, dtype, name or artifact does not satisfy its contract."""


class ContextError(InferError, ValueError):
    """The device, stream, thread or process is not the one this call belongs to."""


class BusyError(InferError, RuntimeError):
    """A bound is reached or the work is still under way; try again later."""


class ClosedError(InferError, RuntimeError):
    """The object was closed; open a new one."""


class CaptureError(InferError, RuntimeError):
    """Work that cannot be captured, or a call that is refused while a stream captures."""


class StreamFault(InferError, RuntimeError):
    """Device work failed. ``__cause__`` is the backend's exception."""


class WorkCancelled(StreamFault):
    """The work was dropped before it started: its context was closed with ``cancel_pending``, or left by Ctrl-C."""


class PipelineError(InferError, RuntimeError):
    """An item of a pipeline or pool failed. ``__cause__`` is what its source, stage or device raised.

    Attributes
    ----------
    index
        The item, counted from 0 in source order.
    stage
        The name of the stage, or ``"source"``.
    """

    index: int = -1
    stage: str = ""


class HandleTimeout(InferError, TimeoutError):
    """The wait ran out of time. The work goes on and the handle stays usable."""


class NotPicklableError(InferError, TypeError):
    """The object is bound to this process's streams; send data instead."""


class LoopBlockedWarning(RuntimeWarning):
    """A blocking call was made on a thread that runs an event loop; the text names the form that awaits.

    Given in Python's development mode (``python -X dev``) and asyncio's debug mode, once a call site.
    """


def refuse_argument(owner: object, field: str, observed: object, accepted: str) -> NoReturn:
    """Raise the `ContractError` for a malformed argument ``field`` of ``owner``: a name, or the object itself."""
    name = owner if isinstance(owner, str) else type(owner).__name__
    raise ContractError(
        why=f"{field} of {name} is malformed",
        what=f"received {field}={observed!r}; accepted is {accepted}",
        how=f"pass {accepted} as {field}",
    )


def refuse_pickle(thing: object, send: str) -> NotPicklableError:
    """Return the error for ``__reduce__`` of an object bound to this process (S38)."""
    name = type(thing).__name__
    return NotPicklableError(
        why=f"a {name} is bound to a stream of this process",
        what=f"pickling or copying {thing!r} was asked for; only plain data can be sent",
        how=f"send {send} instead, and open a new {name} in the other process",
    )
