"""What a rank's recent steps are made of.

Every measured step tells its times; they stand for the others (`engine/tap/sampling`). How much of
its computing hid communication is known of the steps whose collectives a rank has reported, and how
exposed communication divides into waiting and transferring of those that were compared: their share
stands for the others. Pure.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeVar

from nbdist.client.metrics.analysis.values import RECENT, ExplainedStep, RankStep
from nbdist.shared.wire import is_measured

_MS = 1e3
_Part = TypeVar("_Part")
_Recent = deque[tuple[int, _Part]]  # by step


class StepParts:
    """The recent steps of all ranks."""

    def __init__(self) -> None:
        self._steps: dict[int, _Recent[dict[str, float]]] = {}
        self._hidden: dict[int, _Recent[tuple[float, float]]] = {}  # of how much computing
        self._splits: dict[int, _Recent[tuple[float, float]]] = {}  # waiting of exposed
        self._waits: dict[int, _Recent[Mapping[int, float]]] = {}  # for whom, ms

    def add_step(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Take a step's record (`wire.Record`); of one that was not measured nothing is known."""
        if is_measured(values):
            self._steps.setdefault(rank, deque(maxlen=RECENT)).append((step, _parts(values)))
            if "comm_total_s" in values:
                hidden = _hidden_ms(values), values.get("compute_s", 0.0) * _MS
                self._hidden.setdefault(rank, deque(maxlen=RECENT)).append((step, hidden))

    def add_explained(self, step: ExplainedStep, waits: Mapping[int, Mapping[int, float]]) -> None:
        """Take a step whose exposed communication has been divided.

        Args:
            step: The step.
            waits: Rank to the ranks it waited for, with the milliseconds.
        """
        for rank, waiting_ms in step.waiting_ms.items():
            split = waiting_ms, waiting_ms + step.transfer_ms[rank]
            self._splits.setdefault(rank, deque(maxlen=RECENT)).append((step.step, split))
            waited = step.step, waits.get(rank, {})
            self._waits.setdefault(rank, deque(maxlen=RECENT)).append(waited)

    def means(self, behind: int = 0) -> tuple[RankStep, ...]:
        """Return each rank's recent steps, without those up to a step of the cell."""
        recent = {rank: _later(steps, behind) for rank, steps in sorted(self._steps.items())}
        return tuple(self._mean(rank, steps, behind) for rank, steps in recent.items() if steps)

    def _mean(self, rank: int, steps: list[dict[str, float]], behind: int) -> RankStep:
        known = [part for part in steps[0] if all(part in step for step in steps)]
        mean = {part: sum(step[part] for step in steps) / len(steps) for part in known}
        if "exposed" not in mean:
            return RankStep(rank, mean.pop("step"), mean)
        exposed_ms, step_ms = mean.pop("exposed"), mean.pop("step")
        # As long as nothing was compared, no rank is known to have been missing.
        waiting_ms = exposed_ms * _share(_later(self._splits.get(rank, ()), behind))
        hidden_ms = mean["compute"] * _share(_later(self._hidden.get(rank, ()), behind))
        parts = {
            "compute": mean["compute"] - hidden_ms,
            "hidden": hidden_ms,
            "transfer": exposed_ms - waiting_ms,
            "waiting": waiting_ms,
            "data": mean["data"],
            "optimizer": mean["optimizer"],
            "other": mean["other"],
        }
        return RankStep(rank, step_ms, parts, self._waited_for(rank, waiting_ms, behind))

    def _waited_for(self, rank: int, waiting_ms: float, behind: int) -> tuple[int, float] | None:
        total: dict[int, float] = {}
        for waits in _later(self._waits.get(rank, ()), behind):
            for peer, ms in waits.items():
                total[peer] = total.get(peer, 0.0) + ms
        if not total or not waiting_ms:
            return None
        peer = max(total, key=total.__getitem__)
        return peer, waiting_ms * total[peer] / sum(total.values())


def _later(recent: Iterable[tuple[int, _Part]], behind: int) -> list[_Part]:
    return [part for step, part in recent if step > behind]


def _parts(values: Mapping[str, float]) -> dict[str, float]:
    """Return one step in milliseconds; all but `exposed` and `step` sum to the rest of the step.

    Where communication was not measured there is no `exposed`, and `compute` holds it. Times that
    were measured apart may exceed the step by their error: then `other` is negative.
    """
    step, data, optimizer = (values.get(k, 0.0) for k in ("step_s", "data_s", "optimizer_s"))
    exposed = min(values.get("comm_s", 0.0), step)
    computed = values.get("compute_s", 0.0)
    measured = {"exposed": exposed * _MS} if "comm_s" in values else {}
    return {
        **measured,
        "step": step * _MS,
        "compute": computed * _MS,
        "data": data * _MS,
        "optimizer": optimizer * _MS,
        "other": (step - exposed - computed - data - optimizer) * _MS,
    }


def _hidden_ms(values: Mapping[str, float]) -> float:
    hidden_s = max(0.0, values["comm_total_s"] - values.get("comm_s", 0.0))
    return min(hidden_s, values.get("compute_s", 0.0)) * _MS


def _share(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the first numbers divided by that of the second."""
    pairs = list(pairs)
    total = sum(whole for _, whole in pairs)
    return sum(part for part, _ in pairs) / total if total else 0.0
