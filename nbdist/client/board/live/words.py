"""What the page shows beside its lines, as JSON: sentences, tables, a step's parts, the time line.

Of a cell that runs it is worked out about once a second; of one that has ended, once. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.client.board import palette, sentences, verdict_block
from nbdist.client.board.scene.devices import QUANTITIES
from nbdist.client.board.scene.lanes import telling_lanes
from nbdist.client.board.views import VIEWS
from nbdist.client.metrics.analysis.values import PARTS, TimeLine, TimelineLane

if TYPE_CHECKING:
    from nbdist.client.board.scene.scene import Scene, Stack

_DIGITS = 4  # behind the point of a millisecond: a time line has thousands of moments


def frame_of(ranks: tuple[int, ...], theme: palette.Theme, view: str) -> dict[str, Any]:
    """Return what does not change while a board is shown: its ranks, views and colours."""
    styles = [palette.line_style(place) for place in range(len(ranks))]
    return {
        "ranks": list(ranks),
        "styles": [[color, list(dashes)] for color, dashes in styles],
        "parts": [[name, *palette.PARTS[name], palette.part_label(name)] for name in _ORDER],
        "rows": list(palette.LINE_COLORS),
        "views": [[view.NAME, view.HELP] for view in VIEWS.values()],
        "view": view,
        "lost": None,  # why no points are fetched for a zoom: here they are
        "text": None if theme.background is None else theme.text,
        "background": theme.background,
        "titles": {f"device.{key}": of.title for key, of in QUANTITIES.items()},
        "bytes": [f"device.{key}" for key in QUANTITIES if key.endswith("_bytes")],
    }


_ORDER = (*PARTS[:2], "compute and communication", "communication", *PARTS[2:])


def words_of(scene: "Scene", progress: str) -> dict[str, Any]:
    """Return what there is to say of a scene.

    Args:
        scene: It needs no panels.
        progress: The line above all.
    """
    verdicts = scene.analysis.verdicts
    return {
        "progress": progress,
        "epoch": [scene.epoch.done, scene.epoch.steps] if scene.epoch is not None else None,
        "step": scene.first_step,
        "outcome": scene.outcome,
        "stands_still": scene.outcome is None and scene.stands_still,
        "paused": scene.is_paused,
        "verdicts": verdict_block.to_html(verdicts),
        "no_verdict": " ".join(sentences.verdicts(scene)),
        "sentences": {name: view.sentence(scene) for name, view in VIEWS.items()},
        "tables": _tables(scene),
        "stack": _stack(scene.stack),
        "own": _own(scene),
        "links": _links(scene),
        "experts": _experts(scene),
        "line": _line(scene),
        "marks": [list(mark) for mark in scene.marks],
    }


def _tables(scene: "Scene") -> dict[str, Any]:
    """Return the tables of all views but the loss, which the page reads off its lines."""
    tables = {name: view.table(scene) for name, view in VIEWS.items() if name != "loss"}
    return {
        name: [table.caption, list(table.head), [list(row) for row in table.rows],
               list(table.to_the_right)]
        for name, table in tables.items() if table.rows
    }  # fmt: skip


def _stack(stack: "Stack | None") -> dict[str, Any] | None:
    if stack is None:
        return None
    return {
        "ranks": list(stack.ranks),
        "parts": {name: _rounded(part.tolist()) for name, part in stack.parts.items()},
        "waits": {rank: [peer, round(ms, _DIGITS)] for rank, (peer, ms) in stack.waits_for.items()},
    }


def _own(scene: "Scene") -> list[list[Any]]:
    """Return each rank's own work, milliseconds, and its verdict where it has one."""
    stack = scene.stack
    if stack is None or not scene.is_timed:
        return []
    said = {v.rank: v.sentence for v in scene.analysis.verdicts if v.cause != "link"}
    own_ms = _rounded(scene.own_work_ms(stack).tolist())
    return [[rank, ms, said.get(rank, "")] for rank, ms in zip(stack.ranks, own_ms, strict=True)]


def _links(scene: "Scene") -> list[list[Any]]:
    """Return links by who sends and who receives: bytes per second, where one is to blame."""
    if not any(verdict.cause == "link" for verdict in scene.analysis.verdicts):
        return []
    links: Mapping[int, Mapping[int, float]] = scene.analysis.links
    return [
        [source, target, round(rate)]
        for source, targets in sorted(links.items())
        for target, rate in sorted(targets.items())
        if rate > 0
    ]


def _experts(scene: "Scene") -> dict[str, Any] | None:
    """Return the tokens of each rank's experts, a row for each mixture; null: not known."""
    experts = scene.experts
    if experts is None:
        return None
    rows = [
        [name, [None if value != value else value for value in tokens.tolist()]]
        for name, tokens in experts.shown.items()
    ]
    return {"title": experts.title, "of": [list(of) for of in experts.of], "rows": rows}


def _line(scene: "Scene") -> dict[str, Any] | None:
    """Return the time line, with the lanes that tell most."""
    line = scene.analysis.line
    if line is None:
        return None
    return line_words(line, telling_lanes(scene), scene.analysis.clock_error_ms)


def line_words(
    line: TimeLine, lanes: Sequence[TimelineLane], clock_error_ms: float
) -> dict[str, Any]:
    """Return a time line with these of its lanes."""
    return {
        "length": round(line.length_ms, _DIGITS),
        "steps": [[step, round(a, _DIGITS), round(b, _DIGITS)] for step, a, b in line.steps],
        "lanes": [
            {
                "rank": lane.rank,
                "spans": [
                    [s.row, *_rounded([s.launch_ms, s.begin_ms, s.end_ms]),
                     None if s.arrived_ms is None else round(s.arrived_ms, _DIGITS)]
                    for s in lane.spans
                ],
                "blocked": [_rounded(list(blocked)) for blocked in lane.blocked],
            }
            for lane in lanes
        ],
        "left_out": len(line.lanes) - len(lanes),
        "error": round(clock_error_ms, _DIGITS),
    }  # fmt: skip


def _rounded(values: list[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]
