"""Records of verification: canonical JSON, digests, and references that can be checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

import numpy as np

from pixtreme.infer.declarations import Precision, is_positive_int
from pixtreme.infer.verification.errors import VerificationInputError, refuse

__all__ = (
    "JsonReference",
    "CommonRecordFields",
    "canonical_json",
    "canonical_sha256",
    "file_sha256",
    "portable_path",
    "validate_common_record",
    "load_json_reference",
)

_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class JsonReference:
    """A JSON file below a root that is known from elsewhere: its portable path, and the SHA-256 of its bytes."""

    path: str
    sha256: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            refuse("path", repr(self.path), "a portable path, as portable_path() returns it")
        if not isinstance(self.sha256, str) or not _DIGEST.fullmatch(self.sha256):
            refuse("sha256", repr(self.sha256), "64 lower-case hex digits")


@dataclass(frozen=True)
class CommonRecordFields:
    """What every record says.

    ``executed_at`` is RFC 3339 with an offset, ``environment`` and ``artifacts`` are JSON objects.
    """

    schema_version: int
    record_type: str
    architecture: str
    environment_id: str
    executed_at: str
    environment: Mapping[str, Any]
    artifacts: Mapping[str, Any]
    precision: Precision | None = None


def canonical_json(value: object) -> bytes:
    """Return the one spelling of a JSON value: UTF-8, keys sorted by code point, no spaces.

    ``1``, ``1.0`` and ``true`` are three values and stay three. Tuples are arrays; NumPy scalars are the plain
    numbers they hold. Text is not normalised.

    Raises
    ------
    VerificationInputError
        A value has no JSON form: NaN, infinities, keys that are no strings, lone surrogates, cycles, nesting beyond
        the interpreter's depth, other types. Says where.
    """
    try:
        plain = _plain(value, "$", ())
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise _malformed("$", "nesting deeper than the interpreter can follow", "a shallower value") from error
    except VerificationInputError:
        raise
    except ValueError as error:  # an int of more digits than Python converts
        raise _malformed("$", str(error), "numbers that can be written out") from error
    return text.encode()


def canonical_sha256(value: object) -> str:
    """Return the SHA-256 of a value's canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_sha256(path: str | PathLike[str]) -> str:
    """Return the SHA-256 of a regular file's bytes, 64 hex digits.

    Raises
    ------
    VerificationInputError
        It is no regular file.
    OSError
        It cannot be read.
    """
    with os.fdopen(_open_regular(Path(path)), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def portable_path(path: str | PathLike[str], /, *, root: str | PathLike[str]) -> str:
    """Return ``path`` relative to ``root`` with forward slashes, as records hold it.

    Relative paths start at ``root``; symbolic links are followed first.

    Raises
    ------
    VerificationInputError
        It leads out of the root, also through a link, or is the root itself, or cannot be written in UTF-8.
    """
    return _below(path, root).relative_to(Path(root).resolve()).as_posix()


def validate_common_record(record: Mapping[str, Any]) -> CommonRecordFields:
    """Check what every record says, and return it; fields of the record's own type are left alone.

    Raises
    ------
    VerificationInputError
        A field is missing or malformed; names it.
    """
    if not isinstance(record, Mapping):
        refuse("record", repr(record), "a JSON object")
    if missing := [name for name in CommonRecordFields.__annotations__ if name != "precision" and name not in record]:
        refuse("record", f"no {', '.join(missing)}", "a record with every common field")
    if not is_positive_int(record["schema_version"]):
        refuse("schema_version", repr(record["schema_version"]), "a positive int")
    for name in ("record_type", "architecture", "environment_id"):
        if not isinstance(record[name], str) or not record[name]:
            refuse(name, repr(record[name]), "a non-empty string")
    _check_moment(record["executed_at"])
    for name in ("environment", "artifacts"):
        if not isinstance(record[name], Mapping):
            refuse(name, repr(record[name]), "a JSON object")
    precision = record.get("precision")
    if precision is not None and precision not in get_args(Precision):
        refuse("precision", repr(precision), f"None or one of {get_args(Precision)!r}")
    canonical_json(record)
    common = {name: record.get(name) for name in CommonRecordFields.__annotations__}
    return CommonRecordFields(**cast(Any, common))


def load_json_reference(reference: JsonReference, *, root: str | PathLike[str]) -> Any:
    """Read a referenced JSON file, and return its value.

    Raises
    ------
    VerificationInputError
        The path leaves ``root`` (also through a link) or is no regular file, the digest is another, or the bytes are
        no strict JSON: repeated keys, non-finite numbers, lone surrogates, other encodings than UTF-8.
    OSError
        It cannot be read.
    """
    if not isinstance(reference, JsonReference):
        refuse("reference", repr(reference), "a JsonReference")
    place = reference.path
    if "\\" in place or os.path.isabs(place):
        refuse("path", repr(place), "a portable path: relative, with forward slashes")
    with os.fdopen(_open_regular(_below(place, root)), "rb") as file:
        content = file.read()
    if (digest := hashlib.sha256(content).hexdigest()) != reference.sha256:
        refuse(f"the content of {place!r}", f"sha256={digest}", f"sha256={reference.sha256}")
    try:
        value = json.loads(
            content.decode(),
            object_pairs_hook=_without_repeats,
            parse_constant=lambda name: _refuse_number(place, name),
            parse_float=lambda text: _finite(place, text),
        )
        canonical_json(value)
    except RecursionError as error:
        raise _malformed(place, "nesting deeper than the interpreter can follow", "a shallower value") from error
    except VerificationInputError as error:
        error.add_note(f"in {place!r}")
        raise
    except ValueError as error:  # not UTF-8, not JSON; the message gives the position
        raise _malformed(place, str(error), "strict JSON in UTF-8") from error
    return value


def _plain(value: object, path: str, parents: tuple[int, ...]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _encodable(value, path)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _malformed(path, repr(value), "a finite number")
        return value
    if id(value) in parents:
        raise _malformed(path, "a value inside itself", "a value without cycles")
    within = (*parents, id(value))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _malformed(path, f"the key {key!r}", "keys that are strings")
        return {_encodable(key, path): _plain(item, f"{path}.{key}", within) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", within) for index, item in enumerate(value)]
    raise _malformed(path, f"a {type(value).__qualname__}", "a JSON value")


def _encodable(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _malformed(path, f"the lone surrogate in {text!r}", "text that UTF-8 can hold") from error
    return text


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        refuse("a JSON object", f"the key {repeated!r} twice", "each key once")
    return value


def _finite(place: str, text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(place, text)


def _refuse_number(place: str, text: str) -> NoReturn:
    raise _malformed(place, text, "finite numbers")


def _malformed(path: str, observed: str, accepted: str) -> VerificationInputError:
    return VerificationInputError(
        why="a record has one spelling, and every reader must read the same from it",
        what=f"{path}: {observed}; accepted is {accepted}",
        how=f"put {accepted} there",
    )


def _check_moment(text: object) -> None:
    if isinstance(text, str) and _RFC_3339.fullmatch(text):
        try:
            datetime.fromisoformat(text.upper())
        except ValueError:
            pass
        else:
            return
    refuse("executed_at", repr(text), "an RFC 3339 time with an offset, such as '2026-01-31T12:00:00+00:00'")


def _below(path: str | PathLike[str], root: str | PathLike[str]) -> Path:
    top = Path(root).resolve()
    found = (top / Path(path)).resolve()
    if not found.is_relative_to(top) or found == top:
        refuse("path", repr(os.fspath(path)), f"a path below the root {str(top)!r}, links followed")
    _encodable(str(found), "path")
    return found


def _open_regular(path: Path) -> int:
    """Open a regular file for reading; a pipe must not make us wait."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse("path", repr(str(path)), "a regular file")
    return descriptor
