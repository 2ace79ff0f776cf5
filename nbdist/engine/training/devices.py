"""Report the state of a rank's process and GPU each second while a cell runs.

For the process: processor time and resident memory. For a GPU, as `nvidia-smi` shows them:
use, memory, temperature and power. They come from NVML, the driver's library, which needs
`nvidia-ml-py`; torch's allocator gives this process's part. Neither makes a CUDA call, waits
for a kernel or disturbs the capture of a graph.

Records of kind "device" hold the values; their names are in `wire.Record`.

Threads: `sample` runs on the thread that publishes records, so that no step waits for an answer;
`cell_began` and `cell_ended` on the main one.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.training.resources import resident_bytes
from nbdist.shared.wire import CellStart

INTERVAL_S = 1.0
MOST_COST = 1e-3  # of a core's time

# The functions of `torch.cuda`, by a record's name, with a factor.
_QUESTIONS = {
    "device_pct": ("utilization", 1.0),
    "device_bytes": ("device_memory_used", 1.0),
    "device_c": ("temperature", 1.0),
    "device_w": ("power_draw", 1e-3),
}
# Statistics of torch's allocator in this process, by its own names.
_ALLOCATED = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_bytes": "allocated_bytes.all.peak",
}
_WORDS = {
    "device_pct": "use",
    "device_bytes": "memory of all programs",
    "device_c": "temperature",
    "device_w": "power",
}


class Gpu:
    """The GPU of this rank.

    Args:
        device: With its index: the current one differs by thread.
        cuda: Queries NVML; `torch.cuda` except in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._questions = dict(_QUESTIONS)
        self._unknown: dict[str, str] = {}  # the reason, by the names of values

    def read(self) -> dict[str, float]:
        """Return the GPU's present state; {} before this process uses it. Any thread.

        A value that failed once is not read again: `unknown` reports it.
        """
        values = self.memory()
        if values:
            for key in self._questions.keys() - values.keys():
                values |= self._asked(key)
        return values

    def memory(self) -> dict[str, float]:
        """Return only its memory: torch's here, that of all programs, and the total.

        {} before this process uses it. Any thread.
        """
        if not self._cuda.is_initialized():
            return {}
        stats = self._cuda.memory_stats(self._device)
        values = {name: float(stats[key]) for name, key in _ALLOCATED.items() if key in stats}
        total = self._cuda.get_device_properties(self._device).total_memory
        return values | self._asked("device_bytes") | {"device_total_bytes": float(total)}

    def _asked(self, key: str) -> dict[str, float]:
        """Return one value of NVML; nothing if it is not known."""
        if (question := self._questions.get(key)) is None:
            return {}
        name, factor = question
        try:
            return {key: factor * float(getattr(self._cuda, name)(self._device))}
        except Exception as error:
            self._questions.pop(key, None)
            self._unknown[key] = _reason(error)
            return {}

    @property
    def unknown(self) -> str:
        """The values of the GPU that are not known, and why, in a sentence; empty if none."""
        if not self._unknown:
            return ""
        *most, last = (_WORDS[key] for key in _WORDS if key in self._unknown)
        what = f"{', '.join(most)} and {last} are" if most else f"{last} is"
        return f"GPU {what} not known: {next(iter(self._unknown.values()))}."


class DeviceStats(Component):
    """Reports this rank's process and GPU.

    Args:
        report: Called with the values of a record.
        say: Called with a sentence about values that are not known, when they change.
        gpu: None on a rank without one.
    """

    def __init__(
        self,
        report: Callable[[dict[str, float]], None],
        say: Callable[[str], None],
        gpu: Gpu | None = None,
    ) -> None:
        self._report, self._say, self._gpu = report, say, gpu
        self._said = ""
        self._next_s = math.inf
        self._before_s = self._before_cpu_s = 0.0

    def cell_began(self, start: CellStart) -> None:
        """The first record is due in a second: a cell that is shorter has none."""
        self._before_cpu_s = time.process_time()
        self._before_s = time.monotonic()
        self._next_s = self._before_s + INTERVAL_S

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Stop reporting."""
        self._next_s = math.inf
        return ()

    def sample(self) -> None:
        """Make a record, when it is time."""
        now_s, began_s = time.monotonic(), time.thread_time()
        if now_s < self._next_s:
            return
        cpu_s = time.process_time()
        values = {
            "cpu_pct": 100 * (cpu_s - self._before_cpu_s) / (now_s - self._before_s),
            "resident_bytes": float(resident_bytes()),
        }
        self._before_s, self._before_cpu_s = now_s, cpu_s
        if self._gpu is not None:
            values |= self._gpu.read()
            if (unknown := self._gpu.unknown) != self._said:
                self._said = unknown
                self._say(unknown)
        self._report(values)
        if self._next_s < math.inf:  # the cell may have ended meanwhile
            spent_s = time.thread_time() - began_s
            self._next_s = now_s + max(INTERVAL_S, spent_s / MOST_COST)


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "nvidia-ml-py is not installed"
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
