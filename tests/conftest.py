"""Fixtures of the whole suite: event loops, gates that hold a stream, and the guard against anything left behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from helpers import Gate, LogRecords

from pixtreme.infer.streams import StreamContext, _captures, _stream

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores Ctrl-C

BACKENDS = [
    pytest.param(("asyncio", {"debug": True}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


def pytest_collection_finish() -> None:
    """Keep what the imports made out of every later collection: the guard below collects after each test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish() -> Iterator[None]:
    """Undo that: Hypothesis looks for referrers when a session ends."""
    gc.unfreeze()
    yield


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Async tests run on asyncio in debug mode, on uvloop and on trio."""
    return request.param


@pytest.fixture(autouse=True)
def loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call of ours that blocks an event loop fails the test."""
    if "anyio_backend" not in request.fixturenames:
        yield
        return
    with blockbuster_ctx("pixtreme.infer"):
        yield


@pytest.fixture
def log() -> Iterator[LogRecords]:
    """What the library logged; a test that takes this fixture checks and clears it."""
    records = LogRecords(logging.WARNING)
    logger = logging.getLogger("pixtreme.infer")
    logger.addHandler(records)
    yield records
    logger.removeHandler(records)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(log: LogRecords) -> Iterator[None]:
    """A test fails that leaves a thread, an open context, a capture or an unretrieved fault behind."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert not dict(_stream.consumers), "an open context was left behind"
    assert not _captures.open_captures, "a capture was left open"
    assert not _captures.deferred, "a deferred release never ran"
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("pixtreme.infer"):
            thread.join(10)  # it was told to end, and ends after what is queued
            assert not thread.is_alive(), f"{thread.name} was left behind"
    assert log.messages == [], "the library logged something nobody looked at"


@pytest.fixture
def context() -> Iterator[StreamContext]:
    """An open context on the host runtime."""
    with StreamContext.open("cpu", name="first") as opened:
        yield opened


@pytest.fixture
def other() -> Iterator[StreamContext]:
    """A second one."""
    with StreamContext.open("cpu", name="second") as opened:
        yield opened


@pytest.fixture
def gate(context: StreamContext, other: StreamContext) -> Iterator[Gate]:
    """A gate that is opened at the end of the test, before the contexts close, whatever happens."""
    opened = Gate()
    yield opened
    opened.open()


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real super-resolution network as an ONNX file."""
    import realesr

    return realesr.write_onnx(tmp_path_factory.mktemp("network") / "realesr.onnx")
