"""The full stateless suite and the graph suite on the ONNX module, with the real network (V1-V9)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import WAIT_S, frame
from samples import HW, photograph

from pixtreme.infer.contracts import ShapeProfile
from pixtreme.infer.frames import FrameLike, HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact, OnnxFactory
from pixtreme.infer.runtimes.host import HostRuntime
from pixtreme.infer.streams import StreamContext
from pixtreme.infer.verification import (
    AllocationFacts,
    ClosedInferenceFacts,
    CommonContractCases,
    CudaGraphContractSuite,
    EngineBindingFacts,
    EngineRoundTripFacts,
    FactoryContractCases,
    FrameBoundaryFacts,
    OpenedContractFacts,
    QueryAllocationFacts,
    RejectionFacts,
    ResourceSnapshot,
    SequenceFacts,
    StatelessContractSuite,
    compare_rgb,
    verify_cuda_graph_contract,
    verify_module_contract,
)

ELSEWHERE = """
import hashlib, json, os, sys
import numpy as np
import onnxruntime
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact
from pixtreme.infer.streams import StreamContext

network, given, output = sys.argv[1:]
pixels = np.load(given)
session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
with StreamContext.open("cpu") as context:
    upscale = context.bind(FACTORY, OnnxArtifact(network), precision="fp32", input_hw=pixels.shape[:2])
    frame = HostFrame(data=pixels, channels="RGB", colorspace="sRGB", gamma="sRGB")
    np.save(output, upscale(frame).result().data)
print(json.dumps({
    "pid": os.getpid(),
    "sha256": hashlib.sha256(open(network, "rb").read()).hexdigest(),
    "bindings": [[end.name, side, end.type] for side in ("input", "output")
                 for end in getattr(session, f"get_{side}s")()],
}))
"""


class Ledger:
    """Counts what ONNX Runtime runs and opens and what the host runtime allocates, while patched in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.made: list[str] = []
        run, empty = onnxruntime.InferenceSession.run_with_iobinding, HostRuntime.empty
        start = onnxruntime.InferenceSession.__init__

        def counted_run(*args: Any, **kwargs: Any) -> None:
            self.runs += 1
            run(*args, **kwargs)

        def counted_empty(*args: Any, **kwargs: Any) -> Any:
            self.made.append("array")
            return empty(*args, **kwargs)

        def counted_start(*args: Any, **kwargs: Any) -> None:
            self.made.append("session")
            start(*args, **kwargs)

        monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", counted_run)
        monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", counted_start)
        monkeypatch.setattr(HostRuntime, "empty", counted_empty)


class Observer:
    """Makes the observations of one form of the ONNX module."""

    def __init__(self, factory: OnnxFactory, network: Path, context: StreamContext, ledger: Ledger) -> None:
        self.factory, self.context, self.ledger = factory, context, ledger
        self.artifact = OnnxArtifact(network)

    @contextmanager
    def opened(self, factory: OnnxFactory | None = None) -> Iterator[Any]:
        """An instance, called on the context."""
        with self.context.use():
            instance = (factory or self.factory).open(self.artifact, precision="fp32", input_hw=HW)
        try:
            yield instance
        finally:
            instance.close()

    def call(self, instance: Any, given: Any, **params: Any) -> FrameLike:
        output: FrameLike = self.context.submit(instance, given, **params).result(WAIT_S)
        return output

    def boundary(
        self, name: str, expected: Literal["accept", "reject"], given: FrameLike, **params: Any
    ) -> FrameBoundaryFacts:
        output, error = None, None
        with self.opened() as instance:
            before = self.ledger.runs
            try:
                output = self.call(instance, given, **params)
            except Exception as caught:
                error = caught
            self.context.synchronize()
            started = self.ledger.runs > before
        profile = ShapeProfile(HW, HW, HW)
        return FrameBoundaryFacts(name, expected, given, profile, {}, (), output, error, started)

    def exchange(self) -> AllocationFacts:
        with self.opened() as instance:
            result = self.call(instance, photograph())
            exported: Any = result
            before = len(self.ledger.made)
            consumer = np.from_dlpack(exported)
            made = self.ledger.made[before:]
        return AllocationFacts("result", result.data.ctypes.data, consumer.ctypes.data, made)

    def round_trip(self, folder: Path) -> EngineRoundTripFacts:
        given, output, network = folder / "given.npy", folder / "output.npy", str(self.artifact.path)
        np.save(given, photograph().data)
        command = [sys.executable, "-c", ELSEWHERE, network, str(given), str(output)]
        said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        with self.opened() as instance:
            original = self.call(instance, photograph())
        graph = onnx.load(network).graph
        ends = [(end.name, side, "tensor(float)") for side in ("input", "output") for end in getattr(graph, side)]
        digest = hashlib.sha256(Path(network).read_bytes()).hexdigest()
        return EngineRoundTripFacts(
            os.getpid(),
            said["pid"],
            digest,
            said["sha256"],
            tuple(_binding(*end) for end in ends),
            tuple(_binding(*end) for end in said["bindings"]),
            original.data,
            np.load(output),
        )

    def rejection(
        self, name: str, artifact: OnnxArtifact, precision: Any, observed: object, expected: object
    ) -> RejectionFacts:
        runs, instance, error = self.ledger.runs, None, None
        with self.context.use():
            try:
                instance = self.factory.open(artifact, precision=precision, input_hw=HW)
            except Exception as caught:
                error = caught
        started = self.ledger.runs > runs
        return RejectionFacts(name, error, instance is not None, started, (), observed, expected)

    def query(self) -> QueryAllocationFacts:
        before = self.snapshot()
        first = len(self.ledger.made)
        self.factory.query_contract(self.artifact, precision="fp32", input_hw=HW)
        return QueryAllocationFacts("query", before, self.snapshot(), self.ledger.made[first:])

    def snapshot(self) -> ResourceSnapshot:
        return ResourceSnapshot(len(self.ledger.made), "arrays and sessions", range(len(self.ledger.made)))

    def contracts(self) -> OpenedContractFacts:
        queried = self.factory.query_contract(self.artifact, precision="fp32", input_hw=HW)
        with self.opened() as instance:
            return OpenedContractFacts("open", queried, instance.contract)

    def closed(self) -> ClosedInferenceFacts:
        with self.opened() as instance:
            pass
        runs, error = self.ledger.runs, None
        try:
            self.call(instance, photograph())
        except Exception as caught:
            error = caught
        return ClosedInferenceFacts("after close()", error, self.ledger.runs > runs)

    def replay(self) -> SequenceFacts:
        """First call, continuation, changed values and metadata, the same again."""
        requests = [photograph(at=at) for at in (60, 120, 60)]
        requests.append(HostFrame(data=requests[0].data, channels="RGB", colorspace="ACEScg", gamma="linear"))
        with self.opened(FACTORY) as normal, self.opened() as graph:
            outputs = [[self.call(instance, request) for request in requests] for instance in (normal, graph)]
        return SequenceFacts(normal, graph, *outputs)

    def suite(self, folder: Path) -> StatelessContractSuite:
        future = onnx.load(str(self.artifact.path))
        future.opset_import[0].version = 99
        (folder / "future.onnx").write_bytes(future.SerializeToString())
        path = self.artifact.path
        double = HostFrame(data=photograph().data.astype(np.float16), channels="RGB", colorspace="sRGB", gamma="sRGB")
        swapped = HostFrame(data=photograph().data, channels="BGR", colorspace="sRGB", gamma="sRGB")
        return StatelessContractSuite(
            self.factory.query_contract(self.artifact, precision="fp32", input_hw=HW),
            CommonContractCases(
                frame_boundaries=(
                    partial(self.boundary, "photograph", "accept", photograph()),
                    partial(self.boundary, "half", "reject", double),
                    partial(self.boundary, "BGR", "reject", swapped),
                    partial(self.boundary, "small", "reject", frame()),
                ),
                dlpack_allocations=self.exchange,
                engine_round_trip=partial(self.round_trip, folder),
                engine_incompatibilities=partial(
                    self.rejection, "opset", OnnxArtifact(folder / "future.onnx"), "fp32", 99, _newest_opset()
                ),
                checkpoint_rejections=(
                    partial(self.rejection, "scale", OnnxArtifact(path, scale=3), "fp32", 3, 4),
                    partial(self.rejection, "precision", self.artifact, "fp16", "fp16", "fp32"),
                ),
                outputs_equivalent=_equivalent,
                factory=FactoryContractCases(
                    self.query, self.contracts, self.closed, resources_equivalent=lambda first, second: first == second
                ),
            ),
        )


def _binding(name: str, side: Any, kind: str) -> EngineBindingFacts:
    shape = (1, *HW, 3) if side == "input" else (1, 4 * HW[0], 4 * HW[1], 3)
    return EngineBindingFacts(name, side, {"tensor(float)": "float32"}[kind], shape, shape, shape)


def _newest_opset() -> int:
    """What the installed ONNX Runtime itself names as its newest opset, when it refuses a later one."""
    model = onnx.helper.make_model(
        onnx.helper.make_graph([], "empty", [], []), opset_imports=[onnx.helper.make_opsetid("", 99)], ir_version=9
    )
    with pytest.raises(Exception, match="opset") as caught:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    words = str(caught.value).replace(".", " ").split()
    return max(int(word) for word in words if word.isdecimal() and int(word) < 99)


def _equivalent(first: Any, second: Any) -> bool:
    """One network on one device: at most rounding may differ, and metadata not at all."""
    if isinstance(first, np.ndarray):
        found = compare_rgb(first, second)
        return found.psnr_db == "Infinity" or (isinstance(found.psnr_db, float) and found.psnr_db > 100)
    same = (first.channels, first.colorspace, first.gamma) == (second.channels, second.colorspace, second.gamma)
    return same and _equivalent(first.data, second.data)


@pytest.mark.network
@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
@pytest.mark.slow
def test_the_onnx_module_passes(
    context: StreamContext, network: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graph: bool
) -> None:
    """V1-V9: every check that applies to a stateless module passes on evidence, and the graph form's replay, too."""
    observer = Observer(FACTORY.graph_factory() if graph else FACTORY, network, context, Ledger(monkeypatch))
    suite = observer.suite(tmp_path)
    report = (
        verify_cuda_graph_contract(CudaGraphContractSuite(suite, observer.replay))
        if graph
        else verify_module_contract(suite)
    )
    statuses = [check.status for check in report.checks]
    assert statuses == ["passed"] * 8 + ["not-applicable"] * 4 + ["passed"] * graph, str(report)
    assert report.passed
