"""Errors and the frame boundary (C1-C5)."""

from __future__ import annotations

import pickle
from importlib.metadata import version
from typing import Any, get_args

import numpy as np
import pytest
from helpers import frame
from pixtreme.core import Colorspace, Frame, Gamma, Matrix

from pixtreme.infer import errors
from pixtreme.infer.errors import ContractError, InferError, actionable_error
from pixtreme.infer.frames import FrameLike, HostFrame

CLASSES = {
    "ContractError": ValueError,
    "ContextError": ValueError,
    "BusyError": RuntimeError,
    "ClosedError": RuntimeError,
    "CaptureError": RuntimeError,
    "StreamFault": RuntimeError,
    "WorkCancelled": RuntimeError,
    "PipelineError": RuntimeError,
    "HandleTimeout": TimeoutError,
    "NotPicklableError": TypeError,
}


def test_text() -> None:
    """C1: exactly why=...; what=...; how=..."""
    assert actionable_error(why="a", what="b", how="c") == "why=a; what=b; how=c"


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    """C2: each is an InferError and the builtin a caller would catch; it survives pickling, notes included."""
    kind: type[InferError] = getattr(errors, name)
    error = kind(why="a", what="b", how="c")
    error.add_note("a note")
    assert isinstance(error, InferError)
    assert isinstance(error, CLASSES[name])
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one) == "why=a; what=b; how=c"
        assert (type(one), one.why, one.what, one.how, one.__notes__) == (kind, "a", "b", "c", ["a note"])


def test_every_class_is_in_the_drawn_tree() -> None:
    """C2: the tree in the module's docstring and in docs/errors.md is complete."""
    from pathlib import Path

    documented = (errors.__doc__ or "", Path("docs/errors.md").read_text("utf-8"))
    public = [name for name in errors.__all__ if name not in ("actionable_error", "LoopBlockedWarning")]
    assert sorted(public) == sorted([*CLASSES, "InferError"])
    for text in documented:
        assert all(name in text for name in public)


def test_host_frame_has_the_attributes_of_a_frame() -> None:
    """C4: attributes, properties and DLPack as pixtreme's Frame; Frame is not subclassed."""
    host = frame(0.5, shape=(4, 6, 3))
    assert (host.width, host.height, host.shape, host.dtype) == (6, 4, (4, 6, 3), np.dtype("float32"))
    assert (host.channels, host.colorspace, host.gamma, host.matrix) == (("R", "G", "B"), "sRGB", "sRGB", None)
    assert isinstance(host, FrameLike)
    assert not issubclass(HostFrame, Frame)
    assert host.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.from_dlpack(host), host.data)
    wanted = ("data", "colorspace", "gamma", "channels", "matrix", "width", "height", "shape", "dtype")
    fields = getattr(Frame, "model_fields", {})
    assert all(name in fields or hasattr(Frame, name) for name in wanted)
    assert all(hasattr(Frame, name) for name in ("__dlpack__", "__dlpack_device__"))
    assert "4" in repr(host)
    with pytest.raises(TypeError):
        hash(host)


def test_layout() -> None:
    """C3, C4: contiguous data is borrowed, another layout copied, a subclass reduced to plain storage."""
    data = np.zeros((4, 6, 3), np.float32)
    assert np.shares_memory(_host(data=data).data, data)
    strided = _host(data=data[:, ::2])
    assert strided.data.flags.c_contiguous
    assert not np.shares_memory(strided.data, data)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "uint16", "uint32"])
def test_dtypes(dtype: str) -> None:
    """C3: the five storage dtypes."""
    assert _host(data=np.zeros((1, 1, 3), dtype)).dtype == dtype


@pytest.mark.parametrize(("axis", "alias"), [("colorspace", Colorspace), ("gamma", Gamma), ("matrix", Matrix)])
def test_tokens_agree_with_pixtreme(axis: str, alias: Any) -> None:
    """C4: the vocabulary of the installed pixtreme, matched by its own rules, short spellings included."""
    from pixtreme._core import vocabulary
    from pixtreme._core.validation import _normalized_closed_token

    accepted = get_args(alias)
    spellings = [spelling for spelling, _ in vocabulary._PERMANENT_TOKEN_ALIASES]
    for token in [*accepted, *spellings, "", " ", "bogus", 3, b"sRGB"]:
        for spelling in {token, token.lower(), token.replace("-", " ")} if isinstance(token, str) else {token}:
            try:
                expected: object = _normalized_closed_token(spelling, axis=axis, accepted=accepted)
            except ValueError as error:
                with pytest.raises(ContractError) as raised:
                    _host(**{axis: spelling})
                assert str(raised.value) == str(error)
            else:
                assert getattr(_host(**{axis: spelling}), axis) == expected


BAD = [
    ("data", [[[0.0]]], "numpy.ndarray"),
    ("data", None, "numpy.ndarray"),
    ("data", np.zeros((4, 6)), "rank 3"),
    ("data", np.zeros((4, 6, 3, 1)), "rank 3"),
    ("data", np.zeros((0, 6, 3), np.float32), "nonempty"),
    ("data", np.zeros((4, 6, 0), np.float32), "nonempty"),
    ("data", np.zeros((4, 6, 3), np.float64), "float64"),
    ("data", np.zeros((4, 6, 3), ">f4"), ">f4"),
    ("data", np.zeros((4, 6, 3), object), "object"),
    ("data", np.zeros((4, 6, 4), np.float32), "channel count"),
    ("channels", "RGBA", "channel count"),
    ("channels", "", "empty"),
    ("channels", "XYZ", "unknown label"),
    ("channels", ("R", "", "B"), "non-empty"),
    ("channels", 3, "sequence"),
    ("colorspace", "bogus", "pass one of"),
    ("colorspace", None, "pass one of"),
    ("gamma", 2.2, "pass one of"),
    ("matrix", "BT.999", "pass one of"),
]


@pytest.mark.parametrize(("field", "value", "word"), BAD)
def test_bad_field(field: str, value: Any, word: str) -> None:
    """C4, C2: the constructor refuses it, and an assignment refuses it and changes nothing."""
    with pytest.raises(ContractError, match=word):
        _host(**{field: value})
    host = _host()
    before = {name: getattr(host, name) for name in ("data", "channels", "colorspace", "gamma", "matrix")}
    with pytest.raises(ContractError, match=word):
        setattr(host, field, value)
    assert all(getattr(host, name) is old for name, old in before.items())


def test_assignment() -> None:
    """C4: a valid assignment is normalised as in the constructor."""
    host = _host()
    host.gamma, host.colorspace, host.matrix = "linear", "rec709", "bt.709"
    assert (host.gamma, host.colorspace, host.matrix) == ("linear", "Rec.709", "BT.709")
    host.channels = ("depth", "u", "v")
    host.data = np.ones((2, 2, 3), np.uint8)
    assert (host.shape, host.dtype) == ((2, 2, 3), np.dtype("uint8"))


def test_installed_pixtreme_is_supported() -> None:
    """C4: written for pixtreme 1.3 to 2.0 (tools/frames_on_pixtreme.sh runs this file on each)."""
    assert tuple(map(int, version("pixtreme").split(".")[:2])) >= (1, 3)


def _host(**changes: Any) -> HostFrame:
    fields: dict[str, Any] = {"data": np.zeros((4, 6, 3), np.float32), "channels": "RGB"}
    return HostFrame(**({"colorspace": "sRGB", "gamma": "sRGB"} | fields | changes))
