"""Let a rank's computation take the time that it takes on a virtual device. Main thread.

A mode of the dispatcher sees each operation of a cell, forward and backward, of a DTensor its local
part. Those that torch's table has floating-point operations for owe `flops / rate` seconds; what
all operations took here, and the time for which this thread had no core, is taken off, and the
rest is slept. So other ranks, links and autograd see a device of that rate. Work outside of
torch's operations, and waits, take the time that they take.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.dry.flops import Flops
from nbdist.engine.training.resources import Processor
from nbdist.shared import wire
from nbdist.shared.virtual import VirtualMachine
from nbdist.study.debt import Debt

_MOST_SLEEP_S = 0.05  # an exception that another thread sets is raised after it
_COLLECTIVES = ("c10d", "_c10d_functional")


class VirtualDevice(Component):
    """Slows the operations of cells.

    Args:
        machine: What the rank stands for; None leaves operations as they are.
        step: Returns the steps that the cell has made.
        report: Takes what a cell's operations owed and were late: `virtual_s`, `late_s`. The first
            step, in which much is made, does not count. None where nobody is told.
    """

    def __init__(
        self,
        machine: VirtualMachine | None,
        step: Callable[[], int],
        report: Callable[[dict[str, float]], None] | None,
    ) -> None:
        self._machine = machine
        self._step = step
        self._report = report
        self._mode: _Slowed | None = None
        self._around = ExitStack()

    def cell_began(self, start: wire.CellStart) -> None:
        """Slow this cell's operations from here on."""
        if self._machine is not None:
            self._mode = _Slowed(self._machine.flops_here, self._step)
            self._around.enter_context(self._mode)

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Slow nothing more, and report what could not be kept up with."""
        mode, self._mode = self._mode, None
        if mode is not None:
            self._around.close()
            mode.settle()
            debt = mode.debt
            if debt.virtual_s and self._report is not None:
                self._report({"virtual_s": debt.virtual_s, "late_s": debt.late_s})
        return ()


class _Slowed(Flops):
    """The mode of one cell: `debt` is what its operations owe."""

    def __init__(self, flops_per_s: float, step: Callable[[], int]) -> None:
        super().__init__()
        self.debt = Debt()
        self._step = step
        self._is_warm = False
        self._rate = flops_per_s
        self._processor = Processor()
        self._spent_ns = 0  # by operations that have not been charged yet
        self._has_computed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation, and sleep where it has been too fast."""
        if func.namespace in _COLLECTIVES:
            self.settle()
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self._processor.take()  # its waits are no computation
            return result
        before, began_ns = self.total, time.thread_time_ns()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented and (self._has_computed or self.total > before):
            if not self._has_computed:
                self._begin()
            self._spent_ns += time.thread_time_ns() - began_ns
            if self.total > before:
                self._sleep(self._charge(self.total - before))
        return result

    def _begin(self) -> None:
        """The first computation: what came before, as the making of a model, is not late."""
        self._has_computed = True
        self._processor.take()

    def settle(self) -> None:
        """Sleep what is owed, to the last."""
        if not self._has_computed:
            return
        if not self._is_warm and self._step():
            self._is_warm = True
            self.debt.begin_again()
        self._charge(0)
        self._sleep(self.debt.settle())

    def _charge(self, flops: int) -> float:
        spent_ns, self._spent_ns = self._spent_ns, 0
        starved_s = self._processor.take().get("starved_s", 0.0)
        return self.debt.charge(flops / self._rate, spent_ns / 1e9 + starved_s)

    def _sleep(self, seconds: float) -> None:
        began = time.perf_counter()
        while (left := seconds - (time.perf_counter() - began)) > 0:
            time.sleep(min(left, _MOST_SLEEP_S))
        if seconds:
            self.debt.slept(time.perf_counter() - began)
            self._processor.take()  # what it waited for a core to wake up is in that
