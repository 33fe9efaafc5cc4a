"""What importing an array checks on every runtime (G13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pixtreme.infer.errors import ContractError

_NUMERIC_KINDS = "biuf"  # bool, signed and unsigned int, float


def through_dlpack[A](load: Callable[[Any], A], source: object, name: str, *, instead: str) -> A:
    """Import a DLPack producer with ``load``; what its export raises is the cause of a refusal."""
    try:
        return load(source)
    except Exception as error:
        raise ContractError(
            why=f"input {name!r} is imported through DLPack",
            what=f"{type(source).__module__}.{type(source).__qualname__} refused the export: {error}",
            how=f"pass a {instead} of the same values",
        ) from error


def check_dtype(array: Any, name: str) -> None:
    """Refuse an array that does not hold plain numbers in native byte order."""
    if array.dtype.kind not in _NUMERIC_KINDS or not array.dtype.isnative:
        raise ContractError(
            why=f"input {name!r} must hold plain numbers in native byte order",
            what=f"received dtype={array.dtype!s} ({array.dtype.str}); accepted are bool, int, uint and float dtypes",
            how="convert it, for example with array.astype(array.dtype.newbyteorder('='))",
        )
