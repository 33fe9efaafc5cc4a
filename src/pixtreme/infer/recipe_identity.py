"""Recipes by name and version: what a training or export recipe is called wherever a file refers to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from typing_extensions import TypeIs

from pixtreme.infer.declarations import Precision, is_positive_int
from pixtreme.infer.errors import ContractError

__all__ = (
    "RecipeIdentity",
    "RecipeCatalogEntry",
    "RecipeIdentityError",
    "is_positive_discriminator",
    "parse_recipe_identity",
    "validate_recipe_reference",
)


class RecipeIdentityError(ContractError):
    """A recipe's identity is malformed, or refers to nothing in the catalog.

    Parameters
    ----------
    path
        Where the value stands, such as ``"model.recipe.version"``.
    detail
        What was observed there and what is accepted.

    Attributes
    ----------
    detail
        ``f"{path}: {detail}"``.
    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(
            why="a recipe is referred to by its name and version, as the catalog holds them",
            what=f"{path}: {detail}",
            how="correct the value at that path",
        )
        self.path = path
        self.detail = self.what

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.detail.removeprefix(f"{self.path}: "))


@dataclass(frozen=True)
class RecipeIdentity:
    """A recipe's name, a non-empty string, and version, an int from 1."""

    name: str
    version: int

    def __post_init__(self) -> None:
        _check("RecipeIdentity", self.name, self.version)

    def as_tuple(self) -> tuple[str, int]:
        """Return ``(name, version)``."""
        return self.name, self.version

    def as_dict(self) -> dict[str, str | int]:
        """Return ``{"name": name, "version": version}``, which `parse_recipe_identity` takes back."""
        return {"name": self.name, "version": self.version}


@dataclass(frozen=True)
class RecipeCatalogEntry:
    """A known recipe and the precisions it supports."""

    identity: RecipeIdentity
    supported_precisions: tuple[Precision, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.identity, RecipeIdentity):
            raise RecipeIdentityError(
                "RecipeCatalogEntry.identity", f"observed {self.identity!r}; accepted is a RecipeIdentity"
            )
        supported = self.supported_precisions
        if (
            not isinstance(supported, tuple)
            or not supported
            or any(precision not in get_args(Precision) for precision in supported)
        ):
            raise RecipeIdentityError(
                "RecipeCatalogEntry.supported_precisions",
                f"observed {supported!r}; accepted is a non-empty tuple of {get_args(Precision)!r}",
            )


def is_positive_discriminator(value: object) -> TypeIs[int]:
    """Tell whether a value can be a version: an int from 1; a bool is not an int here."""
    return is_positive_int(value)


def parse_recipe_identity(mapping: object, *, path: str) -> RecipeIdentity:
    """Read an identity from plain data, such as parsed JSON.

    Parameters
    ----------
    mapping
        Exactly ``{"name": <non-empty string>, "version": <int from 1>}``.
    path
        Where the mapping stands; errors name it.

    Raises
    ------
    RecipeIdentityError
        It is no such mapping.
    """
    if not isinstance(mapping, Mapping):
        raise RecipeIdentityError(path, f"observed {mapping!r}; accepted is a mapping with 'name' and 'version'")
    if set(mapping) != {"name", "version"}:
        keys = sorted(map(repr, mapping))
        raise RecipeIdentityError(path, f"observed the keys [{', '.join(keys)}]; accepted are 'name' and 'version'")
    _check(path, mapping["name"], mapping["version"])
    return RecipeIdentity(mapping["name"], mapping["version"])


def validate_recipe_reference(
    identity: RecipeIdentity,
    *,
    catalog: Iterable[RecipeCatalogEntry],
    path: str,
    precision: Precision | None = None,
) -> RecipeCatalogEntry:
    """Find an identity in the catalog.

    Parameters
    ----------
    identity
        What is referred to.
    catalog
        Every known recipe.
    path
        Where the reference stands; errors name it.
    precision
        One the recipe must support; None asks for none.

    Returns
    -------
    RecipeCatalogEntry
        The entry found.

    Raises
    ------
    RecipeIdentityError
        The catalog does not hold it, or it does not support ``precision``; says what the catalog holds.
    """
    entries = list(catalog)
    for entry in entries:
        if entry.identity != identity:
            continue
        if precision is not None and precision not in entry.supported_precisions:
            raise RecipeIdentityError(
                path,
                f"observed precision={precision!r} for {identity!r}; "
                f"the catalog holds it with {entry.supported_precisions!r}",
            )
        return entry
    held = [entry.identity.as_tuple() for entry in entries]
    raise RecipeIdentityError(path, f"observed {identity!r}; the catalog holds {held!r}")


def _check(path: str, name: object, version: object) -> None:
    if not isinstance(name, str) or not name:
        raise RecipeIdentityError(f"{path}.name", f"observed {name!r}; accepted is a non-empty string")
    if not is_positive_discriminator(version):
        raise RecipeIdentityError(
            f"{path}.version", f"observed {version!r}; accepted is an int from 1 (a bool is not an int here)"
        )
