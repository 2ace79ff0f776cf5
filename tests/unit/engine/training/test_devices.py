"""What a rank tells of its process and its GPU, the GPU made up."""

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.engine.component import EndedCell
from nbdist.engine.training import devices
from nbdist.engine.training.devices import DeviceStats, Gpu
from nbdist.shared.wire import DEVICE_KEYS, CellStart

GB = 10**9
DEVICE = torch.device("cuda", 1)
ALLOCATED = {
    "allocated_bytes": 20.0 * GB,
    "reserved_bytes": 28.0 * GB,
    "peak_bytes": 25.0 * GB,
    "device_total_bytes": 80.0 * GB,
}


class FakeCuda:
    """`torch.cuda` of a process with two GPUs; `failures` are raised by the functions named."""

    def __init__(self, **failures: Exception) -> None:
        self.failures, self.calls = failures, 0

    def is_initialized(self) -> bool:
        return True

    def utilization(self, device: torch.device) -> int:
        return int(self._told("utilization", device, 97))

    def device_memory_used(self, device: torch.device) -> int:
        return int(self._told("device_memory_used", device, 31 * GB))

    def temperature(self, device: torch.device) -> int:
        return int(self._told("temperature", device, 64))

    def power_draw(self, device: torch.device) -> int:
        return int(self._told("power_draw", device, 412_500))  # mW, as NVML has it

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == DEVICE
        now = {"allocated_bytes.all.current": 20 * GB, "allocated_bytes.all.peak": 25 * GB}
        return now | {"reserved_bytes.all.current": 28 * GB, "num_ooms": 0}

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=80 * GB)

    def _told(self, name: str, device: torch.device, value: int) -> int:
        assert device == DEVICE
        self.calls += 1
        if name in self.failures:
            raise self.failures[name]
        return value


class Clock:
    """The clocks of `time` that the module reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.cpu_s = self.thread_s = 100.0
        told = SimpleNamespace(
            monotonic=lambda: self.now_s,
            process_time=lambda: self.cpu_s,
            thread_time=lambda: self.thread_s,
        )
        monkeypatch.setattr(devices, "time", told)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_gpu_tells_use_memory_temperature_and_watts() -> None:
    gpu = Gpu(DEVICE, FakeCuda())

    assert gpu.read() == {
        "device_pct": 97.0,
        "device_bytes": 31.0 * GB,
        "device_c": 64.0,
        "device_w": 412.5,
        **ALLOCATED,
    }
    assert gpu.read().keys() <= DEVICE_KEYS
    assert gpu.memory() == {"device_bytes": 31.0 * GB, **ALLOCATED}
    assert gpu.unknown == ""


def test_without_nvml_the_allocators_memory_is_told_and_nothing_is_asked_again() -> None:
    missing = ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
    names = ("utilization", "device_memory_used", "temperature", "power_draw")
    cuda = FakeCuda(**dict.fromkeys(names, missing))
    gpu = Gpu(DEVICE, cuda)

    values = [gpu.read(), gpu.read()]

    assert values == [ALLOCATED] * 2
    assert cuda.calls == len(names)
    assert gpu.unknown == (
        "GPU use, memory of all programs, temperature and power are not known: "
        "nvidia-ml-py is not installed."
    )


def test_what_one_kind_of_gpu_does_not_tell_leaves_the_rest() -> None:
    gpu = Gpu(DEVICE, FakeCuda(temperature=RuntimeError("Not Supported")))

    assert gpu.read().keys() == {"device_pct", "device_bytes", "device_w", *ALLOCATED}
    assert gpu.unknown == "GPU temperature is not known: Not Supported."


def test_a_gpu_that_this_process_does_not_use_yet_is_not_asked() -> None:
    cuda = FakeCuda()
    cuda.is_initialized = lambda: False  # type: ignore[method-assign]

    assert Gpu(DEVICE, cuda).read() == Gpu(DEVICE, cuda).memory() == {}
    assert cuda.calls == 0


def test_a_processor_share_is_of_one_core_and_since_the_record_before(clock: Clock) -> None:
    told: list[dict[str, float]] = []
    stats = DeviceStats(told.append, lambda said: None)
    stats.cell_began(CellStart(1, (0,), 1))
    clock.now_s, clock.cpu_s = 101.0, 102.5
    stats.sample()
    clock.now_s, clock.cpu_s = 103.0, 103.0
    stats.sample()

    assert [values["cpu_pct"] for values in told] == [pytest.approx(250), pytest.approx(25)]
    assert all(values["resident_bytes"] > 1e6 for values in told)
    assert all(values.keys() <= DEVICE_KEYS for values in told)


def test_records_are_a_second_apart_and_end_with_the_cell(clock: Clock) -> None:
    told: list[dict[str, float]] = []
    stats = DeviceStats(told.append, lambda said: None)
    stats.sample()  # no cell
    stats.cell_began(CellStart(1, (0,), 1))
    for tenth in range(35):
        clock.now_s = 100 + tenth / 10
        stats.sample()
    stats.cell_ended(EndedCell(1, "", has_succeeded=True))
    clock.now_s = 200.0
    stats.sample()

    assert len(told) == 3


def test_a_driver_that_answers_slowly_is_asked_less_often(clock: Clock) -> None:
    told: list[dict[str, float]] = []

    def tell(values: dict[str, float]) -> None:
        clock.thread_s += 0.005
        told.append(values)

    stats = DeviceStats(tell, lambda said: None)
    stats.cell_began(CellStart(1, (0,), 1))
    for second in range(1, 12):
        clock.now_s = 100.0 + second
        stats.sample()

    assert len(told) == 3  # a thousandth of a core: 5 ms each 5 s


def test_what_is_not_known_is_said_once(clock: Clock) -> None:
    said: list[str] = []
    gpu = Gpu(DEVICE, FakeCuda(utilization=RuntimeError("Not Supported")))
    stats = DeviceStats(lambda values: None, said.append, gpu)
    stats.cell_began(CellStart(1, (0,), 1))
    for second in range(1, 4):
        clock.now_s = 100.0 + second
        stats.sample()

    assert said == ["GPU use is not known: Not Supported."]


def test_torch_has_all_that_is_asked() -> None:
    asked = {name for name, _ in devices._QUESTIONS.values()}

    assert all(callable(getattr(torch.cuda, name)) for name in asked)


@pytest.mark.gpu
def test_a_real_gpu_tells_what_it_has() -> None:
    torch.ones(1 << 20, device="cuda").sum().item()
    gpu = Gpu(torch.device("cuda", 0))
    deadline_s = time.monotonic() + 5
    while (values := gpu.read()) and time.monotonic() < deadline_s:
        torch.ones(1 << 20, device="cuda").sum().item()

    assert values["device_total_bytes"] > GB
    assert 0 < values["allocated_bytes"] <= values["peak_bytes"]
    assert values["allocated_bytes"] <= values["reserved_bytes"] < values["device_total_bytes"]
    if not gpu.unknown:
        assert 0 <= values["device_pct"] <= 100
        assert 0 < values["device_bytes"] <= values["device_total_bytes"]
        assert 10 < values["device_c"] < 110
        assert 0 < values["device_w"] < 2000
    assert all(math.isfinite(value) for value in values.values())
