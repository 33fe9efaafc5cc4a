"""Canonical JSON and records (V14)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixtreme.infer.verification import (
    CommonRecordFields,
    JsonReference,
    VerificationInputError,
    canonical_json,
    canonical_sha256,
    file_sha256,
    load_json_reference,
    portable_path,
    validate_common_record,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=10_000, deadline=None)
@given(JSON)
@pytest.mark.slow
def test_canonical_json_is_json(value: Any) -> None:
    """V14: Python's json reads the value back, types included, and writing that again gives the same bytes."""
    text = canonical_json(value)
    back = json.loads(text)
    assert repr(back) == repr(_sorted(value))
    assert canonical_json(back) == text
    assert text == json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def test_spelling() -> None:
    """V14: UTF-8, sorted keys, no spaces; 1, 1.0 and true stay three values."""
    assert canonical_json({"é": [1, 1.0, True, None, -0.0], "a": {"b": "\u2028"}}) == (
        '{"a":{"b":"\u2028"},"é":[1,1.0,true,null,-0.0]}'.encode()
    )
    assert canonical_json((1, 2)) == b"[1,2]"
    assert len({canonical_sha256(value) for value in (1, 1.0, True, "1", [1])}) == 5
    assert canonical_sha256({"a": 1, "b": 2}) == canonical_sha256({"b": 2, "a": 1})
    assert canonical_sha256("e\u0301") != canonical_sha256("\u00e9")  # text is not normalised


def test_numpy_scalars_are_plain_numbers() -> None:
    """V14: no NumPy text gets into an identity (C49)."""
    values = [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a")]
    assert canonical_json(values) == b'[0.5,0.5,3,true,"a"]'


def _cycle() -> Any:
    value: dict[str, Any] = {"a": []}
    value["a"].append(value)
    return value


def _deep() -> Any:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "finite"),
        ([1, float("inf")], "$[1]"),
        ({"a": {"b": -float("inf")}}, "$.a.b"),
        (np.float32("nan"), "finite"),
        ({1: 2}, "the key 1"),
        ({None: 2}, "keys that are strings"),
        ({"a": "\ud800"}, "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        (_cycle(), "inside itself"),
        (_deep(), "nesting deeper"),
        ({1, 2}, "a set"),
        (b"bytes", "a bytes"),
        (10**5000, "digits"),
        (1j, "a complex"),
        (Path("a"), "Path"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_has_no_json_form(value: Any, words: str) -> None:
    """V14: refused, with the place."""
    for call in (canonical_json, canonical_sha256):
        with pytest.raises(VerificationInputError) as caught:
            call(value)
        assert words in str(caught.value)


def test_a_value_may_appear_twice() -> None:
    """V14: only a value inside itself is a cycle."""
    shared = [1]
    assert canonical_json([shared, shared]) == b"[[1],[1]]"


def _refer(root: Path, content: bytes, *, name: str = "record.json") -> JsonReference:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return JsonReference(portable_path(path, root=root), file_sha256(path))


def test_a_reference_loads(tmp_path: Path) -> None:
    """V14: path and digest lead to the value; the digest is that of the file's bytes."""
    reference = _refer(tmp_path, b'{"b": 1, "a": [1.5, "\xc3\xa9"]}\n', name="runs/one.json")
    assert reference.path == "runs/one.json"
    assert reference.sha256 == hashlib.sha256((tmp_path / "runs/one.json").read_bytes()).hexdigest()
    assert load_json_reference(reference, root=tmp_path) == {"b": 1, "a": [1.5, "é"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b'[{"x": {"k": 1, "k": 1}}]', "'k' twice"),
        (b"NaN", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "1e999"),
        (b'["\\ud800"]', "lone surrogate"),
        (b'{"\\udc00": 1}', "lone surrogate"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"{} {}", "Extra data"),
        (b"\xff\xfe", "utf-8"),
        (b"", "Expecting value"),
        (b"[" * 100_000 + b"]" * 100_000, "nesting"),
        (b"[" + b"9" * 5000 + b"]", "digits"),
    ],
)
def test_strict_json_only(tmp_path: Path, content: bytes, words: str) -> None:
    """V14: what another reader might read otherwise is refused, with its place (C50)."""
    with pytest.raises(VerificationInputError) as caught:
        load_json_reference(_refer(tmp_path, content), root=tmp_path)
    assert words in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


def test_another_digest(tmp_path: Path) -> None:
    """V14: a file that changed is not loaded."""
    reference = _refer(tmp_path, b"{}")
    (tmp_path / "record.json").write_bytes(b"[]")
    with pytest.raises(VerificationInputError, match=reference.sha256):
        load_json_reference(reference, root=tmp_path)


def test_paths_stay_below_the_root(tmp_path: Path) -> None:
    """V14: nothing leads out of the root, also not through a link, and only regular files are read."""
    root = tmp_path / "root"
    inside = _refer(root, b"{}", name="in.json")
    _refer(tmp_path, b"{}", name="secret.json")
    (root / "link.json").symlink_to(tmp_path / "secret.json")
    (root / "alias.json").symlink_to(root / "in.json")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe.json")
    digest = inside.sha256
    for path in ("../secret.json", "link.json", "a/../../secret.json", str(tmp_path / "secret.json"), "..\\x", "."):
        with pytest.raises(VerificationInputError):
            load_json_reference(JsonReference(path, digest), root=root)
    for path in ("pipe.json", "folder"):
        with pytest.raises((VerificationInputError, IsADirectoryError)):
            load_json_reference(JsonReference(path, digest), root=root)
    with pytest.raises(FileNotFoundError):
        load_json_reference(JsonReference("absent.json", digest), root=root)
    assert load_json_reference(JsonReference("alias.json", digest), root=root) == {}
    assert portable_path("folder/../in.json", root=root) == "in.json"
    assert portable_path(root / "alias.json", root=root) == "in.json"
    for outside in (tmp_path / "secret.json", root / "link.json", root):
        with pytest.raises(VerificationInputError, match="below the root"):
            portable_path(outside, root=root)
    with pytest.raises(VerificationInputError, match="regular"):
        file_sha256(root / "pipe.json")
    with pytest.raises(VerificationInputError, match="surrogate"):
        portable_path(root / os.fsdecode(b"\xff.json"), root=root)


@pytest.mark.parametrize(("path", "digest"), [("", "ab" * 32), (1, "ab" * 32), ("a", "AB" * 32), ("a", "ab")])
def test_malformed_references(path: Any, digest: Any, tmp_path: Path) -> None:
    """V14: a reference is a path and 64 lower-case hex digits."""
    with pytest.raises(VerificationInputError):
        JsonReference(path, digest)
    with pytest.raises(VerificationInputError, match="JsonReference"):
        load_json_reference({"path": "a"}, root=tmp_path)  # type: ignore[arg-type]


RECORD: dict[str, Any] = {
    "schema_version": 1,
    "record_type": "latency",
    "architecture": "span",
    "environment_id": "lab",
    "executed_at": "2026-01-31T12:00:00.5+09:00",
    "environment": {"python": "3.12"},
    "artifacts": {"engine": {"path": "a", "sha256": "b"}},
    "samples": [1, 2],
}


def test_a_common_record() -> None:
    """V14: the common fields come back typed; a record's own fields are left alone; precision is optional."""
    fields = {name: value for name, value in RECORD.items() if name != "samples"}
    assert validate_common_record(RECORD) == CommonRecordFields(**fields)
    assert validate_common_record(RECORD | {"precision": "fp16"}).precision == "fp16"
    for moment in ("2026-01-31T12:00:00Z", "2026-01-31t12:00:00z", "2026-01-31T12:00:00-00:30"):
        assert validate_common_record(RECORD | {"executed_at": moment}).executed_at == moment


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema_version", 0),
        ("schema_version", True),
        ("record_type", ""),
        ("architecture", None),
        ("environment_id", 3),
        ("executed_at", "2026-01-31T12:00:00"),
        ("executed_at", "2026-01-31 12:00:00Z"),
        ("executed_at", "2026-13-31T12:00:00Z"),
        ("executed_at", "2026-01-31T12:00:00+25:00"),
        ("executed_at", "20260131T120000Z"),
        ("executed_at", 1_700_000_000),
        ("environment", []),
        ("artifacts", "a"),
        ("precision", "fp64"),
    ],
)
def test_malformed_records(field: str, value: Any) -> None:
    """V14: a malformed field is named."""
    with pytest.raises(VerificationInputError, match=field):
        validate_common_record(RECORD | {field: value})


def test_incomplete_records() -> None:
    """V14: so is a missing one, and what is no object; the whole must have a JSON form."""
    for name in CommonRecordFields.__annotations__:
        if name != "precision":
            with pytest.raises(VerificationInputError, match=name):
                validate_common_record({key: value for key, value in RECORD.items() if key != name})
    with pytest.raises(VerificationInputError, match="JSON object"):
        validate_common_record([])  # type: ignore[arg-type]
    with pytest.raises(VerificationInputError, match="finite"):
        validate_common_record(RECORD | {"samples": [float("nan")]})
