"""Read what a board shows from a cell's telemetry: numbers in, a `Scene` out; nothing is drawn.

Any thread may look: series are snapshots, and nothing of the telemetry is held.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from nbdist.client.board.scales import Floats
from nbdist.client.board.scene import ALL, Curve, Panel, Row, Scene, StepSplit
from nbdist.client.board.views import VIEWS
from nbdist.client.metrics.analysis.values import RECENT, Analysis
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.wire import STEP_KEYS

if TYPE_CHECKING:
    from nbdist.client.metrics.telemetry import Series, Telemetry

MOST_OWN = 2  # panels for numbers that the user logged
HISTORIES = {of for view in VIEWS.values() for of in view.HISTORIES}
MEANS = "step_s", "compute_s", "comm_s", "data_s", "optimizer_s", "samples", "tokens"


def look(
    telemetry: "Telemetry",
    info: CellInfo,
    analysis: Analysis | None = None,
    *,
    name: str | None = None,
) -> Scene:
    """Return what there is to see now.

    Args:
        telemetry: The cell's records.
        info: The cell.
        analysis: What is known beyond the records.
        name: The only one of `board.VIEWS` that will be drawn of it; any when None.
    """
    drawn = HISTORIES if name is None else VIEWS[name].HISTORIES
    latest = dict(telemetry.latest)  # one atomic copy: ranks are added on another thread
    own_keys = sorted({key for values in latest.values() for key in values} - STEP_KEYS)
    panels = _panels(telemetry, drawn, own_keys)
    means = {key: _means(telemetry, key) for key in MEANS}
    rows = tuple(_row(info, rank, latest.get(rank, {}), means, own_keys) for rank in info.ranks)
    total = _total(telemetry)
    last = max((row.step for row in rows), default=0)
    return Scene(
        panels=tuple(panels),
        split=_split(means),
        rows=rows,
        total=total if total >= last and total > 0 else None,
        paces=_panel(telemetry, "step_s", "step time", "ms", scale=1e3, floor=0.0)
        if "step_s" in drawn
        else None,
        analysis=analysis or Analysis(),
        norm=_norm(telemetry) if "norm" in drawn else None,
    )


def _total(telemetry: "Telemetry") -> int:
    """Return the steps the loop will make; 0 when the ranks do not know.

    A loader knows its own end. A loop that goes through it again has shown that this was not the
    loop's, and what it now says is as little to be relied on.
    """
    known = telemetry.series("total").values()
    if not known or any(s.values[0] != s.values[s.n - 1] for s in known if s.n):
        return 0
    return int(max((s.values[0] for s in known if s.n), default=0))


def _panels(telemetry: "Telemetry", drawn: Collection[str], own_keys: list[str]) -> list[Panel]:
    """Return the plots over the steps: those of `drawn` that there is anything of."""
    found = []
    if "loss" in drawn:
        found.append(_panel(telemetry, "loss", "loss"))
    if "comm_s" in drawn:
        found.append(_panel(telemetry, "comm_s", "communication", "ms", scale=1e3, floor=0.0))
    own = [_panel(telemetry, key, key) for key in own_keys] if "own" in drawn else []
    found += [p for p in own if p and max(len(line.x) for line in p.lines) > 1][:MOST_OWN]
    return [panel for panel in found if panel is not None]


def _panel(
    telemetry: "Telemetry",
    key: str,
    title: str,
    unit: str = "",
    scale: float = 1.0,
    floor: float | None = None,
) -> Panel | None:
    lines, by = [], "step"
    for rank, series in sorted(telemetry.series(key).items()):
        n = series.n
        if not n:
            continue
        # Slices: numpy must not hold the arrays themselves, or they could not grow.
        x = np.array(series.steps[:n], dtype=np.float64)
        y = np.array(series.values[:n], dtype=np.float64) * scale
        if n > 1 and x[-1] == x[0]:
            x, by = np.arange(1.0, n + 1), "record"  # logged without an optimizer
        lines.append(Curve(rank, x, y))
    return Panel(key, title, unit, tuple(lines), floor, by) if lines else None


def _norm(telemetry: "Telemetry") -> Panel | None:
    """Return the norm of the whole gradient, of steps that all ranks have told their share of."""
    shares = telemetry.series("grad_share")
    if not shares:
        return None
    steps: list[Floats] = []
    by_step: list[dict[float, float]] = []
    for series in shares.values():
        n = series.n
        by_step.append(dict(zip(series.steps[:n], series.values[:n], strict=True)))
        steps.append(np.array(series.steps[:n], dtype=np.float64))
    common = steps[0]
    for others in steps[1:]:
        common = np.intersect1d(common, others)
    if not len(common):
        return None
    squared = np.array([sum(told[step] for told in by_step) for step in common])
    norm = np.sqrt(np.where(squared >= 0, squared, np.nan))
    return Panel("grad_norm", "gradient norm, of all ranks", "", (Curve(ALL, common, norm),))


def recent_mean(series: "Series") -> float | None:
    """Return the mean of the last `RECENT` finite values, None when there is none.

    The first step of all is left out as soon as there is another: it opens connections and
    compiles, and would be most of a short training.
    """
    begin = max(series.n - RECENT, min(1, series.n - 1))
    tail = np.array(series.values[begin : series.n], dtype=np.float64)
    tail = tail[np.isfinite(tail)]
    return float(tail.mean()) if len(tail) else None


def _means(telemetry: "Telemetry", key: str) -> dict[int, float]:
    means = {rank: recent_mean(series) for rank, series in telemetry.series(key).items()}
    return {rank: mean for rank, mean in means.items() if mean is not None}


def _split(means: dict[str, dict[int, float]]) -> StepSplit | None:
    ranks = tuple(sorted(set(means["compute_s"]) | set(means["comm_s"])))
    if not ranks:
        return None

    def column(key: str) -> Floats:
        return np.array([max(0.0, means[key].get(rank, 0.0)) * 1e3 for rank in ranks])

    compute_ms, data_ms, optimizer_ms = map(column, ("compute_s", "data_s", "optimizer_s"))
    comm_ms = column("comm_s") if means["comm_s"] else None
    told_ms = compute_ms + data_ms + optimizer_ms + (0.0 if comm_ms is None else comm_ms)
    other_ms = np.maximum(0.0, column("step_s") - told_ms)
    return StepSplit(ranks, compute_ms, comm_ms, data_ms, optimizer_ms, other_ms)


def _row(
    info: CellInfo,
    rank: int,
    latest: Mapping[str, float],
    means: dict[str, dict[int, float]],
    own_keys: list[str],
) -> Row:
    step_s = means["step_s"].get(rank)

    def share(key: str) -> float | None:
        part_s = means[key].get(rank)
        return None if part_s is None or not step_s else min(100.0, 100.0 * part_s / step_s)

    def rate(key: str) -> float | None:
        each = means[key].get(rank)
        return each / step_s if each is not None and step_s else None

    return Row(
        rank=rank,
        device=_device(info, rank),
        step=int(latest.get("step", 0)),
        loss=latest.get("loss"),
        steps_per_s=1.0 / step_s if step_s else None,
        step_ms=step_s * 1e3 if step_s is not None else None,
        comm_pct=share("comm_s"),
        data_pct=share("data_s"),
        own={key: latest[key] for key in own_keys if key in latest},
        samples_per_s=rate("samples"),
        tokens_per_s=rate("tokens"),
        memory_bytes=latest.get("rss_bytes"),
        cuda_bytes=latest.get("cuda_bytes"),
        cuda_peak_bytes=latest.get("cuda_peak_bytes"),
    )


def _device(info: CellInfo, rank: int) -> str:
    """Return the device's name; `devices` goes with `ranks`, or holds the whole world's."""
    if len(info.devices) == len(info.ranks):
        return info.devices[info.ranks.index(rank)]
    return info.devices[rank] if rank < len(info.devices) else ""
