"""What verification raises instead of giving a verdict."""

from __future__ import annotations

from typing import NoReturn

from pixtreme.infer.errors import InferError


class VerificationInputError(InferError, ValueError):
    """An argument or a fact is malformed: nothing can be said about the module."""


class VerificationExecutionError(InferError, RuntimeError):
    """A provider of facts or telemetry, or an operation of ours, failed; the ``__cause__`` says why."""


def refuse(subject: str, observed: str, accepted: str) -> NoReturn:
    """Raise the error for a malformed argument or fact."""
    raise VerificationInputError(
        why=f"{subject} is malformed, and a verdict on it would say nothing",
        what=f"received {observed}; accepted is {accepted}",
        how=f"pass {accepted}",
    )
