"""`run_onnx`: an artifact on ONNX Runtime's CPU provider (O1-O6, O11, O12). Bad input is in test_bad_input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx_files import DECLARED, KEY, with_metadata, with_opsets, write_brightener, write_external, write_model
from sklearn.datasets import load_sample_image

from pixtreme.infer import onnx as onnx_sessions
from pixtreme.infer import run_onnx
from pixtreme.infer._onnx_header import read_header
from pixtreme.infer.errors import ContractError

IMAGE = np.arange(72, dtype=np.float32).reshape(1, 4, 6, 3)
LARGE = IMAGE.repeat(2, 1).repeat(2, 2)


@pytest.fixture(autouse=True)
def no_session_is_kept() -> Any:
    onnx_sessions.clear()
    yield
    onnx_sessions.clear()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every session that is made, with its options."""
    made: list[Any] = []
    real = onnxruntime.InferenceSession

    def make(source: Any, options: Any, *, providers: list[str], **more: Any) -> Any:
        made.append((source, options, providers))
        return real(source, options, providers=providers, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", make)
    return made


@pytest.mark.network
def test_equals_a_plain_session(network: Path) -> None:
    """O1, O4: the real network gives the result of a plain ONNX Runtime session."""
    image = load_sample_image("china.jpg")[None, 100:148, 300:364].astype(np.float32) / 255
    (expected,) = onnxruntime.InferenceSession(str(network), providers=["CPUExecutionProvider"]).run(
        None, {"input": image}
    )
    result = run_onnx(network, image)
    assert (result.shape, result.dtype.name) == ((1, 192, 256, 3), "float32")
    assert np.abs(result - expected).max() <= 1e-6  # thread counts differ, so sums may


def test_the_input_is_left_alone(tmp_path: Path) -> None:
    """O2, O4: any memory layout of (1, H, W, 3) is taken, and the array given is not written to."""
    path = write_model(tmp_path / "m.onnx")
    before = IMAGE.copy()
    assert np.array_equal(run_onnx(path, IMAGE), LARGE)
    assert np.array_equal(run_onnx(path, IMAGE.transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1)), LARGE)
    read_only = IMAGE.copy()
    read_only.flags.writeable = False
    assert np.array_equal(run_onnx(path, read_only), LARGE)
    assert np.array_equal(run_onnx(path, IMAGE[:, ::-1]), LARGE[:, ::-1])
    assert run_onnx(path, IMAGE[:, :1, :1]).shape == (1, 2, 2, 3)
    assert np.array_equal(IMAGE, before)


@pytest.mark.parametrize(
    "name",
    ["with space.onnx", "モデル🖼.onnx", "e\u0301 decomposed.onnx", "é composed.onnx", "no suffix", "a%20b'\"\\.onnx"],
)
def test_paths(tmp_path: Path, name: str) -> None:
    """O5, C41: names that are not plain ASCII simply work, as str, Path and bytes."""
    path = write_model(tmp_path / "フォルダ" / name)
    for given in (path, str(path), os.fsencode(path)):
        assert np.array_equal(run_onnx(given, IMAGE), LARGE)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """O5, C41: bytes that are not UTF-8 work as well, and an error about them can be printed."""
    path = tmp_path / os.fsdecode(b"bad\xff.onnx")
    write_model(path)
    assert np.array_equal(run_onnx(path, IMAGE), LARGE)
    path.write_bytes(b"")
    with pytest.raises(ContractError) as raised:
        run_onnx(path, IMAGE)
    assert "bad\\udcff.onnx" in str(raised.value)
    str(raised.value).encode()


def test_a_c_locale(tmp_path: Path) -> None:
    """O5, C41: the locale does not matter."""
    path = write_model(tmp_path / "モデル.onnx")
    program = f"""
import numpy, os
from pixtreme.infer import run_onnx
print(run_onnx(os.fsdecode({os.fsencode(path)!r}), numpy.zeros((1, 4, 6, 3), numpy.float32)).shape)
"""
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program],
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("(1, 8, 12, 3)", "")


def test_metadata_that_is_right(tmp_path: Path) -> None:
    """O3, C44: order, other entries and white space do not matter; large scales and free output axes are fine."""
    text = json.dumps({"more": 1, "output": dict(reversed(DECLARED.items()))}) + "\n"
    path = write_model(
        tmp_path / "m.onnx", metadata=None, out=(None, None, None, None),
        edit=with_metadata(("z", "1"), (KEY, text), ("作者", "名前")),
    )  # fmt: skip
    assert np.array_equal(run_onnx(path, IMAGE), LARGE)


def test_a_session_is_made_once(tmp_path: Path, sessions: list[Any]) -> None:
    """O6: the same unchanged file reuses it; a changed one does not, though size and mtime are the same."""
    path = write_brightener(tmp_path, 1)
    outside = tmp_path / "w.bin"
    for _ in range(3):
        assert np.array_equal(run_onnx(path, IMAGE), LARGE)
    assert len(sessions) == 1
    times = [(file, os.stat(file).st_mtime_ns) for file in (path, outside)]
    outside.write_bytes(np.float32(2).tobytes())
    os.utime(outside, ns=(times[1][1], times[1][1]))
    assert np.array_equal(run_onnx(path, IMAGE), LARGE * 2)
    changed = path.read_bytes().replace(b"small", b"SMALL")
    path.write_bytes(changed)
    os.utime(path, ns=(times[0][1], times[0][1]))
    run_onnx(path, IMAGE)
    assert len(sessions) == 3
    onnx_sessions.clear()
    run_onnx(path, IMAGE)
    assert len(sessions) == 4
    path.unlink()
    with pytest.raises(ContractError, match="could not be read"):
        run_onnx(path, IMAGE)


def test_few_sessions_are_kept(tmp_path: Path, sessions: list[Any]) -> None:
    """O6: memory is bounded: the file used longest ago goes first."""
    paths = [write_model(tmp_path / f"{number}.onnx") for number in range(6)]
    for path in [*paths, paths[-1], paths[0]]:
        run_onnx(path, IMAGE)
    assert len(sessions) == 7
    assert len(onnx_sessions._sessions) == onnx_sessions._SESSIONS_KEPT


def test_threads_are_bounded(tmp_path: Path, sessions: list[Any]) -> None:
    """O6, C42: the count is set, at most half of the allowed processors, one where there is only one."""
    path = write_model(tmp_path / "m.onnx")
    allowed = os.sched_getaffinity(0)
    run_onnx(path, IMAGE)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        onnx_sessions.clear()
        run_onnx(path, IMAGE)
    finally:
        os.sched_setaffinity(0, allowed)
    counts = [(options.intra_op_num_threads, options.inter_op_num_threads) for _, options, _ in sessions]
    assert counts == [(min(4, max(1, len(allowed) // 2)), 1), (1, 1)]


def test_parallel_runs(tmp_path: Path, sessions: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """O6, C42: eight threads at once share one session, add no threads, agree bit for bit and print nothing."""
    path = write_model(tmp_path / "m.onnx")
    run_onnx(path, IMAGE)
    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: run_onnx(path, IMAGE), range(64)))
    assert all(np.array_equal(result, LARGE) for result in results)
    assert (len(sessions), threading.active_count()) == (1, before)
    assert capfd.readouterr() == ("", "")


def test_refusals_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """O5: what onnxruntime has against a file is in the error and nowhere else."""
    for file in (
        write_model(tmp_path / "opset.onnx", edit=with_opsets(("", 99))),
        write_model(tmp_path / "scale.onnx", factor=3),
        write_external(tmp_path / "outside"),
    ):
        with pytest.raises(ContractError):
            run_onnx(file, IMAGE)
    assert capfd.readouterr() == ("", "")


def test_a_failure_inside_the_session(tmp_path: Path) -> None:
    """O5: the session's own exception is the cause."""

    def edit(model: Any) -> None:  # a reshape that only fits one size
        model.graph.node[0].output[0] = "large"
        model.graph.node.append(helper.make_node("Reshape", ["large", "shape"], ["output"]))
        model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [4], [1, 8, 12, 3]))

    path = write_model(tmp_path / "m.onnx", edit=edit)
    assert np.array_equal(run_onnx(path, IMAGE), LARGE)
    with pytest.raises(ContractError, match="failed on an input") as raised:
        run_onnx(path, np.zeros((1, 5, 6, 3), np.float32))
    assert type(raised.value.__cause__).__module__.startswith("onnxruntime")
    with pytest.raises(ContractError, match="could not be read") as raised:
        run_onnx(tmp_path / "absent", IMAGE)
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_nothing_is_opened_that_lies_outside(tmp_path: Path, sessions: list[Any]) -> None:
    """O11, C40: no session is made for a file with a problem, so no weights are read."""
    for path in (write_external(tmp_path / "a", "../w.bin"), write_model(tmp_path / "m.onnx", metadata="{")):
        with pytest.raises(ContractError):
            run_onnx(path, IMAGE)
    probes = [source for source, _, _ in sessions if not isinstance(source, bytes)]
    assert probes == []


@pytest.mark.parametrize("actual", [["CPUExecutionProvider", "XExecutionProvider"], ["XExecutionProvider"], []])
def test_providers_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actual: list[str]) -> None:
    """O12, O1, C39: what the session has is compared with what was asked for, and both are named."""
    path = write_model(tmp_path / "m.onnx")
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: actual)
    with pytest.raises(ContractError) as raised:
        run_onnx(path, IMAGE)
    assert "['CPUExecutionProvider']" in str(raised.value)
    assert repr(actual) in str(raised.value)
    monkeypatch.undo()
    assert np.array_equal(run_onnx(path, IMAGE), LARGE)


def test_only_the_cpu_is_asked_for(tmp_path: Path, sessions: list[Any]) -> None:
    """O1, O12: one provider, by name, whatever is available."""
    run_onnx(write_model(tmp_path / "m.onnx"), IMAGE)
    assert sessions[-1][2] == ["CPUExecutionProvider"]


def test_no_silent_fall_to_the_cpu(tmp_path: Path) -> None:
    """O9, O9a, O12, C39: a session for CUDA that would run on the CPU is refused, with what the loader says.

    The same where the CUDA provider comes with a CPU helper, but the session then has another one.
    """
    header = read_header(write_model(tmp_path / "m.onnx"))
    with pytest.raises(ContractError, match="never falls back to the CPU") as raised:
        onnx_sessions.open_session(header, threads=1, device="cuda:0", pointer=12345)
    assert "its CUDA library: " in str(raised.value)
    assert raised.value.__cause__ is not None


def test_what_a_cuda_session_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O9, O9a: one provider, on our stream, with its own graph off and every node on the device."""
    asked: list[Any] = []

    class Session:
        def __init__(self, source: str, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
            asked.append((providers, enable_fallback))
            assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"

        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]  # onnxruntime always appends its own

    header = read_header(write_model(tmp_path / "m.onnx"))
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    onnx_sessions.open_session(header, threads=1, device="cuda:1", pointer=777)
    settings = {"device_id": "1", "user_compute_stream": "777", "enable_cuda_graph": "0"}
    assert asked == [([("CUDAExecutionProvider", settings)], 0)]
    monkeypatch.setattr(Session, "get_providers", lambda self: ["CPUExecutionProvider"])
    with pytest.raises(ContractError, match=r"asked for \['CUDAExecutionProvider', 'CPU"):
        onnx_sessions.open_session(header, threads=1, device="cuda:1", pointer=777)


def test_after_a_fork(tmp_path: Path) -> None:
    """O6: a child process makes sessions of its own."""
    path = write_model(tmp_path / "m.onnx")
    program = f"""
import os, numpy
from pixtreme.infer import onnx, run_onnx
image = numpy.zeros((1, 4, 6, 3), numpy.float32)
run_onnx({str(path)!r}, image)
if (child := os.fork()) == 0:
    os._exit(len(onnx._sessions) * 10 + (run_onnx({str(path)!r}, image).shape != (1, 8, 12, 3)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(onnx._sessions))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.split() == ["0", "1"]
