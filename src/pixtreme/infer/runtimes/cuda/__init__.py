"""The CUDA runtime, over CuPy. Importing this imports CuPy, and initialises nothing on a device."""

from pixtreme.infer.runtimes.cuda._runtime import CudaRuntime as CudaRuntime
from pixtreme.infer.runtimes.cuda._runtime import device_count as device_count
from pixtreme.infer.runtimes.cuda._runtime import runtime_of as runtime_of

__all__ = ("CudaRuntime", "device_count", "runtime_of")
