"""Read what a board shows from a cell's telemetry: numbers in, a `Scene` out; nothing is drawn.

Any thread may look: series are snapshots, and nothing of the telemetry is held.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nbdist.client.board.scales import Floats
from nbdist.client.board.scene import devices
from nbdist.client.board.scene.experts import experts_of
from nbdist.client.board.scene.part_history import parts_over_steps
from nbdist.client.board.scene.scene import ALL, Curve, Epoch, Panel, Row, Scene
from nbdist.client.board.scene.stages import pipeline_of
from nbdist.client.metrics.analysis.values import Analysis
from nbdist.client.metrics.left_out import left_out_steps
from nbdist.client.metrics.recent import RecentSteps, losses, percent, recent_steps
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.shared.wire import DEVICE_KEYS, LEFT_OUT, STEP_KEYS

if TYPE_CHECKING:
    from nbdist.client.metrics.telemetry import Series, Telemetry

MOST_OWN = 2  # panels for numbers that the user logged


def look(
    telemetry: "Telemetry",
    info: CellInfo,
    analysis: Analysis | None = None,
    *,
    histories: bool = True,
) -> Scene:
    """Return what there is to see now.

    Args:
        telemetry: The cell's records.
        info: The cell.
        analysis: What is known beyond the records.
        histories: Read the lines, too: they are the dear part, and a page has them already.
    """
    latest = dict(telemetry.latest)  # one atomic copy: ranks are added on another thread
    keys = {key for values in latest.values() for key in values}
    own_keys = sorted(keys - STEP_KEYS - DEVICE_KEYS - {"log.loss"})
    recent = recent_steps(telemetry.series)
    told = losses(telemetry.series)
    rows = tuple(
        _row(info, rank, latest.get(rank, {}), recent.get(rank), told.get(rank), own_keys)
        for rank in info.ranks
    )
    return Scene(
        panels=tuple(_panels(telemetry, own_keys)) if histories else (),
        recent=recent,
        rows=rows,
        epoch=_epoch(latest),
        paces=_panel(telemetry.series("step_s"), "step_s", "step time", "ms", scale=1e3, floor=0.0)
        if histories
        else None,
        analysis=analysis or Analysis(),
        norm=_norm(telemetry) if histories else None,
        devices=_devices(telemetry, latest) if histories else (),
        gpu_unknown=next(
            (
                facts["gpu_unknown"]
                for facts in list(telemetry.facts.values())
                if "gpu_unknown" in facts
            ),
            "",
        ),
        emulated=telemetry.machine,
        marks=_marks(telemetry),
        experts=experts_of(dict(telemetry.experts)),
        pipeline=pipeline_of(dict(telemetry.stages)) if histories else None,
        history=parts_over_steps(telemetry.series) if histories else (),
        idle_s=time.monotonic() - telemetry.trained_s if telemetry.trained_s else 0.0,
    )


def _marks(telemetry: "Telemetry") -> tuple[tuple[int, str], ...]:
    """Return what was changed by hand and which steps were left out, in the order of the steps."""
    changed = [(c.step, f"{c.name} {c.old} -> {c.new}") for c in telemetry.changes]
    left_out = [(step, "left out") for step in left_out_steps(telemetry.series(LEFT_OUT))]
    return tuple(sorted([*changed, *left_out], key=lambda mark: mark[0]))


def _epoch(latest: Mapping[int, Mapping[str, float]]) -> Epoch | None:
    """Return how far the rank furthest behind is in the pass that runs; None outside of one."""
    known = [values for values in latest.values() if "total" in values]
    if not known:
        return None
    behind = min(known, key=lambda values: values.get("step", 0.0))
    began = int(behind.get("epoch_began", 0))
    done, steps = int(behind.get("step", 0.0)) - began, int(behind["total"]) - began
    return Epoch(done, steps) if 0 < done <= steps else None


def _panels(telemetry: "Telemetry", own_keys: list[str]) -> list[Panel]:
    """Return the plots over the steps that there is anything of."""
    comm = telemetry.series("comm_s")
    found = [
        _panel(losses(telemetry.series), "loss", "loss"),
        _panel(comm, "comm_s", "communication", "ms", scale=1e3, floor=0.0),
    ]
    own = [_panel(telemetry.series(key), key, key) for key in own_keys]
    found += [p for p in own if p and max(len(line.x) for line in p.lines) > 1][:MOST_OWN]
    return [panel for panel in found if panel is not None]


def _panel(
    by_rank: "Mapping[int, Series]",
    key: str,
    title: str,
    unit: str = "",
    scale: float = 1.0,
    floor: float | None = None,
) -> Panel | None:
    lines, by = [], "step"
    for rank, series in sorted(by_rank.items()):
        n = series.n
        if not n:
            continue
        # Slices: numpy must not hold the arrays themselves, or they could not grow.
        x = np.array(series.steps[:n], dtype=np.float64)
        y = np.array(series.values[:n], dtype=np.float64) * scale
        if n > 1 and x[-1] == x[0]:
            x, by = np.arange(1.0, n + 1), "record"  # logged without an optimizer
        lines.append(Curve(rank, x, y, series.seen if series.seen > n else 0))
    return Panel(key, title, unit, tuple(lines), floor, by) if lines else None


def _norm(telemetry: "Telemetry") -> Panel | None:
    """Return the norm of the whole gradient, of steps whose shares all ranks have reported."""
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
    squared = np.array([sum(of_rank[step] for of_rank in by_step) for step in common])
    norm = np.sqrt(np.where(squared >= 0, squared, np.nan))
    of = max(series.seen if series.seen > series.n else 0 for series in shares.values())
    line = Curve(ALL, common, norm, of)
    return Panel("grad_norm", "gradient norm, of all ranks", "", (line,))


def _devices(
    telemetry: "Telemetry", latest: Mapping[int, Mapping[str, float]]
) -> tuple[Panel, ...]:
    totals = [values.get("device_total_bytes", 0.0) for values in latest.values()]
    return devices.panels(telemetry.series, max(totals, default=0.0))


def _row(
    info: CellInfo,
    rank: int,
    latest: Mapping[str, float],
    steps: RecentSteps | None,
    told: "Series | None",
    own_keys: list[str],
) -> Row:
    def share(part: str) -> float | None:
        known = steps is not None and part in steps.parts
        return percent([steps.parts[part]], [steps.step_ms]) if steps and known else None

    per_s = steps.per_s if steps is not None else {}
    even = latest.get("expert_even")
    return Row(
        rank=rank,
        device=_device(info, rank),
        step=int(latest.get("step", 0)),
        loss=told.values[told.n - 1] if told is not None and told.n else None,
        steps_per_s=1e3 / steps.step_ms if steps is not None else None,
        step_ms=steps.step_ms if steps is not None else None,
        comm_pct=share("comm"),
        data_pct=share("data"),
        own={key: latest[key] for key in own_keys if key in latest},
        samples_per_s=per_s.get("samples"),
        tokens_per_s=per_s.get("tokens"),
        memory_bytes=latest.get("rss_bytes"),
        cuda_bytes=latest.get("cuda_bytes"),
        cuda_peak_bytes=latest.get("cuda_peak_bytes"),
        cuda_reserved_bytes=latest.get("cuda_reserved_bytes"),
        expert_tokens=latest.get("expert_tokens"),
        expert_load=latest["expert_tokens"] / even if even else None,
        of_device={key: latest[key] for key in DEVICE_KEYS & latest.keys()},
    )


def _device(info: CellInfo, rank: int) -> str:
    """Return the device's name; `devices` goes with `ranks`, or holds the whole world's."""
    if len(info.devices) == len(info.ranks):
        return info.devices[info.ranks.index(rank)]
    return info.devices[rank] if rank < len(info.devices) else ""
