"""What callers pass: options of a context, and handles among the arguments of a submission."""

from __future__ import annotations

from typing import Any, NoReturn

from pixtreme.infer.declarations import is_positive_int
from pixtreme.infer.errors import ContractError
from pixtreme.infer.streams.handle import EventHandle


def replace_handles[A](value: A, found: list[EventHandle[Any]]) -> A:
    """Return ``value`` with every handle in it replaced by the handle's value, and add those handles to ``found``.

    Looks inside lists, tuples (named ones too) and dict values. A container without a handle is returned itself, so
    that a function may fill a list it was given.
    """
    swapped: Any = value
    if isinstance(value, EventHandle):
        found.append(value)
        swapped = value._value
    elif isinstance(value, dict) and type(value) is dict:
        replaced = {key: replace_handles(item, found) for key, item in value.items()}
        if any(replaced[key] is not item for key, item in value.items()):
            swapped = replaced
    elif isinstance(value, list | tuple) and (type(value) in (list, tuple) or hasattr(value, "_fields")):
        items = [replace_handles(item, found) for item in value]
        if any(item is not old for item, old in zip(items, value, strict=True)):
            swapped = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return swapped  # type: ignore[no-any-return]


def check_options(*, name: object, priority: object, timing: object, max_in_flight: object) -> None:
    """Check what `StreamContext.open` and ``adopt`` take beside the device."""
    if name is not None and (not isinstance(name, str) or not name):
        _refuse("name", name, "None or a non-empty string")
    if not isinstance(priority, int) or isinstance(priority, bool):
        _refuse("priority", priority, "an int (lower is more urgent)")
    if not isinstance(timing, bool):
        _refuse("timing", timing, "True or False")
    if max_in_flight is not None and not is_positive_int(max_in_flight):
        _refuse("max_in_flight", max_in_flight, "None or a positive int")


def _refuse(option: str, observed: object, accepted: str) -> NoReturn:
    raise ContractError(
        why=f"{option} of a stream context is malformed",
        what=f"received {option}={observed!r}; accepted is {accepted}",
        how=f"pass {accepted}",
    )
