"""What a rank owes its virtual device, and how it is counted."""

from types import SimpleNamespace

import pytest
import torch

from nbdist.engine.component import EndedCell
from nbdist.engine.rank import virtual_device
from nbdist.engine.rank.virtual_device import VirtualDevice
from nbdist.shared.virtual import VirtualMachine
from nbdist.shared.wire import CellStart

LATE_S = 0.02  # to wake up, for want of a core


class Clock:
    """A clock, and the wait for a core that the system has counted since it was last taken."""

    def __init__(self) -> None:
        self.now_s = self.starved_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + LATE_S
        self.starved_s += LATE_S

    def take(self) -> dict[str, float]:
        starved_s, self.starved_s = self.starved_s, 0.0
        return {"starved_s": starved_s}


def test_a_sleep_that_ends_late_for_want_of_a_core_is_late_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told = Clock(), list[dict[str, float]]()
    fake = SimpleNamespace(
        perf_counter=lambda: clock.now_s, sleep=clock.sleep, thread_time_ns=lambda: 0
    )
    monkeypatch.setattr(virtual_device, "time", fake)
    monkeypatch.setattr(virtual_device, "Processor", lambda: clock)
    a, operation_s = torch.ones(64, 64), 5e-3
    device = VirtualDevice(VirtualMachine(2 * 64**3 / operation_s, 1e6), lambda: 0, told.append)
    device.cell_began(CellStart(1, (0,), 1))
    for _ in range(2):
        a @ a
    assert list(device.cell_ended(EndedCell(1, "", has_succeeded=True))) == []
    (found,) = told
    assert found["virtual_s"] == pytest.approx(2 * operation_s)
    assert found["late_s"] == pytest.approx(LATE_S - operation_s)
