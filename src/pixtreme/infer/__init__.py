"""Async-aware stream orchestration for GPU image inference.

Importing this initialises no CUDA and imports no event loop, no inference backend and no architecture.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING

from pixtreme.infer import dispatch as _dispatch
from pixtreme.infer.contracts import CheckpointContainer as CheckpointContainer
from pixtreme.infer.contracts import CudaGraphFactoryProvider as CudaGraphFactoryProvider
from pixtreme.infer.contracts import Exact as Exact
from pixtreme.infer.contracts import FrameContract as FrameContract
from pixtreme.infer.contracts import FrameField as FrameField
from pixtreme.infer.contracts import FrameMetadataWarning as FrameMetadataWarning
from pixtreme.infer.contracts import GpuArrayParamContract as GpuArrayParamContract
from pixtreme.infer.contracts import ModuleContract as ModuleContract
from pixtreme.infer.contracts import OpenedStatelessImageInference as OpenedStatelessImageInference
from pixtreme.infer.contracts import Precision as Precision
from pixtreme.infer.contracts import ShapeProfile as ShapeProfile
from pixtreme.infer.contracts import StateFootprint as StateFootprint
from pixtreme.infer.contracts import StatefulImageInference as StatefulImageInference
from pixtreme.infer.contracts import StatelessFamilyContract as StatelessFamilyContract
from pixtreme.infer.contracts import StatelessImageInference as StatelessImageInference
from pixtreme.infer.contracts import StatelessInferenceFactory as StatelessInferenceFactory
from pixtreme.infer.contracts import StatelessModuleContract as StatelessModuleContract
from pixtreme.infer.contracts import StatelessOpenContract as StatelessOpenContract
from pixtreme.infer.contracts import TemporalFamilyContract as TemporalFamilyContract
from pixtreme.infer.contracts import TemporalInferenceFactory as TemporalInferenceFactory
from pixtreme.infer.contracts import TemporalModuleContract as TemporalModuleContract
from pixtreme.infer.contracts import TemporalOpenContract as TemporalOpenContract
from pixtreme.infer.contracts import UnconstrainedWithReference as UnconstrainedWithReference
from pixtreme.infer.contracts import check_frame as check_frame
from pixtreme.infer.contracts import validate_call_params as validate_call_params
from pixtreme.infer.cuda_graph import CudaGraphBuffers as CudaGraphBuffers
from pixtreme.infer.cuda_graph import CudaGraphSession as CudaGraphSession
from pixtreme.infer.dependencies import require_optional as require_optional
from pixtreme.infer.errors import BusyError as BusyError
from pixtreme.infer.errors import CaptureError as CaptureError
from pixtreme.infer.errors import ClosedError as ClosedError
from pixtreme.infer.errors import ContextError as ContextError
from pixtreme.infer.errors import ContractError as ContractError
from pixtreme.infer.errors import HandleTimeout as HandleTimeout
from pixtreme.infer.errors import InferError as InferError
from pixtreme.infer.errors import LoopBlockedWarning as LoopBlockedWarning
from pixtreme.infer.errors import NotPicklableError as NotPicklableError
from pixtreme.infer.errors import PipelineError as PipelineError
from pixtreme.infer.errors import StreamFault as StreamFault
from pixtreme.infer.errors import WorkCancelled as WorkCancelled
from pixtreme.infer.errors import actionable_error as actionable_error
from pixtreme.infer.frames import Colorspace as Colorspace
from pixtreme.infer.frames import FrameLike as FrameLike
from pixtreme.infer.frames import Gamma as Gamma
from pixtreme.infer.frames import HostFrame as HostFrame
from pixtreme.infer.frames import Matrix as Matrix
from pixtreme.infer.onnx import run_onnx as run_onnx
from pixtreme.infer.recipe_identity import RecipeCatalogEntry as RecipeCatalogEntry
from pixtreme.infer.recipe_identity import RecipeIdentity as RecipeIdentity
from pixtreme.infer.recipe_identity import RecipeIdentityError as RecipeIdentityError
from pixtreme.infer.recipe_identity import is_positive_discriminator as is_positive_discriminator
from pixtreme.infer.recipe_identity import parse_recipe_identity as parse_recipe_identity
from pixtreme.infer.recipe_identity import validate_recipe_reference as validate_recipe_reference
from pixtreme.infer.streams import After as After
from pixtreme.infer.streams import BoundInference as BoundInference
from pixtreme.infer.streams import EventHandle as EventHandle
from pixtreme.infer.streams import HandleStatus as HandleStatus
from pixtreme.infer.streams import StreamContext as StreamContext
from pixtreme.infer.streams import StreamLike as StreamLike
from pixtreme.infer.streams import as_completed as as_completed
from pixtreme.infer.streams import available_devices as available_devices
from pixtreme.infer.streams import wait_all as wait_all

__all__ = (
    "After",
    "BoundInference",
    "BusyError",
    "CaptureError",
    "CheckpointContainer",
    "ClosedError",
    "Colorspace",
    "ContextError",
    "ContractError",
    "CudaGraphBuffers",
    "CudaGraphFactoryProvider",
    "CudaGraphSession",
    "EventHandle",
    "Exact",
    "FrameContract",
    "FrameField",
    "FrameLike",
    "FrameMetadataWarning",
    "Gamma",
    "GpuArrayParamContract",
    "HandleStatus",
    "HandleTimeout",
    "HostFrame",
    "InferError",
    "LoopBlockedWarning",
    "Matrix",
    "ModuleContract",
    "NotPicklableError",
    "OpenedStatelessImageInference",
    "PipelineError",
    "Precision",
    "RecipeCatalogEntry",
    "RecipeIdentity",
    "RecipeIdentityError",
    "ShapeProfile",
    "StateFootprint",
    "StatefulImageInference",
    "StatelessFamilyContract",
    "StatelessImageInference",
    "StatelessInferenceFactory",
    "StatelessModuleContract",
    "StatelessOpenContract",
    "StreamContext",
    "StreamFault",
    "StreamLike",
    "TemporalFamilyContract",
    "TemporalInferenceFactory",
    "TemporalModuleContract",
    "TemporalOpenContract",
    "UnconstrainedWithReference",
    "WorkCancelled",
    "actionable_error",
    "as_completed",
    "available_devices",
    "check_frame",
    "is_positive_discriminator",
    "parse_recipe_identity",
    "require_optional",
    "run_onnx",
    "validate_call_params",
    "validate_recipe_reference",
    "wait_all",
)


span: _ModuleType  # architectures: distributions of their own, imported when asked for
cda_vsr: _ModuleType

# What brings an event-loop library or an inference backend with it, imported when asked for.
_LAZY = {
    "OnnxArtifact": "onnx_module",
    "Pipeline": "aio",
    "Stage": "aio",
    "StreamPool": "aio",
    "bind_onnx": "onnx_module",
    "bind_onnx_async": "onnx_module",
}

if TYPE_CHECKING:
    from pixtreme.infer.aio import Pipeline as Pipeline
    from pixtreme.infer.aio import Stage as Stage
    from pixtreme.infer.aio import StreamPool as StreamPool
    from pixtreme.infer.onnx_module import OnnxArtifact as OnnxArtifact
    from pixtreme.infer.onnx_module import bind_onnx as bind_onnx
    from pixtreme.infer.onnx_module import bind_onnx_async as bind_onnx_async
else:  # a type checker knows every name there is, and should say so of the others

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return getattr(_import_module(f"{__name__}.{_LAZY[name]}"), name)
        if name in _dispatch.DISTRIBUTIONS:
            return _dispatch.resolve(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:  # an absent architecture is in `dispatch.architectures()`: looking at it here would raise
    return sorted(
        {*globals(), *_LAZY, *(found.name for found in _dispatch.architectures() if found.version is not None)}
    )
