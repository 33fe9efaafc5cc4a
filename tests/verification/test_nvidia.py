"""NVIDIA telemetry on a double of the pynvml calls it makes (V13); the double is held to the real module."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pynvml
import pytest

from pixtreme.infer.errors import ContextError
from pixtreme.infer.runtimes import pci_bus_id
from pixtreme.infer.verification import (
    NvidiaTelemetrySource,
    VerificationInputError,
    WallTimer,
    measure_requests,
    nvidia,
)
from pixtreme.infer.verification.telemetry import TelemetrySource

A, B = "GPU-af7b61d8-0000-0000-0000-00000000000a", "GPU-c0d5aaaa-0000-0000-0000-00000000000b"
SLICE = "MIG-11112222-0000-0000-0000-00000000000c"


class Nvml(ModuleType):
    """Two boards, the second one cut into one slice. A reading is a number or the error it raises."""

    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_CLOCK_MEM = pynvml.NVML_CLOCK_MEM
    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.users = 0
        self.readings: dict[str, Any] = {"temperature": 41, "sm": 1410, "memory": 1593, "power": 63_500}
        self.uuids = {0: A, 1: B, "slice": SLICE}
        self.encode: Callable[[str], Any] = str
        self.addresses = {"0000:01:00.0": 1, "0000:02:00.0": 0}

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> int:
        return self.addresses[pciBusId]

    def nvmlDeviceGetUUID(self, handle: Any) -> Any:
        return self.encode(self.uuids[handle])

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        if device == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "slice"

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._read("temperature")

    def nvmlDeviceGetClockInfo(self, handle: Any, type: int) -> int:
        return self._read({pynvml.NVML_CLOCK_SM: "sm", pynvml.NVML_CLOCK_MEM: "memory"}[type])

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._read("power")

    def _read(self, name: str) -> int:
        value = self.readings[name]
        if isinstance(value, Exception):
            raise value
        number: int = value
        return number


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """The double in place of pynvml."""
    double = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", double)
    return double


def test_the_double_is_the_real_modules_double() -> None:
    """V13: every function and constant of the double exists in pynvml, with the same parameters."""
    made = {name for name in vars(Nvml) if name.startswith(("nvml", "NVML"))}
    assert len(made) >= 13
    for name in made:
        real, double = getattr(pynvml, name), getattr(Nvml, name)
        if inspect.isfunction(double):
            assert list(inspect.signature(real).parameters) == list(inspect.signature(double).parameters)[1:], name
    used = set(re.findall(r"nvml\.(\w+)", inspect.getsource(nvidia)))
    assert used - {"NVMLError"} <= made


def test_a_sample(nvml: Nvml) -> None:
    """V13: temperature, SM and memory clocks, power in watts, under the board's UUID and an aware UTC time."""
    with NvidiaTelemetrySource(0) as source:
        typed: TelemetrySource = source
        sample = typed.sample()
        assert sample.values == {
            "temperature_c": 41,
            "sm_clock_mhz": 1410,
            "memory_clock_mhz": 1593,
            "power_w": 63.5,
        }
        assert (sample.source, sample.device, source.device) == ("nvml", A, A)
        assert sample.timestamp_utc.tzname() == "UTC"
        assert source.unavailable == {}
        assert nvml.users == 1
    source.close()
    assert nvml.users == 0


FIELDS = {"temperature": "temperature_c", "sm": "sm_clock_mhz", "memory": "memory_clock_mhz", "power": "power_w"}


@pytest.mark.parametrize("reading", FIELDS)
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), "NotSupported"),
        (pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION), "NoPermission"),
        (pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND), "FunctionNotFound"),
        (0xFFFFFFFF, "OutOfRange"),
    ],
)
def test_an_unsupported_field_is_none(nvml: Nvml, reading: str, value: Any, reason: str) -> None:
    """V13: one field a board does not offer is None with its reason; the others are there (C35, C36)."""
    nvml.readings[reading] = value
    with NvidiaTelemetrySource(1) as source:
        values = source.sample().values
        assert [name for name, found in values.items() if found is None] == [FIELDS[reading]]
        assert source.unavailable == {FIELDS[reading]: reason}
        nvml.readings[reading] = 1
        assert source.sample().values[FIELDS[reading]] is not None
        assert source.unavailable == {}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN])
def test_a_lost_board_is_a_fault(nvml: Nvml, code: int) -> None:
    """V12, V13: a lost board and an unknown error are no missing field: the run fails with NVML's error as cause."""
    nvml.readings["power"] = pynvml.NVMLError(code)
    with NvidiaTelemetrySource(0) as source:
        with pytest.raises(pynvml.NVMLError):
            source.sample()
        with pytest.raises(RuntimeError) as caught:
            measure_requests(lambda: 1, timer=WallTimer(), warmup=0, samples=1, telemetry=source)
        assert isinstance(caught.value.__cause__, pynvml.NVMLError)


@pytest.mark.parametrize(
    ("name", "uuid"),
    [(A, A), ("GPU-af7b", A), ("gpu-C0D5", B), (SLICE, SLICE), ("MIG-1111", SLICE), (" GPU-c0d5 ", B), (1, B)],
)
@pytest.mark.parametrize("encode", [str, str.encode], ids=["text", "bytes"])
def test_boards_are_named_by_uuid(nvml: Nvml, name: Any, uuid: str, encode: Any) -> None:
    """V13: a UUID or its unambiguous beginning, in any case, names a board or slice; older bindings give bytes."""
    nvml.encode = encode
    with NvidiaTelemetrySource(name) as source:
        assert source.device == uuid


@pytest.mark.parametrize("name", ["GPU-", "GPU-dead", "", " ", 2, -1, True, None, 1.0])
def test_no_board_is_guessed(nvml: Nvml, name: Any) -> None:
    """V13: an ambiguous or absent name is refused with the boards there are, and NVML is let go (C38)."""
    with pytest.raises(VerificationInputError) as caught:
        NvidiaTelemetrySource(name)
    assert nvml.users == 0
    if isinstance(name, str) or name in (2, -1):
        assert not isinstance(name, bool)
        assert all(uuid in str(caught.value) for uuid in (A, B, SLICE))


def test_a_cuda_ordinal_is_found_by_its_pci_address(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """V13: CUDA's order is not NVML's: device 0 of the process is the board with its PCI address (C37)."""
    monkeypatch.setattr(nvidia, "pci_bus_id", {"cuda:0": "0000:01:00.0", "cuda": "0000:01:00.0"}.__getitem__)
    for name in ("cuda:0", "cuda"):
        with NvidiaTelemetrySource(name) as source:
            assert source.device == B


def test_without_a_cuda_device() -> None:
    """V13: a CUDA ordinal that cannot be used says which devices can; the CPU has no PCI address."""
    with pytest.raises(ContextError, match="available here are"):
        NvidiaTelemetrySource("cuda:7")
    with pytest.raises(ContextError, match="only a CUDA device"):
        pci_bus_id("cpu")


def test_without_a_driver() -> None:
    """V13: where NVML does not work its own error comes out."""
    with pytest.raises(pynvml.NVMLError):
        NvidiaTelemetrySource(0)
