"""The suites on real modules: the sound ones pass every check, each broken one is caught by the check meant for it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import broken_blurs
import motion_blur
import pytest
import verify_motion_blur
from motion_blur import BlurArtifact
from verify_motion_blur import Observer

from pixtreme.infer.streams import StreamContext
from pixtreme.infer.verification import (
    CudaGraphContractSuite,
    VerificationReport,
    canonical_json,
    verify_cuda_graph_contract,
    verify_module_contract,
)


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    """Allocations are observed with tracemalloc."""
    tracemalloc.start(25)
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> BlurArtifact:
    """A sound artifact."""
    return BlurArtifact(motion_blur.write_artifact(tmp_path_factory.mktemp("blur") / "blur.json"))


@pytest.fixture(scope="module")
def elsewhere(artifact: BlurArtifact) -> tuple[int, str, Any]:
    """What another process computes from the artifact with the sound module; run once."""
    return Observer(None, artifact, None).elsewhere()  # type: ignore[arg-type]  # only the artifact is read


@pytest.fixture
def judged(context: StreamContext, artifact: BlurArtifact, elsewhere: tuple[int, str, Any], tmp_path: Path) -> Any:
    """Return a function that observes and judges a factory."""

    def judge(factory: Any, *, graph: bool) -> VerificationReport:
        observer = Observer(factory.graph_factory() if graph else factory, artifact, context)
        observer.elsewhere = lambda: elsewhere  # type: ignore[method-assign]
        suite = observer.suite(tmp_path)
        if not graph:
            return verify_module_contract(suite)
        return verify_cuda_graph_contract(
            CudaGraphContractSuite(suite, (partial(observer.replay, motion_blur.FACTORY),))
        )

    return judge


@pytest.mark.parametrize("graph", [False, True], ids=["normal", "graph"])
def test_the_reference_module_passes(judged: Any, graph: bool) -> None:
    """V1, V2, V9: every check of the temporal suite, and of the graph suite, passes on evidence."""
    report = judged(motion_blur.FACTORY, graph=graph)
    assert [check.status for check in report.checks] == ["passed"] * (13 if graph else 12), str(report)
    assert report.passed
    assert canonical_json(report.to_dict())


@pytest.mark.parametrize("name", broken_blurs.MUTANTS)
@pytest.mark.slow
def test_each_broken_module_is_caught_by_its_check(judged: Any, name: str) -> None:
    """V3-V9: a module broken in one way fails the checks it breaks, with this finding, and no other."""
    factory, graph, expected = broken_blurs.MUTANTS[name]
    broken_blurs.kept.clear()
    broken_blurs.Leaks.left.clear()
    report = judged(factory, graph=graph)
    assert {check.name for check in report.checks if check.status != "passed"} == set(expected), str(report)
    for check in report.checks:
        if check.name in expected:
            assert check.status == "failed"
            assert expected[check.name] in [(finding.code, finding.path) for finding in check.findings], str(report)


@pytest.mark.slow
def test_verification_is_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The example a module author starts from prints two tables without a failure."""
    assert verify_motion_blur.main() == 0
    printed = capsys.readouterr().out
    assert "temporal-module: passed (12 passed)" in printed
    assert "cuda-graph: passed (13 passed)" in printed
    tracemalloc.start(25)  # the program stopped what the other tests of this file need
