"""The two modules on PyPI as clients: they import and describe checkpoints, unchanged.

They are installed without their dependencies (TensorRT among them) by `.ci/run`; elsewhere these tests are skipped.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pixtreme.infer
from pixtreme.infer import dispatch
from pixtreme.infer.contracts import (
    CudaGraphFactoryProvider,
    Exact,
    StateFootprint,
    StatelessFamilyContract,
    StatelessOpenContract,
    TemporalFamilyContract,
    TemporalOpenContract,
    validate_call_params,
)
from pixtreme.infer.errors import ContractError

ABSENT = [entry.distribution for entry in dispatch.architectures() if entry.version is None]
INSTALL = f"uv pip install --python .venv --no-deps {' '.join(dispatch.DISTRIBUTIONS.values())}"
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"{ABSENT} not installed: {INSTALL}")


@pytest.fixture
def span() -> Any:
    return pixtreme.infer.span


@pytest.fixture
def cda_vsr() -> Any:
    return pixtreme.infer.cda_vsr


def save(path: Path, shapes: Any, metadata: dict[str, str] | None = None, dtype: Any = np.float32) -> Path:
    """Write a checkpoint with tensors of these shapes."""
    from safetensors.numpy import save_file

    save_file({name: np.zeros(shape, dtype) for name, shape in shapes.items()}, path, metadata)
    return path


def span_shapes(scale: int) -> dict[str, tuple[int, ...]]:
    from pixtreme.infer.span._state import expected_state_shapes

    return {f"params.{name}": shape for name, shape in expected_state_shapes(scale).items()}


@pytest.mark.parametrize("name", ["span", "cda_vsr"])
def test_every_name_they_import_is_here(name: str) -> None:
    """C9: each import of ours in their source, those inside functions and for type checkers too, resolves."""
    files = distribution(dispatch.DISTRIBUTIONS[name]).files or []
    checked = 0
    for file in files:
        if file.suffix != ".py":
            continue
        source = Path(str(file.locate()))
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), f"pixtreme.infer.{name}")
            if module.startswith("pixtreme.infer") and not module.startswith(f"pixtreme.infer.{name}"):
                for alias in node.names:
                    assert hasattr(importlib.import_module(module), alias.name), f"{module}.{alias.name}"
                    checked += 1
    assert checked > 10


@pytest.mark.parametrize(("scale", "precision"), [(2, "fp32"), (4, "fp16")])
def test_span_describes_a_checkpoint(tmp_path: Path, span: Any, scale: int, precision: Any) -> None:
    """C6, C7: the contract of a good checkpoint, from both factories."""
    path = save(tmp_path / "span.safetensors", span_shapes(scale))
    artifact = span.SpanArtifactIdentity(path, "params.")
    contract = span.FACTORY.query_contract(artifact, precision=precision, input_hw=(48, 64))
    assert isinstance(contract, StatelessOpenContract)
    assert isinstance(span.FACTORY.family_contract, StatelessFamilyContract)
    assert (contract.scale, contract.precision, contract.input_hw) == (scale, precision, (48, 64))
    assert contract.artifact_identity == artifact
    module = contract.module_contract
    assert (module.scale, module.params, module.temporal) == (scale, (), False)
    assert module.input_frame.channels == Exact(("R", "G", "B"))
    validate_call_params(module, ())
    with pytest.raises(ContractError, match=r"undeclared \['reset'\]"):
        validate_call_params(module, {"reset"})
    assert isinstance(span.FACTORY, CudaGraphFactoryProvider)
    assert span.FACTORY.graph_factory().query_contract(artifact, precision=precision, input_hw=(48, 64)) == contract


def test_span_refuses_bad_checkpoints(tmp_path: Path, span: Any) -> None:
    """C6: its own errors, made with our functions."""
    good = span_shapes(2)
    path = save(tmp_path / "span.safetensors", good)
    absent = span.SpanArtifactIdentity(tmp_path / "absent.safetensors", "")
    bad = [
        (absent, "fp32", (4, 4), "must be a readable safetensors file"),
        (span.SpanArtifactIdentity(path, "other."), "fp32", (4, 4), "weight prefix is missing"),
        (span.SpanArtifactIdentity(path, ""), "fp32", (4, 4), "missing keys"),
        (span.SpanArtifactIdentity(path, "params."), "int8", (4, 4), "observed precision='int8'"),
        (span.SpanArtifactIdentity(path, "params."), "fp32", (0, 4), r"input_hw=\(0, 4\)"),
    ]
    half = save(tmp_path / "half.safetensors", good, dtype=np.float16)
    bad.append((span.SpanArtifactIdentity(half, "params."), "fp32", (4, 4), "dtype='F16'"))
    shapes = good | {"params.upsampler.0.weight": (13, 48, 3, 3)}
    odd = save(tmp_path / "odd.safetensors", shapes)
    bad.append((span.SpanArtifactIdentity(odd, "params."), "fp32", (4, 4), "does not declare a supported SPAN scale"))
    for artifact, precision, size, text in bad:
        with pytest.raises(ValueError, match=text) as raised:
            span.FACTORY.query_contract(artifact, precision=precision, input_hw=size)
        assert str(raised.value).startswith("why=")


def cda_shapes(scale: int) -> dict[str, tuple[int, ...]]:
    from pixtreme.infer.cda_vsr._checkpoint import _tensor_shapes
    from pixtreme.infer.cda_vsr._model import Architecture

    shapes: dict[str, tuple[int, ...]] = _tensor_shapes(Architecture(scale=scale))
    assert len(shapes) == 179
    return shapes


LUMA = {"cda_vsr.residual_unit": "luma-range"}


@pytest.mark.parametrize(("scale", "precision"), [(2, "fp16"), (4, "fp32")])
def test_cda_vsr_describes_a_checkpoint(tmp_path: Path, cda_vsr: Any, scale: int, precision: Any) -> None:
    """C6, C7: the temporal contract of a good checkpoint, from both factories."""
    path = save(tmp_path / "cda.safetensors", cda_shapes(scale), LUMA)
    contract = cda_vsr.FACTORY.query_contract(path, precision=precision, input_hw=(6, 8))
    assert isinstance(contract, TemporalOpenContract)
    assert isinstance(cda_vsr.FACTORY.family_contract, TemporalFamilyContract)
    assert (contract.scale, contract.precision, contract.input_hw) == (scale, precision, (6, 8))
    assert contract.state_footprint == StateFootprint(2 * 128 * 6 * 8 * 4)
    module = contract.module_contract
    assert (module.temporal, module.reset_control, module.startup_frames) == (True, "reset", 1)
    assert [param.name for param in module.params] == ["mv", "residual"]
    assert module.params[0].shape == (2, "H", "W")
    validate_call_params(module, {"mv", "residual"})
    validate_call_params(module, {"mv", "residual", "reset"})
    with pytest.raises(ContractError, match=r"missing \['residual'\], undeclared \['more'\]"):
        validate_call_params(module, {"mv", "more"})
    assert isinstance(cda_vsr.FACTORY, CudaGraphFactoryProvider)
    assert cda_vsr.FACTORY.graph_factory().query_contract(path, precision=precision, input_hw=(6, 8)) == contract


def test_cda_vsr_refuses_bad_checkpoints(tmp_path: Path, cda_vsr: Any) -> None:
    """C6: its own errors, unchanged."""
    shapes = cda_shapes(2)
    good = save(tmp_path / "good.safetensors", shapes, LUMA)
    two = {**{f"a.{name}": shape for name, shape in shapes.items()}, "b.upconv1.weight": (12, 64, 3, 3)}
    bad = [
        (tmp_path / "absent", "fp32", (4, 4), "readable safetensors checkpoint"),
        (save(tmp_path / "none", shapes), "fp32", (4, 4), "residual_unit is incompatible: observed='missing'"),
        (save(tmp_path / "unit", shapes, {"cda_vsr.residual_unit": "code"}), "fp32", (4, 4), "observed='code'"),
        (save(tmp_path / "gate", shapes, LUMA | {"cda_vsr.gate": "x"}), "fp32", (4, 4), "gate is incompatible"),
        (save(tmp_path / "two", two, LUMA), "fp32", (4, 4), "required exactly one weight set"),
        (save(tmp_path / "odd", shapes | {"upconv1.weight": (13, 64, 3, 3)}, LUMA), "fp32", (4, 4), "upconv1.weight"),
        (good, "int8", (4, 4), "precision is incompatible"),
        (good, "fp32", (True, 4), "input_hw is incompatible"),
    ]
    for artifact, precision, size, text in bad:
        with pytest.raises(ValueError, match=text):
            cda_vsr.FACTORY.query_contract(artifact, precision=precision, input_hw=size)


def test_opening_needs_what_they_need(tmp_path: Path, cda_vsr: Any) -> None:
    """C10: what is missing to open one is their error, not ours."""
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed")
    path = save(tmp_path / "cda.safetensors", cda_shapes(2), LUMA)
    with pytest.raises(ImportError, match="requires tensoracle and TensorRT"):
        cda_vsr.FACTORY.open(path, precision="fp32", input_hw=(4, 4))
