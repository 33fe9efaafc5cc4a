"""A temporal module to copy: exponential motion blur, with private state, a reset, and a graph form.

Each output is the one before, moved towards the new frame by ``(1 - keep) * weight``; ``weight`` is a mask passed with
each request. Two state buffers take turns: one request reads the first and writes the second, the next one the other
way round. ``docs/writing-a-module.md`` walks through this file; ``verify_motion_blur.py`` proves it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixtreme.infer import StateFootprint, TemporalFamilyContract, TemporalOpenContract
from pixtreme.infer.contracts import (
    CheckpointContainer,
    Exact,
    FrameContract,
    GpuArrayParamContract,
    Precision,
    UnconstrainedWithReference,
    check_frame,
    validate_call_params,
)
from pixtreme.infer.cuda_graph import CudaGraphBuffers, CudaGraphSession
from pixtreme.infer.errors import ClosedError, ContextError, ContractError
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.streams import StreamContext

FRAME = FrameContract(
    channels=Exact(("R", "G", "B")),
    colorspace=UnconstrainedWithReference("sRGB"),
    gamma=Exact("linear"),
    matrix=Exact(None),
    dtype=Exact("float32"),
)
WEIGHT = GpuArrayParamContract("weight", ("H", "W", 1), "float32", "share of the new frame")
FAMILY = TemporalFamilyContract(FRAME, FRAME, (WEIGHT,), startup_frames=1)


@dataclass(frozen=True)
class BlurArtifact:
    """A JSON file with the blur's constant, and which of its containers to read it from."""

    path: Path
    container: CheckpointContainer = "params"

    def keep(self) -> float:
        """Read and check the file; nothing is allocated for a device."""
        content = json.loads(self.path.read_text("utf-8"))
        if (version := content.get("version")) != 1:
            raise refused("the file's format has one version", f"version={version!r}", "1", "export it again")
        holds = [name for name in content if name not in ("format", "version")]
        values = content if self.container == "bare" else content.get(self.container)
        if not isinstance(values, dict) or "keep" not in values:
            raise refused("the container must be in the file", self.container, f"one of {holds!r}", "name one of them")
        if not 0 <= (keep := float(values["keep"])) < 1:
            raise refused("keep is the share of the past", f"keep={keep!r}", "a number from 0 to below 1", "mend it")
        return keep


class State:
    """What one open instance remembers: two images that take turns."""

    def __init__(self, shape: tuple[int, int, int], xp: Any) -> None:
        self.images = (xp.zeros(shape, np.float32), xp.zeros(shape, np.float32))
        self.reset()

    def reset(self) -> None:
        """Forget the past: the next request starts a sequence."""
        self.turn = 0
        self.fresh = True

    def advance(self) -> str:
        """Return the operation of this request, and move on."""
        name = "start" if self.fresh else f"blend {self.turn}"
        self.turn, self.fresh = 1 - self.turn, False
        return name


@dataclass(frozen=True)
class BlurFactory:
    """Describes and opens artifacts; ``graph_factory()`` opens instances that replay captured graphs."""

    graph: bool = False

    @property
    def family_contract(self) -> TemporalFamilyContract:
        return FAMILY

    def graph_factory(self) -> BlurFactory:
        return BlurFactory(graph=True)

    def query_contract(
        self, artifact: BlurArtifact, /, *, precision: Precision, input_hw: tuple[int, int]
    ) -> TemporalOpenContract[BlurArtifact]:
        """Validate and describe; allocates nothing."""
        artifact.keep()
        if precision != "fp32":
            raise refused("the blur computes in one precision", f"precision={precision!r}", "'fp32'", "open it at fp32")
        height, width = input_hw
        state = StateFootprint(2 * height * width * 3 * 4)
        return TemporalOpenContract(FAMILY, artifact, precision, input_hw, 1, state)

    def open(self, artifact: BlurArtifact, /, *, precision: Precision, input_hw: tuple[int, int]) -> MotionBlur:
        """Validate as `query_contract`, then open an instance on the current context."""
        contract = self.query_contract(artifact, precision=precision, input_hw=input_hw)
        return MotionBlur(contract, artifact.keep(), StreamContext.current(), graph=self.graph)


class MotionBlur:
    """An opened blur: one sequence of frames on one stream."""

    scale = 1
    state_class = State

    def __init__(
        self, contract: TemporalOpenContract[BlurArtifact], keep: float, context: StreamContext, *, graph: bool
    ) -> None:
        self.contract = contract
        self._keep = keep
        self._context = context
        shape = (*contract.input_hw, 3)
        self._state: State | None = self.state_class(shape, context.xp)
        self._session: CudaGraphSession | None = None
        if graph:
            self._open_session(self._state, shape)

    def _open_session(self, state: State, shape: tuple[int, int, int]) -> None:
        """Capture one operation for each thing a request can be, on storage that stays where it is."""
        source, target = (self._frame(self._context.xp.zeros(shape, np.float32)) for _ in range(2))
        weight = self._context.xp.zeros((*shape[:2], 1), np.float32)
        self._buffers = CudaGraphBuffers(source, target, params={"weight": weight})
        operations = {
            name: lambda name=name: self._enqueue(name, state, source.data, weight, target.data)
            for name in ("start", "blend 0", "blend 1")
        }
        self._session = CudaGraphSession(
            operations, resources=(self._buffers, *state.images), after_prepare=state.reset, context=self._context
        )

    def __call__(self, frame: FrameLike, /, *, reset: bool = False, **params: Any) -> FrameLike:
        """Enqueue one request; the frame returned is independent of later ones. Everything is checked first."""
        state = self._state
        if state is None:
            raise ClosedError(why="a closed module takes no requests", what=f"{self!r} is closed", how="open it again")
        validate_call_params(self.contract.module_contract, params)
        self._check(frame, params["weight"])
        if StreamContext.current() is not self._context:
            current = StreamContext.current()
            raise ContextError(
                why="an instance works on the context it was opened on",
                what=f"current is {current!r}; required is {self._context!r}",
                how="bind it to a context and call the bound inference",
            )
        session = self._session
        if session is not None:
            self._buffers.copy_inputs(frame, weight=params["weight"])
        if reset:
            state.reset()
        if session is not None:
            session.replay(state.advance())
            return self._buffers.copy_output(
                channels=frame.channels, colorspace=frame.colorspace, gamma=frame.gamma, matrix=frame.matrix
            )
        output = self._context.empty(frame.shape)
        self._enqueue(state.advance(), state, frame.data, params["weight"], output)
        return self._frame(output, frame.colorspace)

    def close(self) -> None:
        """Release state and graphs. Idempotent."""
        self._state = None
        if self._session is not None:
            self._session.close()
            self._buffers.close()

    def _check(self, frame: FrameLike, weight: Any) -> None:
        check_frame(FRAME, frame)
        height, width = self.contract.input_hw
        for name, shape, expected in (
            ("frame", tuple(frame.shape), (height, width, 3)),
            ("weight", tuple(weight.shape), (height, width, 1)),
        ):
            if shape != expected:
                raise refused("the size is fixed when opening", f"{name} of shape {shape}", f"{expected}", "resize it")
        if weight.dtype != np.float32:
            raise refused("nothing is cast here", f"weight of dtype {weight.dtype}", "float32", "convert it")

    def _enqueue(self, name: str, state: State, source: Any, weight: Any, target: Any) -> None:
        """Enqueue one operation; while a session captures, this records it."""
        first, second = state.images
        previous, following = (first, second) if name == "blend 1" else (second, first)  # a start is of turn 0

        def work(image: Any, mask: Any) -> None:
            blend(name == "start", image, mask, 1 - self._keep, previous, following, target)

        self._context.enqueue(work, source, weight)

    def _frame(self, data: Any, colorspace: str = "sRGB") -> FrameLike:
        return self._context.frame(data, channels="RGB", colorspace=colorspace, gamma="linear")


def blend(start: bool, source: Any, weight: Any, share: float, previous: Any, following: Any, target: Any) -> None:
    """Do the work, in place: arrays of NumPy or CuPy, all of fixed shape."""
    following[...] = source
    if not start:
        following -= previous
        following *= weight
        following *= np.float32(share)
        following += previous
    target[...] = following


def refused(why: str, observed: str, accepted: str, how: str) -> ContractError:
    return ContractError(why=why, what=f"received {observed}; accepted is {accepted}", how=how)


FACTORY = BlurFactory()


def write_artifact(path: Path, *, keep: float = 0.75) -> Path:
    """Write an artifact with two containers."""
    content = {"format": "motion-blur", "version": 1, "params": {"keep": keep}, "params_ema": {"keep": keep / 2}}
    path.write_text(json.dumps(content), "utf-8")
    return path
