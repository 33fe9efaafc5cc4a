"""What ``dir`` and completion show of an object."""

from __future__ import annotations

from collections.abc import Iterable


def public_dir(of: object, seams: Iterable[str]) -> list[str]:
    """Return an object's names without private ones, and without ``seams``, which only this library's modules use."""
    private = {name for name in object.__dir__(of) if name.startswith("_") and not name.startswith("__")}
    return sorted({*object.__dir__(of)} - private - {*seams})
