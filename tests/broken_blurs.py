"""Motion blurs that are broken in one way each, and what must be found in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import motion_blur
import numpy as np
from motion_blur import BlurArtifact, BlurFactory, MotionBlur, State

from pixtreme.infer import StateFootprint
from pixtreme.infer.errors import ContractError
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.streams import StreamContext


@dataclass(frozen=True)
class Broken(BlurFactory):
    """A factory of broken instances."""

    module: type[MotionBlur] = MotionBlur

    def graph_factory(self) -> Broken:
        return replace(self, graph=True)

    def open(self, artifact: BlurArtifact, /, *, precision: Any, input_hw: tuple[int, int]) -> MotionBlur:
        contract = self.query_contract(artifact, precision=precision, input_hw=input_hw)
        current = StreamContext.current()
        return self.module(contract, artifact.keep(), current, graph=self.graph)


class Metadata(MotionBlur):
    """The output says another gamma than the contract."""

    def _frame(self, data: Any, colorspace: str = "sRGB") -> Any:
        return HostFrame(data=data, channels="RGB", colorspace="sRGB", gamma="sRGB")


class TakesEverything(MotionBlur):
    """A frame in another gamma is taken."""

    def _check(self, frame: Any, weight: Any) -> None:
        super()._check(HostFrame(data=frame.data, channels="RGB", colorspace="sRGB", gamma="linear"), weight)


class Taciturn(MotionBlur):
    """A refusal does not say what is accepted."""

    def _check(self, frame: Any, weight: Any) -> None:
        if tuple(frame.shape) != (*self.contract.input_hw, 3):
            raise ContractError(why="wrong size", what=f"received {frame.shape}", how="resize it")
        super()._check(frame, weight)


class Hasty(MotionBlur):
    """The backend runs before the check."""

    def __call__(self, frame: Any, /, *, reset: bool = False, **params: Any) -> Any:
        if self._state is not None and frame.dtype == np.float16:
            scratch = np.zeros((4, 4, 3), np.float32)
            arguments = (True, scratch, scratch[..., :1], 0.5, scratch.copy(), scratch.copy(), scratch.copy())
            self._context.stream.enqueue(lambda: motion_blur.blend(*arguments))
        return super().__call__(frame, reset=reset, **params)


class CopyingFrame(HostFrame):
    """A frame whose DLPack export is a copy."""

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.copy().__dlpack__()


class HiddenCopy(MotionBlur):
    """Results export copies."""

    def _frame(self, data: Any, colorspace: str = "sRGB") -> Any:
        return CopyingFrame(data=data, channels="RGB", colorspace="sRGB", gamma="linear")


class WrongWeights(MotionBlur):
    """This process computes with another constant than the file holds."""

    def __init__(self, contract: Any, keep: float, context: Any, *, graph: bool) -> None:
        super().__init__(contract, keep / 2, context, graph=graph)


class Undying(MotionBlur):
    """close() is forgotten."""

    def close(self) -> None:
        self._kept, self._state = self._state, None

    def __call__(self, frame: Any, /, *, reset: bool = False, **params: Any) -> Any:
        if self._state is None:
            self._state = self._kept
        return super().__call__(frame, reset=reset, **params)


class LateRefusal(MotionBlur):
    """A closed instance starts the backend before it refuses."""

    def __call__(self, frame: Any, /, *, reset: bool = False, **params: Any) -> Any:
        if self._state is None:
            scratch = np.zeros((4, 4, 3), np.float32)
            motion_blur.blend(True, scratch, scratch[..., :1], 0.5, scratch.copy(), scratch.copy(), scratch.copy())
        return super().__call__(frame, reset=reset, **params)


class SharedImages(State):
    """All instances remember in the same two images."""

    shared = (np.zeros((48, 64, 3), np.float32), np.zeros((48, 64, 3), np.float32))

    def __init__(self, shape: tuple[int, int, int], xp: Any) -> None:
        super().__init__(shape, xp)
        self.own, self.images = self.images, self.shared


class SharedTurn(State):
    """All instances take turns together."""

    counter = 0

    def advance(self) -> str:
        if not self.fresh:
            self.turn = SharedTurn.counter % 2
        else:
            SharedTurn.counter = 0
        SharedTurn.counter += 1
        return super().advance()


class KeepsHistory(State):
    """A reset keeps the images in use."""

    def reset(self) -> None:
        first = not hasattr(self, "fresh")
        super().reset()
        self.fresh = first


class KeepsTurn(State):
    """A reset keeps whose turn it is: the buffer the start does not write is read next."""

    def reset(self) -> None:
        turn = getattr(self, "turn", 0)
        super().reset()
        self.turn = turn


class Reallocates(State):
    """A reset makes new images."""

    def reset(self) -> None:
        super().reset()
        self.images = tuple(np.zeros_like(image) for image in self.images)


class Hoards(State):
    """Every request keeps a copy."""

    def advance(self) -> str:
        self.kept = [*getattr(self, "kept", []), np.array(self.images[0])]
        return super().advance()


class Leaks(State):
    """What an instance held stays behind."""

    left: ClassVar[list[Any]] = []

    def __init__(self, shape: tuple[int, int, int], xp: Any) -> None:
        super().__init__(shape, xp)
        Leaks.left.append(self.images)


def with_state(state: type[State]) -> type[MotionBlur]:
    return type(state.__name__, (MotionBlur,), {"state_class": state})


class PreviousOutput(MotionBlur):
    """A graph request returns what the one before computed."""

    def __call__(self, frame: Any, /, *, reset: bool = False, **params: Any) -> Any:
        if self._session is None or self._state is None:
            return super().__call__(frame, reset=reset, **params)
        late = self._buffers.copy_output(channels="RGB", colorspace="sRGB", gamma="linear")
        super().__call__(frame, reset=reset, **params)
        return late


class FrozenWeight(MotionBlur):
    """The captured operations read a weight that no request writes."""

    def _enqueue(self, name: str, state: State, source: Any, weight: Any, target: Any) -> None:
        if self._session is None and hasattr(self, "_buffers"):  # while capturing
            weight = np.ones_like(weight)
        super()._enqueue(name, state, source, weight, target)


class OtherConstant(MotionBlur):
    """The graph form blurs with another constant."""

    def _open_session(self, state: State, shape: tuple[int, int, int]) -> None:
        keep, self._keep = self._keep, 0.1
        super()._open_session(state, shape)
        self._kept = keep


@dataclass(frozen=True)
class QueryAllocates(Broken):
    """A query makes an image, for a moment."""

    def query_contract(self, artifact: BlurArtifact, /, *, precision: Any, input_hw: tuple[int, int]) -> Any:
        np.zeros((*input_hw, 3), np.float32).sum()
        return super().query_contract(artifact, precision=precision, input_hw=input_hw)


@dataclass(frozen=True)
class QueryKeeps(Broken):
    """A query makes an image and keeps it."""

    def query_contract(self, artifact: BlurArtifact, /, *, precision: Any, input_hw: tuple[int, int]) -> Any:
        kept.append(np.zeros((*input_hw, 3), np.float32))
        return super().query_contract(artifact, precision=precision, input_hw=input_hw)


kept: list[Any] = []


@dataclass(frozen=True)
class Underdeclares(Broken):
    """Half of the state is declared."""

    def query_contract(self, artifact: BlurArtifact, /, *, precision: Any, input_hw: tuple[int, int]) -> Any:
        contract = super().query_contract(artifact, precision=precision, input_hw=input_hw)
        return replace(contract, state_footprint=StateFootprint(contract.state_footprint.amount // 2))


@dataclass(frozen=True)
class PromisesMore(Broken):
    """The opened instance has another contract than the query said."""

    def open(self, artifact: BlurArtifact, /, *, precision: Any, input_hw: tuple[int, int]) -> MotionBlur:
        blur = super().open(artifact, precision=precision, input_hw=input_hw)
        blur.contract = replace(blur.contract, artifact_identity=BlurArtifact(artifact.path, "params_ema"))
        return blur


class Lenient(BlurArtifact):
    """A container that is not there falls back to another one; any version is read."""

    def keep(self) -> float:
        return 0.75


@dataclass(frozen=True)
class FallsBack(Broken):
    """Opens whatever file it is given, by another container or version if need be."""

    refuses: str = ""

    def query_contract(self, artifact: BlurArtifact, /, *, precision: Any, input_hw: tuple[int, int]) -> Any:
        if artifact.container == self.refuses or (self.refuses == "version" and "future" in artifact.path.name):
            artifact.keep()
        return super().query_contract(
            Lenient(artifact.path, artifact.container), precision=precision, input_hw=input_hw
        )

    def open(self, artifact: BlurArtifact, /, *, precision: Any, input_hw: tuple[int, int]) -> MotionBlur:
        contract = self.query_contract(artifact, precision=precision, input_hw=input_hw)
        return MotionBlur(contract, 0.75, StreamContext.current(), graph=self.graph)


#: name → (factory, graph form?, {check: code and path of a finding it must hold}); no other check may fail.
MUTANTS: dict[str, tuple[Broken, bool, dict[str, tuple[str, str]]]] = {
    "output metadata": (
        Broken(module=Metadata),
        False,
        {"frame-boundary": ("output-violation", "frame_boundaries[0].output_frame.gamma")},
    ),
    "takes everything": (
        Broken(module=TakesEverything),
        False,
        {"frame-boundary": ("no-error", "frame_boundaries[3].error")},
    ),
    "error hides what is accepted": (
        Broken(module=Taciturn),
        False,
        {"frame-boundary": ("error-hides-value", "frame_boundaries[2].error")},
    ),
    "backend before the check": (
        Broken(module=Hasty),
        False,
        {"frame-boundary": ("backend-started", "frame_boundaries[1].backend_started")},
    ),
    "hidden copy": (
        Broken(module=HiddenCopy),
        False,
        {"dlpack-allocation": ("hidden-copy", "dlpack_allocations[0].consumer")},
    ),
    "another constant than the file's": (
        Broken(module=WrongWeights),
        False,
        {"engine-round-trip": ("output-mismatch", "engine_round_trip[0].loaded_output")},
    ),
    "any version opens": (
        FallsBack(refuses="params-ema"),
        False,
        {"engine-incompatibility": ("instance-accepted", "engine_incompatibilities[0].instance_accepted")},
    ),
    "falls back to another container": (
        FallsBack(refuses="version"),
        False,
        {"checkpoint-selector-rejection": ("no-error", "checkpoint_rejections[0].error")},
    ),
    "query allocates for a moment": (
        QueryAllocates(),
        False,
        {
            "query-gpu-allocation": (
                "temporary-allocation",
                "factory.query_allocations[0].allocations_during_query",
            )
        },
    ),
    "query keeps memory": (
        QueryKeeps(),
        False,
        {"query-gpu-allocation": ("growth", "factory.query_allocations[0].after_query")},
    ),
    "opens another contract": (
        PromisesMore(),
        False,
        {"opened-contract": ("contract-mismatch", "factory.opened_contracts[0].opened_contract")},
    ),
    "closed instance answers": (
        Broken(module=Undying),
        False,
        {
            "closed-inference": ("no-error", "factory.closed_inference[0].error"),
            "state-footprint": ("not-released", "state_lifecycle[0].after_close"),  # it still holds its state
        },
    ),
    "closed instance starts the backend": (
        Broken(module=LateRefusal),
        False,
        {"closed-inference": ("backend-started", "factory.closed_inference[0].backend_started")},
    ),
    "reset keeps the history": (
        Broken(module=with_state(KeepsHistory)),
        False,
        {
            "reset-equivalence": ("output-mismatch", "reset_equivalence[0].candidate[0]"),
            "reset-continuation": ("output-mismatch", "reset_continuation[0].candidate[0]"),
        },
    ),
    "reset keeps one buffer": (
        Broken(module=with_state(KeepsTurn)),
        False,
        {"reset-continuation": ("output-mismatch", "reset_continuation[0].candidate[0]")},
    ),
    "instances share their images": (
        Broken(module=with_state(SharedImages)),
        False,
        {"instance-isolation": ("output-mismatch", "instance_isolation[0].observed_a[1]")},
    ),
    "instances share their turn": (
        Broken(module=with_state(SharedTurn)),
        False,
        {"instance-isolation": ("output-mismatch", "instance_isolation[0].observed_b[1]")},
    ),
    "declares half of its state": (
        Underdeclares(),
        False,
        {"state-footprint": ("growth-mismatch", "state_lifecycle[0].after_open")},
    ),
    "reset reallocates": (
        Broken(module=with_state(Reallocates)),
        False,
        {"state-footprint": ("allocations-changed", "state_lifecycle[0].after_reset")},
    ),
    "requests hoard": (
        Broken(module=with_state(Hoards)),
        False,
        {"state-footprint": ("allocations-changed", "state_lifecycle[0].after_run")},
    ),
    "close leaks": (
        Broken(module=with_state(Leaks)),
        False,
        {"state-footprint": ("not-released", "state_lifecycle[0].after_close")},
    ),
    "graph returns the previous output": (
        Broken(module=PreviousOutput),
        True,
        {
            "engine-round-trip": ("output-mismatch", "engine_round_trip[0].loaded_output"),
            "reset-equivalence": ("output-mismatch", "reset_equivalence[0].candidate[0]"),
            "graph-replay-equivalence": ("output-mismatch", "replay_equivalence[0].candidate[0]"),
        },
    ),
    "graph reads a frozen weight": (
        Broken(module=FrozenWeight),
        True,
        {
            "engine-round-trip": ("output-mismatch", "engine_round_trip[0].loaded_output"),
            "graph-replay-equivalence": ("output-mismatch", "replay_equivalence[0].candidate[1]"),
        },
    ),
    "graph blurs with another constant": (
        Broken(module=OtherConstant),
        True,
        {
            "engine-round-trip": ("output-mismatch", "engine_round_trip[0].loaded_output"),
            "graph-replay-equivalence": ("output-mismatch", "replay_equivalence[0].candidate[1]"),
        },
    ),
}
