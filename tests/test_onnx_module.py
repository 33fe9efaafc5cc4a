"""The ONNX module on the host runtime, with the real network (O7, O8, O10)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import two_runtimes
from helpers import WAIT_S, Gate, frame
from onnx import TensorProto
from onnx_files import DECLARED, FILES, write_brightener, write_model
from samples import HW, photograph, small_model

from pixtreme.infer.contracts import Exact
from pixtreme.infer.errors import ClosedError, ContextError, ContractError
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact, OnnxFactory
from pixtreme.infer.streams import StreamContext


@pytest.mark.network
@pytest.mark.parametrize("factory", [FACTORY, FACTORY.graph_factory()], ids=["plain", "graph"])
def test_equals_onnxruntime(context: StreamContext, network: Path, factory: OnnxFactory) -> None:
    """O8, O10: the real network through the module equals a plain ONNX Runtime session, request after request."""
    session = onnxruntime.InferenceSession(str(network), providers=["CPUExecutionProvider"])
    upscale = context.bind(factory, OnnxArtifact(network), precision="fp32", input_hw=HW)
    requests = [photograph(at=at) for at in (60, 120, 180)]
    results = [upscale(request).result(WAIT_S) for request in requests]
    for request, result in zip(requests, results, strict=True):
        (expected,) = session.run(None, {"input": request.data[None]})
        assert np.abs(result.data - expected[0]).max() <= 1e-5
        assert result.shape == (4 * HW[0], 4 * HW[1], 3)


@pytest.mark.network
def test_graph_equals_plain_bit_for_bit(context: StreamContext, other: StreamContext, network: Path) -> None:
    """O10: replay equals the normal path bit for bit on the host."""
    plain = context.bind(FACTORY, OnnxArtifact(network), precision="fp32", input_hw=HW)
    graph = other.bind(FACTORY.graph_factory(), OnnxArtifact(network), precision="fp32", input_hw=HW)
    for at in (60, 120):
        results = [module(photograph(at=at)).result(WAIT_S).data for module in (plain, graph)]
        np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.network
def test_graph_module_under_verification(context: StreamContext, network: Path) -> None:
    """O10, G20: the captured network passes the replay check on perturbed inputs."""
    from pixtreme.infer.cuda_graph import CudaGraphSession

    with context.use():
        opened = FACTORY.open(OnnxArtifact(network), precision="fp32", input_hw=HW)
        run = opened._network
        assert run is not None
        session = CudaGraphSession(
            {"run": lambda: context.stream.enqueue(run.run)}, resources=(opened._buffers,), verify=True
        )
    session.close()
    opened.close()


def test_enqueues_and_returns(context: StreamContext, gate: Gate, tmp_path: Path) -> None:
    """O8: a call enqueues on the context's stream; one session thread: the worker itself computes."""
    upscale = context.bind(FACTORY, small_model(tmp_path / "small.onnx"), precision="fp32", input_hw=(4, 6))
    gate.hold(context)
    threads = threading.active_count()
    handles = [upscale(frame(value)) for value in (1.0, 2.0, 3.0)]
    assert not any(handle.done() for handle in handles)
    assert threading.active_count() == threads
    gate.open()
    assert [handle.result(WAIT_S).data.max() for handle in handles] == [1.0, 2.0, 3.0]
    assert all(handle.result().shape == (8, 12, 3) for handle in handles)


def test_metadata_passes_through(context: StreamContext, tmp_path: Path) -> None:
    """C3: the output carries this request's colorspace, gamma and matrix."""
    upscale = context.bind(FACTORY, small_model(tmp_path / "small.onnx"), precision="fp32", input_hw=(4, 6))
    source = HostFrame(data=frame().data, channels="RGB", colorspace="ACEScg", gamma="linear", matrix="BT.709")
    result = upscale(source).result(WAIT_S)
    assert (result.colorspace, result.gamma, result.matrix) == ("ACEScg", "linear", "BT.709")


def test_query_reads_the_header_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O7: no session is made for a query; the opened contract equals it; the header needs no weights file."""
    artifact = small_model(tmp_path / "small.onnx")
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    contract = FACTORY.query_contract(artifact, precision="fp32", input_hw=(4, 6))
    assert (contract.artifact_identity, contract.precision, contract.input_hw, contract.scale) == (
        artifact,
        "fp32",
        (4, 6),
        2,
    )
    assert contract.module_contract.input_frame.dtype == Exact("float32")
    assert contract.module_contract.output_frame.channels == Exact(("R", "G", "B"))
    monkeypatch.undo()
    with StreamContext.open("cpu") as context:
        bound = context.bind(FACTORY, artifact, precision="fp32", input_hw=(4, 6))
        assert bound.contract == contract
        assert bound.scale == 2


def test_external_weights(context: StreamContext, tmp_path: Path) -> None:
    """O7, O11: weights beside the model are found, by query and by the session."""
    artifact = OnnxArtifact(write_brightener(tmp_path, 3))
    assert FACTORY.query_contract(artifact, precision="fp32", input_hw=(4, 6)).scale == 2
    upscale = context.bind(FACTORY, artifact, precision="fp32", input_hw=(4, 6))
    assert upscale(frame(5.0)).result(WAIT_S).data.max() == 15.0


def test_explicit_scale(context: StreamContext, tmp_path: Path) -> None:
    """O7: a file without metadata opens with an explicit scale."""
    artifact = small_model(tmp_path / "small.onnx", metadata=None)
    with pytest.raises(ContractError, match="no scale"):
        FACTORY.query_contract(artifact, precision="fp32", input_hw=(4, 6))
    upscale = context.bind(FACTORY, OnnxArtifact(artifact.path, scale=2), precision="fp32", input_hw=(4, 6))
    assert upscale(frame(5.0)).result(WAIT_S).shape == (8, 12, 3)


def test_fp16(context: StreamContext, tmp_path: Path) -> None:
    """O7: the precision is what the graph's tensors are."""
    artifact = small_model(tmp_path / "half.onnx", kind=TensorProto.FLOAT16, metadata=DECLARED | {"dtype": "float16"})
    with pytest.raises(ContractError, match="fp16"):
        FACTORY.query_contract(artifact, precision="fp32", input_hw=(4, 6))
    upscale = context.bind(FACTORY, artifact, precision="fp16", input_hw=(4, 6))
    assert upscale(frame(1.5, dtype="float16")).result(WAIT_S).data.max() == 1.5


@pytest.mark.parametrize("name", ["with space", "日本語 \U0001f30a é", "e\u0301"])
def test_paths(context: StreamContext, tmp_path: Path, name: str) -> None:
    """C41: paths with spaces and non-ASCII letters simply work."""
    artifact = small_model(tmp_path / name / "net.onnx")
    upscale = context.bind(FACTORY, artifact, precision="fp32", input_hw=(4, 6))
    assert upscale(frame(1.0)).result(WAIT_S).data.max() == 1.0
    as_text = OnnxArtifact(str(artifact.path))
    assert FACTORY.query_contract(as_text, precision="fp32", input_hw=(4, 6)).scale == 2


@pytest.mark.parametrize("name", FILES)
def test_bad_artifact_is_not_bound(context: StreamContext, tmp_path: Path, name: str) -> None:
    """O7: open validates as query does, before any work; the context stays usable."""
    write, words = FILES[name]
    with pytest.raises(ContractError) as raised:
        context.bind(FACTORY, OnnxArtifact(write(tmp_path)), precision="fp32", input_hw=(4, 6))
    assert all(word in str(raised.value) for word in words)
    assert context._lifetime.opened == []
    assert context.submit(lambda: 1).result(WAIT_S) == 1


def test_declared_scale_is_held_against_the_network(context: StreamContext, tmp_path: Path) -> None:
    """O8: a network that returns another size than declared is refused at open; the context stays usable."""
    artifact = small_model(tmp_path / "m.onnx", factor=3)
    with pytest.raises(ContractError, match="what its metadata declares") as raised:
        context.bind(FACTORY, artifact, precision="fp32", input_hw=(4, 6))
    assert raised.value.__cause__ is not None
    assert context.submit(lambda: 1).result(WAIT_S) == 1


@pytest.mark.parametrize("factory", [FACTORY, FACTORY.graph_factory()], ids=["plain", "graph"])
def test_bad_requests(context: StreamContext, other: StreamContext, tmp_path: Path, factory: OnnxFactory) -> None:
    """O8: size, dtype, channels, parameters, stream and close are checked before any work."""
    bound = context.bind(factory, small_model(tmp_path / "m.onnx"), precision="fp32", input_hw=(4, 6))
    bad: list[tuple[Any, str]] = [
        (frame(shape=(4, 5, 3)), "shape"),
        (frame(dtype="uint8"), "dtype"),
        (HostFrame(data=frame().data, channels="YCbCr", colorspace="sRGB", gamma="sRGB"), "channels"),
        (frame().data[:3], "shape"),
        (None, "a frame"),
    ]
    for request, word in bad:
        with pytest.raises(ContractError, match=word):
            bound(request)
    with pytest.raises(ContractError, match="undeclared"):
        bound(frame(), reset=True)
    with pytest.raises(ContextError, match="required is"), other.use():
        bound.instance(frame())
    with pytest.raises(ContextError):
        FACTORY.open(small_model(tmp_path / "m.onnx"), precision="fp32", input_hw=(4, 6))
    assert bound(frame(3.0)).result(WAIT_S).data.max() == 3.0
    bound.close()
    with pytest.raises(ClosedError), context.use():
        bound.instance(frame())
    with pytest.raises(ClosedError):
        bound(frame())


def test_results_survive_close(tmp_path: Path) -> None:
    """C8: returned frames stay unchanged by later requests and by close."""
    with StreamContext.open("cpu") as context:
        bound = context.bind(
            FACTORY.graph_factory(), small_model(tmp_path / "m.onnx"), precision="fp32", input_hw=(4, 6)
        )
        handles = [bound(frame(value)) for value in range(5)]
    assert [handle.result().data.max() for handle in handles] == [0, 1, 2, 3, 4]


def test_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: without the extra the error names it; a failure inside an installed module passes through."""
    import sys

    artifact = small_model(tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install 'pixtreme-infer\[ort\]'"):
        FACTORY.query_contract(artifact, precision="fp32", input_hw=(4, 6))
    (tmp_path / "broken_inside.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    from pixtreme.infer.dependencies import require_optional

    with pytest.raises(ModuleNotFoundError, match="not_there_at_all") as raised:
        require_optional("broken_inside", extra="ort")
    assert "extra" not in str(raised.value)


def test_what_runs_the_network_elsewhere_is_held_to_the_real_one(tmp_path: Path) -> None:
    """R4: the stand-in of the emulated device enlarges as ONNX Runtime does."""
    pixels = np.random.default_rng(0).random((6, 8, 3), np.float32)
    session = onnxruntime.InferenceSession(str(write_model(tmp_path / "real.onnx")))
    (expected,) = session.run(None, {"input": pixels[None]})
    np.testing.assert_array_equal(two_runtimes.enlarged(pixels, 2), expected[0])
