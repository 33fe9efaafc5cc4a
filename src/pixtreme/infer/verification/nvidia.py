"""Telemetry of an NVIDIA board through NVML (V13, extra ``verify``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NoReturn, Self

from pixtreme.infer.dependencies import require_optional
from pixtreme.infer.runtimes import pci_bus_id
from pixtreme.infer.verification.errors import VerificationInputError, refuse
from pixtreme.infer.verification.telemetry import TelemetrySample

# A board that does not offer a field says so with one of these; every other error is a fault of the board or driver.
_UNAVAILABLE = ("NotSupported", "NoPermission", "FunctionNotFound")


class NvidiaTelemetrySource:
    """Temperature, clocks and power of one board: a `TelemetrySource`.

    Parameters
    ----------
    physical_device_index
        NVML's own index, which knows nothing of ``CUDA_VISIBLE_DEVICES``; or a UUID or unambiguous beginning of one
        (``"GPU-…"``, ``"MIG-…"``); or ``"cuda:N"``, this process's CUDA device N, found by its PCI address.

    Raises
    ------
    ImportError
        The extra ``verify`` is not installed.
    VerificationInputError
        There is no such board, or the beginning of a UUID fits several; lists what there is.
    ContextError
        ``"cuda:N"`` cannot be used.
    pynvml.NVMLError
        NVML itself does not work here.

    Values
    ------
    ``temperature_c`` (degrees Celsius), ``sm_clock_mhz``, ``memory_clock_mhz`` (megahertz), ``power_w`` (watts). A
    field the board does not offer is None, and `unavailable` says why; so is a number no board can have. A lost board
    or an unknown error is raised.
    """

    def __init__(self, physical_device_index: int | str, /) -> None:
        if isinstance(physical_device_index, bool) or not isinstance(physical_device_index, int | str):
            refuse("physical_device_index", repr(physical_device_index), "an index, a UUID or 'cuda:N'")
        self._nvml: Any = require_optional("pynvml", extra="verify")
        address = None
        if isinstance(physical_device_index, str) and physical_device_index.startswith("cuda"):
            address = pci_bus_id(physical_device_index)
        self._nvml.nvmlInit()
        self._finalizer = weakref.finalize(self, self._nvml.nvmlShutdown)
        try:
            if address is not None:
                self._handle = self._nvml.nvmlDeviceGetHandleByPciBusId(address)
            elif isinstance(physical_device_index, int):
                self._handle = self._by_index(physical_device_index)
            else:
                self._handle = self._by_uuid(physical_device_index)
            self._device = _text(self._nvml.nvmlDeviceGetUUID(self._handle))
        except BaseException:
            self._finalizer()
            raise
        self._unavailable: dict[str, str] = {}

    @property
    def device(self) -> str:
        """The board's UUID."""
        return self._device

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Why fields of the last sample are None: ``"NotSupported"``, ``"NoPermission"``, ``"OutOfRange"``, …"""
        return dict(self._unavailable)

    def sample(self) -> TelemetrySample:
        """Read the board now.

        Raises
        ------
        pynvml.NVMLError
            The board is lost, or NVML failed otherwise than by not offering a field.

        Host synchronization
        --------------------
        None with any stream.
        """
        nvml, handle = self._nvml, self._handle
        unavailable: dict[str, str] = {}

        def read(field: str, call: Callable[[], int], most: int) -> int | None:
            try:
                value = call()
            except nvml.NVMLError as error:
                reason = type(error).__name__.removeprefix("NVMLError_")
                if reason not in _UNAVAILABLE:
                    raise
                unavailable[field] = reason
                return None
            if not 0 <= value <= most:
                unavailable[field] = "OutOfRange"
                return None
            return int(value)

        stamp = datetime.now(UTC)
        values: dict[str, float | None] = {
            "temperature_c": read(
                "temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), 200
            ),
            "sm_clock_mhz": read(
                "sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM), 20_000
            ),
            "memory_clock_mhz": read(
                "memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM), 50_000
            ),
        }
        milliwatts = read("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle), 100_000_000)
        values["power_w"] = None if milliwatts is None else milliwatts / 1000
        self._unavailable = unavailable
        return TelemetrySample(stamp, 0.0, "nvml", self._device, values)

    def close(self) -> None:
        """Let go of NVML. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<NvidiaTelemetrySource {self._device}>"

    def _by_index(self, index: int) -> Any:
        count = self._nvml.nvmlDeviceGetCount()
        if not 0 <= index < count:
            _refuse(repr(index), f"0 to {count - 1}: {', '.join(self._boards())}")
        return self._nvml.nvmlDeviceGetHandleByIndex(index)

    def _by_uuid(self, beginning: str) -> Any:
        boards = self._boards()
        fitting = [uuid for uuid in boards if uuid.casefold().startswith(beginning.strip().casefold())]
        exact = [uuid for uuid in fitting if uuid.casefold() == beginning.strip().casefold()]
        if len(exact or fitting) != 1 or not beginning.strip():
            _refuse(repr(beginning), f"the beginning of exactly one of {', '.join(boards) or 'no board at all'}")
        return boards[(exact or fitting)[0]]

    def _boards(self) -> dict[str, Any]:
        """Return the handle of each board and of each slice of a partitioned one, by UUID."""
        nvml, boards = self._nvml, {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            boards[_text(nvml.nvmlDeviceGetUUID(handle))] = handle
            try:
                slices = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
            except nvml.NVMLError:  # not a board that can be partitioned
                continue
            for number in range(slices):
                try:
                    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                except nvml.NVMLError:  # no slice there
                    continue
                boards[_text(nvml.nvmlDeviceGetUUID(part))] = part
        return boards


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid  # older bindings return bytes


def _refuse(observed: str, accepted: str) -> NoReturn:
    raise VerificationInputError(
        why="telemetry is read from one board, never from a wrong one",
        what=f"received physical_device_index={observed}; accepted is {accepted}",
        how="pass an index or UUID that `nvidia-smi -L` lists, or 'cuda:N'",
    )
