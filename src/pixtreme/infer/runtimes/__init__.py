"""Device runtimes: one set of verbs over the CPU and over CUDA, and the names of the devices.

`Runtime` says what a runtime offers; `host` and `cuda` are two that do. A third one is held to the same contract by
`pixtreme.infer.testing.check_runtime`.
"""

from pixtreme.infer.runtimes._devices import DEFAULT_STREAMS as DEFAULT_STREAMS
from pixtreme.infer.runtimes._devices import available_devices as available_devices
from pixtreme.infer.runtimes._devices import current_runtime as current_runtime
from pixtreme.infer.runtimes._devices import native_stream as native_stream
from pixtreme.infer.runtimes._devices import pci_bus_id as pci_bus_id
from pixtreme.infer.runtimes._devices import runtime_for as runtime_for
from pixtreme.infer.runtimes._protocol import NOT_PERMITTED as NOT_PERMITTED
from pixtreme.infer.runtimes._protocol import ArrayVerbs as ArrayVerbs
from pixtreme.infer.runtimes._protocol import CaptureVerbs as CaptureVerbs
from pixtreme.infer.runtimes._protocol import EventVerbs as EventVerbs
from pixtreme.infer.runtimes._protocol import NativeArray as NativeArray
from pixtreme.infer.runtimes._protocol import NativeEvent as NativeEvent
from pixtreme.infer.runtimes._protocol import NativeGraph as NativeGraph
from pixtreme.infer.runtimes._protocol import NativeStream as NativeStream
from pixtreme.infer.runtimes._protocol import Notify as Notify
from pixtreme.infer.runtimes._protocol import PrivateMemory as PrivateMemory
from pixtreme.infer.runtimes._protocol import Runtime as Runtime
from pixtreme.infer.runtimes._protocol import StreamKey as StreamKey
from pixtreme.infer.runtimes._protocol import StreamLike as StreamLike
from pixtreme.infer.runtimes._protocol import StreamVerbs as StreamVerbs

__all__ = (
    "DEFAULT_STREAMS",
    "NOT_PERMITTED",
    "ArrayVerbs",
    "CaptureVerbs",
    "EventVerbs",
    "NativeArray",
    "NativeEvent",
    "NativeGraph",
    "NativeStream",
    "Notify",
    "PrivateMemory",
    "Runtime",
    "StreamKey",
    "StreamLike",
    "StreamVerbs",
    "available_devices",
    "current_runtime",
    "native_stream",
    "pci_bus_id",
    "runtime_for",
)
