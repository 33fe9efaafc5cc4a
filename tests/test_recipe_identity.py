"""Recipe identities (C14). Bad input is in test_bad_input."""

from __future__ import annotations

import pickle

import pytest

from pixtreme.infer.recipe_identity import (
    RecipeCatalogEntry,
    RecipeIdentity,
    RecipeIdentityError,
    is_positive_discriminator,
    parse_recipe_identity,
    validate_recipe_reference,
)

PHOTO = RecipeIdentity("photo", 2)
FILM = RecipeIdentity("film", 1)
CATALOG = (RecipeCatalogEntry(FILM, ("fp32",)), RecipeCatalogEntry(PHOTO, ("fp32", "fp16")))


def test_forms() -> None:
    """C14: a tuple, a dictionary, and back; usable as a key."""
    assert PHOTO.as_tuple() == ("photo", 2)
    assert PHOTO.as_dict() == {"name": "photo", "version": 2}
    assert parse_recipe_identity(PHOTO.as_dict(), path="recipe") == PHOTO
    assert {PHOTO: 1}[RecipeIdentity("photo", 2)] == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, True), (10**30, True), (0, False), (-1, False), (True, False), (1.0, False), ("1", False), (None, False)],
)
def test_discriminator(value: object, expected: bool) -> None:
    """C14: a version is a positive int, never a bool."""
    assert is_positive_discriminator(value) is expected


def test_reference() -> None:
    """C14: the entry of the catalog is found, at a precision it supports."""
    assert validate_recipe_reference(PHOTO, catalog=CATALOG, path="p") is CATALOG[1]
    assert validate_recipe_reference(PHOTO, catalog=iter(CATALOG), path="p", precision="fp16") is CATALOG[1]


def test_error() -> None:
    """C2, C14: built from path and detail; it says both, and survives pickling."""
    error = RecipeIdentityError("model.recipe", "observed 3; accepted is a name")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert issubclass(type(one), ValueError)
        assert (one.path, one.detail) == ("model.recipe", "model.recipe: observed 3; accepted is a name")
        assert one.detail in str(one)
