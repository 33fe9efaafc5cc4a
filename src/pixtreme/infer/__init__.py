"""Async-aware stream orchestration for GPU image inference.

Importing this initialises no CUDA and imports no event loop and no inference backend.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from pixtreme.infer.contracts import CheckpointContainer as CheckpointContainer
from pixtreme.infer.contracts import CudaGraphFactoryProvider as CudaGraphFactoryProvider
from pixtreme.infer.contracts import Exact as Exact
from pixtreme.infer.contracts import FrameContract as FrameContract
from pixtreme.infer.contracts import FrameField as FrameField
from pixtreme.infer.contracts import FrameMetadataWarning as FrameMetadataWarning
from pixtreme.infer.contracts import GpuArrayParamContract as GpuArrayParamContract
from pixtreme.infer.contracts import OpenedStatelessImageInference as OpenedStatelessImageInference
from pixtreme.infer.contracts import Precision as Precision
from pixtreme.infer.contracts import StatelessFamilyContract as StatelessFamilyContract
from pixtreme.infer.contracts import StatelessImageInference as StatelessImageInference
from pixtreme.infer.contracts import StatelessInferenceFactory as StatelessInferenceFactory
from pixtreme.infer.contracts import StatelessModuleContract as StatelessModuleContract
from pixtreme.infer.contracts import StatelessOpenContract as StatelessOpenContract
from pixtreme.infer.contracts import UnconstrainedWithReference as UnconstrainedWithReference
from pixtreme.infer.contracts import validate_call_params as validate_call_params
from pixtreme.infer.cuda_graph import CudaGraphBuffers as CudaGraphBuffers
from pixtreme.infer.cuda_graph import CudaGraphSession as CudaGraphSession
from pixtreme.infer.errors import BusyError as BusyError
from pixtreme.infer.errors import CaptureError as CaptureError
from pixtreme.infer.errors import ClosedError as ClosedError
from pixtreme.infer.errors import ContextError as ContextError
from pixtreme.infer.errors import ContractError as ContractError
from pixtreme.infer.errors import HandleTimeout as HandleTimeout
from pixtreme.infer.errors import InferError as InferError
from pixtreme.infer.errors import NotPicklableError as NotPicklableError
from pixtreme.infer.errors import StreamFault as StreamFault
from pixtreme.infer.errors import actionable_error as actionable_error
from pixtreme.infer.frames import FrameLike as FrameLike
from pixtreme.infer.frames import HostFrame as HostFrame
from pixtreme.infer.streams import BoundInference as BoundInference
from pixtreme.infer.streams import EventHandle as EventHandle
from pixtreme.infer.streams import StreamContext as StreamContext
from pixtreme.infer.streams import as_completed as as_completed
from pixtreme.infer.streams import available_devices as available_devices
from pixtreme.infer.streams import wait_all as wait_all

__all__ = (
    "BoundInference",
    "BusyError",
    "CaptureError",
    "CheckpointContainer",
    "ClosedError",
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
    "GpuArrayParamContract",
    "HandleTimeout",
    "HostFrame",
    "InferError",
    "NotPicklableError",
    "OpenedStatelessImageInference",
    "Precision",
    "StatelessFamilyContract",
    "StatelessImageInference",
    "StatelessInferenceFactory",
    "StatelessModuleContract",
    "StatelessOpenContract",
    "StreamContext",
    "StreamFault",
    "UnconstrainedWithReference",
    "actionable_error",
    "as_completed",
    "available_devices",
    "validate_call_params",
    "wait_all",
)
