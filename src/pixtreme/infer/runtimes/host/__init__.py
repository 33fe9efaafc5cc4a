"""The host runtime: CUDA's stream, event and capture semantics on worker threads and NumPy arrays."""

from pixtreme.infer.runtimes.host._capture import HostGraph as HostGraph
from pixtreme.infer.runtimes.host._capture import HostRuntimeError as HostRuntimeError
from pixtreme.infer.runtimes.host._runtime import RUNTIME as RUNTIME
from pixtreme.infer.runtimes.host._runtime import HostEvent as HostEvent
from pixtreme.infer.runtimes.host._runtime import HostRuntime as HostRuntime
from pixtreme.infer.runtimes.host._runtime import HostStream as HostStream

__all__ = ("RUNTIME", "HostEvent", "HostGraph", "HostRuntime", "HostRuntimeError", "HostStream")
