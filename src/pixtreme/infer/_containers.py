"""Lists, tuples and dicts that are looked into: the same value with its items changed, or itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_looked_into(value: object) -> bool:
    """Tell whether a value is an exact list, tuple or dict, or a named tuple."""
    return type(value) in (list, tuple, dict) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def with_items[A](value: A, change: Callable[[Any], Any]) -> A:
    """Return such a container with every item, of a dict every value, replaced by ``change(item)``.

    Where no item changes, the container itself is returned, so that a function may fill a list it was given.
    """
    kind: Any = type(value)
    container: Any = value
    if kind is dict:
        made_anew: Any = {key: change(item) for key, item in container.items()}
        return value if all(made_anew[key] is item for key, item in container.items()) else made_anew
    items: list[Any] | None = None  # nothing is made while nothing changes: this is on the way of every request
    for index, item in enumerate(container):
        changed = change(item)
        if items is None and changed is not item:
            items = list(container[:index])
        if items is not None:
            items.append(changed)
    if items is None:
        return value
    made: A = kind(*items) if hasattr(value, "_fields") else kind(items)
    return made
