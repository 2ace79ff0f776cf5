"""What a rank's recent steps are made of.

Every step tells its times; how its exposed communication divides into waiting and transferring is
known of the steps whose collectives were compared. Pure.
"""

from collections import deque
from collections.abc import Mapping

from nbdist.client.insight.values import RECENT, ExplainedStep, RankStep

_MS = 1e3


class Parts:
    """The recent steps of all ranks."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[dict[str, float]]] = {}
        self._splits: dict[int, deque[tuple[float, float]]] = {}  # waiting, transfer
        self._waits: dict[int, deque[Mapping[int, float]]] = {}  # for whom, ms

    def add_step(self, rank: int, values: Mapping[str, float]) -> None:
        """Take a step's record (`wire.Record`); one without `step_s` was not seen whole."""
        if "step_s" in values:
            recent = self._steps.setdefault(rank, deque(maxlen=RECENT))
            recent.append(_parts(values))

    def add_explained(self, step: ExplainedStep, waits: Mapping[int, Mapping[int, float]]) -> None:
        """Take a step whose exposed communication has been divided.

        Args:
            step: The step.
            waits: Rank to the ranks it waited for, with the milliseconds.
        """
        for rank, waiting_ms in step.waiting_ms.items():
            split = waiting_ms, step.transfer_ms[rank]
            self._splits.setdefault(rank, deque(maxlen=RECENT)).append(split)
            self._waits.setdefault(rank, deque(maxlen=RECENT)).append(waits.get(rank, {}))

    def means(self) -> tuple[RankStep, ...]:
        """Return each rank's recent steps."""
        return tuple(self._mean(rank, self._steps[rank]) for rank in sorted(self._steps))

    def _mean(self, rank: int, steps: deque[dict[str, float]]) -> RankStep:
        mean = {part: sum(step[part] for step in steps) / len(steps) for part in steps[0]}
        exposed_ms, step_ms = mean.pop("exposed"), mean.pop("step")
        splits = self._splits.get(rank, ())
        waiting, both = sum(w for w, _ in splits), sum(w + t for w, t in splits)
        # As long as nothing was compared, nobody is known to have been missing.
        waiting_ms = exposed_ms * waiting / both if both else 0.0
        parts = {
            "compute": mean["compute"],
            "hidden": mean["hidden"],
            "transfer": exposed_ms - waiting_ms,
            "waiting": waiting_ms,
            "data": mean["data"],
            "optimizer": mean["optimizer"],
            "other": mean["other"],
        }
        return RankStep(rank, step_ms, parts, self._waited_for(rank, waiting_ms))

    def _waited_for(self, rank: int, waiting_ms: float) -> tuple[int, float] | None:
        total: dict[int, float] = {}
        for waits in self._waits.get(rank, ()):
            for peer, ms in waits.items():
                total[peer] = total.get(peer, 0.0) + ms
        if not total or not waiting_ms:
            return None
        peer = max(total, key=total.__getitem__)
        return peer, waiting_ms * total[peer] / sum(total.values())


def _parts(values: Mapping[str, float]) -> dict[str, float]:
    """Return one step in milliseconds; all but `exposed` and `step` sum to the rest of the step.

    Times that were measured apart may exceed the step by their error: then the rest is less.
    """
    step, data, optimizer = (values.get(k, 0.0) for k in ("step_s", "data_s", "optimizer_s"))
    exposed = min(values.get("comm_s", 0.0), step)
    computed = values.get("compute_s", 0.0)
    hidden = min(max(0.0, values.get("comm_total_s", 0.0) - exposed), computed)
    return {
        "step": step * _MS,
        "exposed": exposed * _MS,
        "compute": (computed - hidden) * _MS,
        "hidden": hidden * _MS,
        "data": data * _MS,
        "optimizer": optimizer * _MS,
        "other": (step - exposed - computed - data - optimizer) * _MS,
    }
