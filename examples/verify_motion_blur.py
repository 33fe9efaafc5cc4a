"""Verify the motion blur as its author would: observe facts on the host runtime, let the suites judge, print reports.

Allocations are observed with tracemalloc, which knows NumPy's; the backend by counting calls of `motion_blur.blend`.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import motion_blur
import numpy as np
from motion_blur import BlurArtifact

from pixtreme.infer.contracts import ShapeProfile
from pixtreme.infer.frames import HostFrame
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
    GpuArrayFacts,
    IsolationFacts,
    OpenedContractFacts,
    QueryAllocationFacts,
    RejectionFacts,
    ResourceSnapshot,
    SequenceFacts,
    StateLifecycleFacts,
    TemporalContractSuite,
    verify_cuda_graph_contract,
    verify_module_contract,
)

HW = (48, 64)
BINDINGS = {"H": HW[0], "W": HW[1]}


def frame(seed: int, *, dtype: str = "float32", hw: tuple[int, int] = HW, gamma: str = "linear") -> HostFrame:
    pixels = np.random.default_rng(seed).random((*hw, 3)).astype(dtype)
    return HostFrame(data=pixels, channels="RGB", colorspace="sRGB", gamma=gamma)


def weight(seed: int, *, hw: tuple[int, int] = HW, dtype: str = "float32") -> Any:
    return np.random.default_rng(1000 + seed).random((*hw, 1)).astype(dtype)


@dataclass
class Request:
    """One call of a sequence."""

    seed: int
    reset: bool = False

    def run(self, context: StreamContext, blur: Any) -> Any:
        return context.submit(blur, frame(self.seed), weight=weight(self.seed), reset=self.reset).result().data


@contextmanager
def backend() -> Iterator[list[object]]:
    """Collect the backend's runs while the block lasts; end it with the context idle."""
    runs: list[object] = []
    original = motion_blur.blend

    def counted(*args: Any) -> None:
        runs.append(None)
        original(*args)

    motion_blur.blend = counted  # type: ignore[assignment]
    try:
        yield runs
    finally:
        motion_blur.blend = original


def held(*classes: type) -> ResourceSnapshot:
    """Return NumPy memory that is live now; with classes, what was allocated by code of theirs."""
    gc.collect()
    traces = [one for one in tracemalloc.take_snapshot().traces if one.domain == np.lib.tracemalloc_domain]
    places = [_lines(one) for one in classes]
    kept = [
        trace
        for trace in traces
        if not places or any(f.filename == file and a <= f.lineno < b for f in trace.traceback for file, a, b in places)
    ]
    counts: Counter[object] = Counter()
    identities = []
    for trace in kept:
        counts[trace.traceback] += 1
        identities.append((str(trace.traceback), trace.size, counts[trace.traceback]))
    return ResourceSnapshot(sum(trace.size for trace in kept), "bytes", frozenset(identities))


@cache
def _lines(one: type) -> tuple[str | None, int, int]:
    lines, start = inspect.getsourcelines(one)
    return inspect.getsourcefile(one), start, start + len(lines)


class Observer:
    """Makes the observations of one factory; every method returns facts."""

    def __init__(self, factory: Any, artifact: BlurArtifact, context: StreamContext) -> None:
        self.factory, self.artifact, self.context = factory, artifact, context

    def open(self, factory: Any = None) -> Any:
        with self.context.use():
            return (factory or self.factory).open(self.artifact, precision="fp32", input_hw=HW)

    def sequence(self, blur: Any, requests: Sequence[Request]) -> list[Any]:
        return [request.run(self.context, blur) for request in requests]

    def boundary(
        self,
        name: str,
        expected: Literal["accept", "reject"],
        given: HostFrame,
        mask: Any = None,
    ) -> FrameBoundaryFacts:
        """Call an instance once."""
        blur, output, error = self.open(), None, None
        params = {} if mask is None else {"weight": mask}
        with backend() as runs:
            try:
                output = self.context.submit(blur, given, **params).result()
            except Exception as caught:
                error = caught
            self.context.synchronize()
        facts = tuple(GpuArrayFacts(key, array.shape, array.dtype.name, "cpu") for key, array in params.items())
        profile = ShapeProfile(HW, HW, HW)
        blur.close()
        return FrameBoundaryFacts(name, expected, given, profile, BINDINGS, facts, output, error, bool(runs))

    def exchange(self) -> AllocationFacts:
        """Hand a result over through DLPack."""
        blur = self.open()
        result = self.context.submit(blur, frame(1), weight=weight(1)).result()
        before = held()
        consumer = np.from_dlpack(result)
        made = frozenset(held().allocations) - frozenset(before.allocations)
        blur.close()
        return AllocationFacts("result to NumPy", result.data.ctypes.data, consumer.ctypes.data, made)

    def round_trip(self) -> EngineRoundTripFacts:
        """Load the artifact in another process, and compute there."""
        process, loaded_digest, loaded = self.elsewhere()
        blur = self.open()
        original = self.sequence(blur, [Request(1), Request(2)])[-1]
        blur.close()
        digest = hashlib.sha256(self.artifact.path.read_bytes()).hexdigest()
        mine, theirs = bindings(original.shape), bindings(loaded.shape)
        return EngineRoundTripFacts(os.getpid(), process, digest, loaded_digest, mine, theirs, original, loaded)

    def elsewhere(self) -> tuple[int, str, Any]:
        """Run `load` in another process; return its id, the digest it read and what it computed."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output.npy"
            command = [sys.executable, __file__, "--load", str(self.artifact.path), str(output)]
            process, digest = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            return int(process), digest, np.load(output)

    def rejection(self, name: str, artifact: BlurArtifact, observed: object, expected: object) -> RejectionFacts:
        """Open something that must be refused."""
        instance, error = None, None
        with backend() as runs, self.context.use():
            try:
                instance = self.factory.open(artifact, precision="fp32", input_hw=HW)
            except Exception as caught:
                error = caught
        accepted = instance is not None
        return RejectionFacts(name, error, accepted, bool(runs), (), observed, expected)

    def query(self) -> QueryAllocationFacts:
        self.context.synchronize()  # what earlier cases used is released in stream order
        before = held()
        tracemalloc.reset_peak()
        level = tracemalloc.get_traced_memory()[0]
        contract = self.factory.query_contract(self.artifact, precision="fp32", input_hw=HW)
        peak = tracemalloc.get_traced_memory()[1] - level
        # Python's own objects make some kilobytes; one state image alone would be 36.
        temporary = [f"{peak} bytes"] if peak > contract.state_footprint.amount // 4 else []
        return QueryAllocationFacts("query", before, held(), temporary)

    def opened(self) -> OpenedContractFacts:
        queried = self.factory.query_contract(self.artifact, precision="fp32", input_hw=HW)
        blur = self.open()
        blur.close()
        return OpenedContractFacts("open", queried, blur.contract)

    def closed(self) -> ClosedInferenceFacts:
        blur, error = self.open(), None
        blur.close()
        with backend() as runs:
            try:
                self.context.submit(blur, frame(1), weight=weight(1)).result()
            except Exception as caught:
                error = caught
        return ClosedInferenceFacts("call after close()", error, bool(runs))

    def reset_equivalence(self) -> SequenceFacts:
        """A used and reset instance does what a fresh one does."""
        fresh, used = self.open(), self.open()
        self.sequence(used, [Request(8), Request(9)])
        requests = [Request(1, reset=True), Request(2), Request(3)]
        facts = SequenceFacts(fresh, used, self.sequence(fresh, requests), self.sequence(used, requests))
        fresh.close()
        used.close()
        return facts

    def reset_continuation(self) -> SequenceFacts:
        """After a reset a sequence goes on with its own history, as one that never was reset."""
        plain, reset = self.open(), self.open()
        rest = [Request(2), Request(3), Request(4)]
        reference = self.sequence(plain, [Request(1), *rest])[1:]
        candidate = self.sequence(reset, [Request(7), Request(1, reset=True), *rest])[2:]
        facts = SequenceFacts(plain, reset, reference, candidate)
        plain.close()
        reset.close()
        return facts

    def isolation(self) -> IsolationFacts:
        """Two instances in turns, against each alone."""
        of_a, of_b = [Request(1), Request(2), Request(3)], [Request(11), Request(12), Request(13)]
        instances = [self.open() for _ in range(4)]
        alone = [self.sequence(instances[0], of_a), self.sequence(instances[1], of_b)]
        turns = [
            (one.run(self.context, instances[2]), two.run(self.context, instances[3]))
            for one, two in zip(of_a, of_b, strict=True)
        ]
        for instance in instances:
            instance.close()
        first, second = ([pair[side] for pair in turns] for side in (0, 1))
        return IsolationFacts(instances[2], instances[3], alone[0], first, alone[1], second)

    def lifecycle(self) -> StateLifecycleFacts:
        """What the state holds from before opening until after closing."""
        self.context.synchronize()  # what earlier cases closed is released in stream order
        before = held(motion_blur.State)
        blur = self.open()
        classes = [one for one in type(blur).state_class.__mro__ if one is not object]
        opened = held(*classes)
        self.sequence(blur, [Request(1), Request(2), Request(3)])
        run = held(*classes)
        self.sequence(blur, [Request(4, reset=True)])
        reset = held(*classes)
        blur.close()
        self.context.synchronize()
        return StateLifecycleFacts(blur, before, opened, run, reset, held(*classes))

    def replay(self, normal: Any) -> SequenceFacts:
        """A graph instance against a normal one: first call, continuation, changed values, resets."""
        requests = [Request(1), Request(2), Request(3), Request(4, reset=True), Request(5), Request(5), Request(6)]
        instances = [self.open(normal), self.open()]
        outputs = [self.sequence(instance, requests) for instance in instances]
        for instance in instances:
            instance.close()
        return SequenceFacts(*instances, *outputs)

    def suite(self, folder: Path) -> TemporalContractSuite:
        """Return the whole suite; ``folder`` takes files that must be refused."""
        future = folder / "future.json"
        future.write_text(self.artifact.path.read_text("utf-8").replace('"version": 1', '"version": 2'), "utf-8")
        no_such = BlurArtifact(self.artifact.path, "params-ema")

        def boundary(*arguments: Any) -> Callable[[], FrameBoundaryFacts]:
            return partial(self.boundary, *arguments)

        common = CommonContractCases(
            frame_boundaries=(
                boundary("valid", "accept", frame(1), weight(1)),
                boundary("dtype", "reject", frame(1, dtype="float16"), weight(1)),
                boundary("size", "reject", frame(1, hw=(20, 64)), weight(1)),
                boundary("gamma", "reject", frame(1, gamma="sRGB"), weight(1)),
                boundary("no weight", "reject", frame(1)),
                boundary("weight's size", "reject", frame(1), weight(1, hw=(7, 64))),
                boundary("weight's dtype", "reject", frame(1), weight(1, dtype="float64")),
            ),
            dlpack_allocations=(self.exchange,),
            engine_round_trip=self.round_trip,
            engine_incompatibilities=(partial(self.rejection, "version", BlurArtifact(future), 2, 1),),
            checkpoint_rejections=(partial(self.rejection, "container", no_such, "params-ema", "params_ema"),),
            outputs_equivalent=np.array_equal,
            factory=FactoryContractCases((self.query,), (self.opened,), (self.closed,), same_resources),
        )
        return TemporalContractSuite(
            contract=self.factory.query_contract(self.artifact, precision="fp32", input_hw=HW),
            common=common,
            reset_equivalence=(self.reset_equivalence,),
            reset_continuation=(self.reset_continuation,),
            instance_isolation=(self.isolation,),
            state_lifecycle=(self.lifecycle,),
            normalize_footprint=lambda footprint: footprint,
            resources_equivalent=same_resources,
        )


def same_resources(first: ResourceSnapshot, second: ResourceSnapshot) -> bool:
    return first == second


def bindings(output_shape: tuple[int, ...]) -> tuple[EngineBindingFacts, ...]:
    shapes = {"frame": (*HW, 3), "weight": (*HW, 1)}
    inputs = [EngineBindingFacts(name, "input", "float32", shape, shape, shape) for name, shape in shapes.items()]
    return (*inputs, EngineBindingFacts("output", "output", "float32", *(output_shape,) * 3))


def load(artifact: Path, output: Path) -> None:
    """The other process of the round trip."""
    with StreamContext.open("cpu") as context:
        observer = Observer(motion_blur.FACTORY, BlurArtifact(artifact), context)
        np.save(output, observer.sequence(observer.open(), [Request(1), Request(2)])[-1])
    print(os.getpid(), hashlib.sha256(artifact.read_bytes()).hexdigest())


def main(arguments: Sequence[str] = ()) -> int:
    if arguments:
        load(*map(Path, arguments[1:]))
        return 0
    tracemalloc.start(25)
    with tempfile.TemporaryDirectory() as folder, StreamContext.open("cpu", name="verify") as context:
        artifact = BlurArtifact(motion_blur.write_artifact(Path(folder) / "blur.json"))
        normal = Observer(motion_blur.FACTORY, artifact, context)
        graph = Observer(motion_blur.FACTORY.graph_factory(), artifact, context)
        replayed = CudaGraphContractSuite(graph.suite(Path(folder)), (partial(graph.replay, motion_blur.FACTORY),))
        reports = [verify_module_contract(normal.suite(Path(folder))), verify_cuda_graph_contract(replayed)]
    tracemalloc.stop()
    print(*reports, sep="\n\n")
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
