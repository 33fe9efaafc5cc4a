"""The check behind ``verify=True``: does a replay do what the operation does (G20)?

Each operation's graph is replayed on perturbed inputs; then inputs, history and a poisoned output are put back and the
operation is called. Work that ran while capturing, instead of being recorded, leaves the replay with stale values.
Everything is restored to what was found before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from pixtreme.infer._cuda_graph_buffers import CudaGraphBuffers, is_writeable
from pixtreme.infer.errors import CaptureError, ContractError
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.runtimes import NativeArray, Runtime

# Graph and eager call run the same kernels; on CUDA an autotuned library may pick another one between the two.
_RELATIVE_TOLERANCE = {"cpu": 0.0, "cuda": 1e-3}


def verify_operations(
    runtime: Runtime,
    operations: Mapping[str, Callable[[], object]],
    *,
    replay: Callable[[str], None],
    wait: Callable[[], None],
    resources: Iterable[object],
) -> None:
    """Compare each operation's replay with an eager call.

    Raises
    ------
    ContractError
        No `CudaGraphBuffers` among the resources: there is nothing to perturb and compare.
    CaptureError
        Names the operation and the storage that differs.
    """
    inputs, state = _storage(runtime, resources)
    found = {name: runtime.to_host(array) for name, array in (inputs | state).items()}
    generator = np.random.default_rng(20)
    try:
        for name, operation in operations.items():
            perturbed = {key: _perturbed(generator, found[key]) for key in inputs}

            def run(work: Callable[[], object], values: Mapping[str, Any] = perturbed) -> dict[str, Any]:
                for key, array in inputs.items():
                    runtime.from_host(array, values[key])
                for key, array in state.items():
                    runtime.from_host(array, _poison(found[key]) if key.startswith("output") else found[key])
                work()
                wait()
                return {key: runtime.to_host(array) for key, array in state.items()}

            # The replay first: an eager call would leave right values in scratch storage the replay should fill itself.
            replayed = run(partial(replay, name))
            eager = run(operation)
            _compare(runtime, name, eager, replayed)
    finally:
        for key, array in (inputs | state).items():
            runtime.from_host(array, found[key])


def _storage(runtime: Runtime, resources: Iterable[object]) -> tuple[dict[str, NativeArray], dict[str, NativeArray]]:
    """Return what to perturb, and what to compare: the output and every frame or array kept as history."""
    inputs: dict[str, NativeArray] = {}
    state: dict[str, NativeArray] = {}
    for position, resource in enumerate(resources):
        if isinstance(resource, CudaGraphBuffers):
            fixed, output = resource.fixed_storage()
            inputs |= {f"{name} of resources[{position}]": array for name, array in fixed.items()}
            state[f"output of resources[{position}]"] = output
        elif isinstance(resource, FrameLike) or hasattr(resource, "__dlpack__"):
            array = runtime.import_array(resource, name=f"resources[{position}]")
            if is_writeable(array):  # a constant is no state
                state[f"resources[{position}]"] = array
    if not inputs:
        raise ContractError(
            why="verify=True replays on perturbed inputs and compares outputs",
            what="no CudaGraphBuffers were among the resources; accepted is at least one",
            how="pass resources=(buffers, ...), or open without verify",
        )
    return inputs, state


def _perturbed(generator: np.random.Generator, like: Any) -> Any:
    if like.dtype.kind == "f":
        return generator.random(like.shape).astype(like.dtype)
    return generator.integers(0, 2, like.shape).astype(like.dtype)


def _poison(like: Any) -> Any:
    return np.full_like(like, np.nan if like.dtype.kind == "f" else like.dtype.type(1))


def _compare(runtime: Runtime, name: str, eager: Mapping[str, Any], replayed: Mapping[str, Any]) -> None:
    rtol = _RELATIVE_TOLERANCE[runtime.device.partition(":")[0]]
    for key, expected in eager.items():
        same = np.isclose(replayed[key].astype(float), expected.astype(float), rtol=rtol, atol=rtol, equal_nan=True)
        if not same.all():
            wrong = int((~same).sum())
            raise CaptureError(
                why="a replay must do what the operation does",
                what=f"operation {name!r}: {wrong} of {same.size} values of {key} differ from an eager call",
                how="enqueue all work on the current stream, and let every value that changes come from fixed storage",
            )
