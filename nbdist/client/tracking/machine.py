"""Measure the machine a run trains on: processor, memory, disk, network, GPUs.

Once a host, whatever the number of its ranks, under the names of MLflow's own monitor
(`system/<host>/cpu_utilization_percentage`, mlflow/system_metrics), so that the UI's page of system
metrics shows them. Our own samples, for they travel through the spool: they keep their time, and
need no server. Ranks run on this host; another host's samples only need another name.

Threads: a `HostFacts` belongs to one thread, a run's own. A sample costs about a millisecond.
"""

import importlib
import logging
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

import psutil

from nbdist.client.tracking.names import metric_name
from nbdist.client.tracking.series import Point

PERIOD_S = 10.0  # as MLflow's own
_MB = 1e6

_log = logging.getLogger("nbdist.tracking")


class HostFacts:
    """This host, from when a run began."""

    def __init__(self) -> None:
        """Take the first readings of what only differences tell."""
        self.host = platform.node() or "localhost"
        self._samples = 0
        self._due_s = 0.0
        psutil.cpu_percent()  # the first answer says nothing: it is of no interval
        self._net = psutil.net_io_counters()
        self._gpus = _Gpus()

    def points(self, now_s: float, is_last: bool = False) -> list[Point]:
        """Return a sample when one is due at `now_s` (monotonic), else nothing.

        The first is due after a period; a run that ends before has one, of its end.
        """
        if not self._due_s:
            self._due_s = now_s + PERIOD_S
        if now_s < self._due_s and not (is_last and self._samples == 0):
            return []
        self._due_s = now_s + PERIOD_S
        self._samples += 1
        # MLflow counts its samples as steps, and draws them over time.
        return [Point(time.time_ns() // 1_000_000, self._samples - 1, self.sample())]

    def sample(self) -> dict[str, float]:
        """Return what is used now; processor and network since the last sample, and the begin."""
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / _MB,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / _MB,
            "disk_available_megabytes": disk.free / _MB,
        }
        net = psutil.net_io_counters()
        if net is not None and self._net is not None:  # no interface in a closed container
            received, sent = net.bytes_recv - self._net.bytes_recv, net.bytes_sent
            values["network_receive_megabytes"] = received / _MB
            values["network_transmit_megabytes"] = (sent - self._net.bytes_sent) / _MB
        return system_metrics(self.host, values | self._gpus.sample())


def system_metrics(host: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return a host's values under the names of MLflow's page of system metrics."""
    node = metric_name(host).replace("/", "_")
    return {f"system/{node}/{key}": round(float(value), 1) for key, value in values.items()}


class _Gpus:
    """The NVIDIA GPUs of this machine, where nvidia-ml-py is installed and finds a driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return  # an optional package
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except nvml.NVMLError as error:
            _log.info("GPUs are not measured: %s", error)
            return
        self._nvml = nvml

    def sample(self) -> dict[str, float]:
        """Return what each GPU uses; what a driver does not tell is left out."""
        values: dict[str, float] = {}
        for i, handle in enumerate(self._handles):
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                values[f"gpu_{i}_memory_usage_megabytes"] = memory.used / _MB
                values[f"gpu_{i}_memory_usage_percentage"] = 100 * memory.used / memory.total
                rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
                values[f"gpu_{i}_utilization_percentage"] = rates.gpu
                watts = self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000
                values[f"gpu_{i}_power_usage_watts"] = watts
            except self._nvml.NVMLError:
                continue  # such as power, of a slice of a GPU
        return values
