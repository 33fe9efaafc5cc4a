"""Architectures by name: ``pixtreme.infer.span`` is a distribution of its own, imported when it is asked for.

The table is closed: a name that is not in it is no architecture.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NamedTuple

from pixtreme.infer.errors import actionable_error

__all__ = ("Architecture", "architectures")

DISTRIBUTIONS = {"span": "pixtreme-infer-span", "cda_vsr": "pixtreme-infer-cda-vsr"}


class Architecture(NamedTuple):
    """A known architecture: importable as ``pixtreme.infer.<name>`` once its distribution is installed."""

    name: str
    distribution: str
    version: str | None  #: of the installed distribution; None where it is absent


def architectures() -> tuple[Architecture, ...]:
    """Return every known architecture, installed or not, from the distributions' metadata; imports none."""
    return tuple(
        Architecture(name, distribution, _version(distribution)) for name, distribution in DISTRIBUTIONS.items()
    )


def resolve(name: str) -> ModuleType:
    """Import ``pixtreme.infer.<name>`` of the table.

    Raises
    ------
    ImportError
        Its distribution is not installed. What fails *inside* an installed one passes through untouched (C10).
    """
    module = f"pixtreme.infer.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # the module is there; what it needs is not
        distribution = DISTRIBUTIONS[name]
        raise ImportError(
            actionable_error(
                why=f"the architecture {module} is a distribution of its own",
                what=f"no module {module!r} was found; accepted is an environment with {distribution!r} installed",
                how=f"pip install {distribution}",
            ),
            name=module,
        ) from error


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
