"""The figures of the interactive board, drawn by plotly from a `Scene`; as plain data of JSON.

They show the scene's values, where the pictures show running means. The one module that
imports plotly.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go

from nbdist.client.board import palette
from nbdist.client.board.lanes import phases, telling_lanes, tracks
from nbdist.client.board.measures import WIDE
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import (
    Floats,
    bulk_limits,
    decimate,
    extent,
    mean_over_ranks,
    padded,
    smooth,
    smoothing_window,
)
from nbdist.client.board.scene import Curve, Panel, Scene
from nbdist.client.metrics.analysis.values import CollectiveRow
from nbdist.shared.text import name_bytes

MOST_POINTS = 2000  # of a line
MOST_BARS = 2000  # collectives in the time line
HOVER = "%{y:.4g}"
LEAST_PX = 320  # a figure's height
BAR = 0.62  # the height of a lane's bars, of 1
# Words over a plot are read on a ground of their own, the same in both themes.
_INK, _PAPER = "#222222", "#f2f2f2"
_CONFIG = {
    "displaylogo": False,
    "scrollZoom": True,
    # A button of plotly's sends the figure to a server; the other two are of no use here.
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d"],
    "plotlyServerURL": "",
}
_PHASES = {"queueing": 0.0, "waiting": 0.3, "transferring": 1.0}  # how solid


def figure_of(name: str, scene: Scene, theme: Theme, height: int) -> dict[str, Any] | None:
    """Return a view's figure, in the form of plotly's MIME type; None where there is nothing.

    Args:
        name: One of `interactive.VIEWS`.
        scene: What is shown.
        theme: Colours of text and background.
        height: In CSS pixels.
    """
    figure = _FIGURES[name](scene, theme)
    if figure is None:
        return None
    # Of both sizes: plotly's extension measures a figure again 100 ms after it is drawn, with the
    # picture still above it, and a drag that has begun by then is lost.
    figure.update_layout(width=WIDE, height=max(LEAST_PX, height))
    content: dict[str, Any] = json.loads(figure.to_json())
    content["config"] = _CONFIG
    return content


def loss_figure(scene: Scene, theme: Theme) -> Any:
    """Return each rank's loss, the mean of all and their spread; None where there is no loss."""
    panel = next((panel for panel in scene.panels if panel.key == "loss"), None)
    if panel is None:
        return None
    figure = _figure(theme, "loss", panel.by)
    figure.update_layout(hovermode="x unified")
    lines = [(line.x, line.y) for line in panel.lines]
    if len(lines) > 1:
        _add_spread(figure, lines, theme)
    for line in panel.lines:
        x, y = _few(line)
        color, dashes = palette.line_style(scene.ranks.index(line.rank))
        figure.add_scatter(
            x=x, y=y, name=f"rank {line.rank}", mode=_mode(x), hovertemplate=HOVER,
            line={"color": color, "width": 1.5, "dash": _dash(dashes)},
            visible=True if len(lines) <= palette.MANY else "legendonly",
        )  # fmt: skip
    if len(lines) > 1:
        x, mean = mean_over_ranks(lines)
        window = smoothing_window(len(mean))
        name = "mean of all" + (f" over {window} {panel.by}s" if window > 1 else "")
        x, mean = _few(Curve(0, x, smooth(mean, window)))
        figure.add_scatter(
            x=x, y=mean, name=name, mode=_mode(x), hovertemplate=HOVER,
            line={"color": theme.text, "width": 3},
        )  # fmt: skip
    _add_scales(figure, [y for _, y in lines], None)
    return figure


def parts_figure(scene: Scene, theme: Theme) -> Any:
    """Return the parts of a step over the steps, stacked; None where none was measured."""
    if not scene.history:
        return None
    figure = _figure(theme, "ms per step", "step, of those that were measured")
    figure.update_layout(hovermode="x unified", legend_traceorder="normal")
    ranks = [line.rank for line in scene.history[0].lines]
    shown: list[int | None] = [None, *ranks] if len(ranks) > 1 else [ranks[0]]
    for rank in shown:
        for panel in scene.history:
            color, hatch = palette.PARTS[panel.key]
            y = _of_rank(panel, rank)
            figure.add_scatter(
                x=_light(panel.lines[0].x), y=_light(y), name=panel.title, legendgroup=panel.key,
                stackgroup=f"rank {rank}", mode="lines", line={"width": 0.5, "color": color},
                fillcolor=color, hovertemplate="%{y:.3g} ms", visible=rank is shown[0],
                fillpattern={
                    "shape": hatch[:1], "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.7)",
                    "size": 6, "solidity": 0.25,
                },
            )  # fmt: skip
    whole = np.sum([_of_rank(panel, shown[0]) for panel in scene.history], axis=0)
    _add_scales(figure, [whole], 0.0)
    if len(shown) > 1:
        _add_choice(figure, shown, len(scene.history))
    return figure


def timeline_figure(scene: Scene, theme: Theme) -> Any:
    """Return the collectives of the last steps, a lane a rank; None where none was compared."""
    lanes, line = telling_lanes(scene), scene.analysis.line
    if not lanes or line is None:
        return None
    figure = _figure(theme, "", "ms; drag to move, scroll to zoom")
    most = MOST_BARS // len(lanes)
    placed = tracks(lanes)
    height = BAR / (1 + max((max(of_lane, default=0) for of_lane in placed), default=0))
    bars: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in _PHASES}
    for place, (lane, of_lane) in enumerate(zip(lanes, placed, strict=True)):
        for span, track in list(zip(lane.spans, of_lane, strict=True))[:most]:
            y = place - BAR / 2 + (track + 0.5) * height
            for phase, (begin, end) in phases(span).items():
                bars[phase].append((begin, end - begin, y, span.row))
    titles = [_title(number, row) for number, row in enumerate(scene.analysis.table, start=1)]
    for phase, of_phase in bars.items():
        if of_phase:
            _add_bars(figure, phase, of_phase, height, titles)
    _add_blocked(figure, [lane.blocked[:most] for lane in lanes], theme)
    for step, begin, _ in line.steps:
        figure.add_vline(x=begin, line={"color": theme.text, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=begin, y=1, yref="paper", yanchor="bottom", xanchor="left", showarrow=False,
            text=f"step {step:,}",
        )  # fmt: skip
    names = [f"rank {lane.rank}" for lane in lanes]
    figure.update_yaxes(
        tickvals=list(range(len(lanes))), ticktext=names, range=[len(lanes) - 0.4, -0.6],
        fixedrange=True, showgrid=False,
    )  # fmt: skip
    figure.update_xaxes(range=[0, line.length_ms])
    figure.update_layout(barmode="overlay", dragmode="pan")
    return figure


_FIGURES: dict[str, Callable[[Scene, Theme], Any]] = {
    "loss": loss_figure,
    "step": parts_figure,
    "collectives": timeline_figure,
}


def _figure(theme: Theme, title: str, below: str) -> Any:
    ground = theme.background or "rgba(0,0,0,0)"
    axis = {
        "gridcolor": "rgba(128,128,128,0.25)", "linecolor": theme.text, "ticks": "outside",
        "zeroline": False, "tickcolor": theme.text,
    }  # fmt: skip
    return go.Figure(
        layout={
            "template": "none",
            # On top the buttons, left of plotly's; the legend below.
            "margin": {"l": 64, "r": 16, "t": 52, "b": 84},
            "font": {"color": theme.text, "size": 12},
            "paper_bgcolor": ground,
            "plot_bgcolor": ground,
            "hoverlabel": {"bgcolor": _PAPER, "font": {"color": _INK}},
            "legend": {
                "orientation": "h",
                "yref": "container",
                "y": 0,
                "yanchor": "bottom",
                "x": 0,
            },
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": theme.text},
            "xaxis": axis | {"title": {"text": below}},
            "yaxis": axis | {"title": {"text": title}},
        }
    )


def _add_spread(figure: Any, lines: list[tuple[Floats, Floats]], theme: Theme) -> None:
    """Shade the area between the lowest and the highest rank."""
    x, (low, high) = extent(lines, MOST_POINTS)
    seen = np.isfinite(low)
    common = {"x": _light(x[seen]), "mode": "lines", "line": {"width": 0}, "name": "spread",
              "legendgroup": "spread"}  # fmt: skip
    figure.add_scatter(
        y=_light(low[seen]), showlegend=False, hovertemplate="lowest " + HOVER, **common
    )
    figure.add_scatter(
        y=_light(high[seen]), fill="tonexty", fillcolor="rgba(128,128,128,0.25)",
        hovertemplate="highest " + HOVER, **common,
    )  # fmt: skip


def _add_scales(figure: Any, values: list[Floats], floor: float | None) -> None:
    """Add buttons for a linear axis, which leaves rare spikes out of sight, and a log one."""
    limits = bulk_limits(values, floor)
    linear: dict[str, Any] = {"yaxis.type": "linear"}
    if limits is not None:
        linear["yaxis.range"] = list(padded(limits, floor))
        figure.update_yaxes(range=linear["yaxis.range"])
    log = {"yaxis.type": "log", "yaxis.autorange": True}
    buttons = [
        {"label": "linear", "method": "relayout", "args": [linear]},
        {"label": "log", "method": "relayout", "args": [log]},
    ]
    _add_menu(figure, {"type": "buttons", "direction": "right", "buttons": buttons})


def _add_choice(figure: Any, shown: list[int | None], parts: int) -> None:
    """Add a list of ranks whose parts are seen; the first is the mean of all."""
    buttons = []
    for place, rank in enumerate(shown):
        seen = [place == number // parts for number in range(parts * len(shown))]
        label = "mean of all ranks" if rank is None else f"rank {rank}"
        buttons.append({"label": label, "method": "restyle", "args": [{"visible": seen}]})
    _add_menu(figure, {"direction": "down", "pad": {"l": 128}, "buttons": buttons})


def _add_menu(figure: Any, menu: dict[str, Any]) -> None:
    look = {"bgcolor": _PAPER, "font": {"color": _INK, "size": 11}, "bordercolor": "#999999"}
    place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[*figure.layout.updatemenus, look | place | menu])


def _add_bars(
    figure: Any,
    phase: str,
    bars: list[tuple[float, float, float, int]],
    height: float,
    titles: list[str],
) -> None:
    """Add what collectives did in one phase: its (begin, length, y, row of the table)."""
    begins, lengths, ys, rows = zip(*bars, strict=True)
    colors = [palette.row_color(row) for row in rows]
    figure.add_bar(
        orientation="h", base=_light(np.array(begins)), x=_light(np.array(lengths)),
        y=_light(np.array(ys)), width=height, name=phase,
        customdata=[titles[row] for row in rows],
        hovertemplate="%{customdata}<br>" + phase + " %{x:.3g} ms, from %{base:.4g} ms",
        marker={
            "color": [f"rgba({_rgb(color)},{_PHASES[phase]})" for color in colors],
            "line": {"color": colors, "width": 1},
            "pattern": {"shape": "/" if phase == "waiting" else "", "fgcolor": colors, "size": 6},
        },
    )  # fmt: skip


def _add_blocked(figure: Any, lanes: list[tuple[tuple[float, float], ...]], theme: Theme) -> None:
    """Add a line below a lane where the rank's main thread was blocked."""
    x: list[float | None] = []
    y: list[float | None] = []
    for place, blocked in enumerate(lanes):
        for begin, end in blocked:
            x += [begin, end, None]
            y += [place + 0.42, place + 0.42, None]
    if x:
        figure.add_scatter(x=x, y=y, mode="lines", name="main thread blocked",
                           line={"color": theme.text, "width": 3}, hoverinfo="x+name")  # fmt: skip


def _title(number: int, row: CollectiveRow) -> str:
    return f"{number}  {row.kind}{' of ' + name_bytes(row.bytes) if row.bytes else ''}"


def _of_rank(panel: Panel, rank: int | None) -> Floats:
    """Return a rank's values, of None the mean over the ranks; all have the same steps."""
    if rank is None:
        mean: Floats = np.mean([line.y for line in panel.lines], axis=0)
        return mean
    return next(line.y for line in panel.lines if line.rank == rank)


def _few(line: Curve) -> tuple[Any, Any]:
    x, y = decimate(line.x, line.y, MOST_POINTS // 4)
    return _light(x), _light(np.where(np.isfinite(y), y, np.nan))


def _light(numbers: Floats) -> Any:
    """Return numbers in half the bytes: seven digits are more than a pixel shows."""
    return numbers.astype(np.float32)


def _mode(x: Any) -> str:
    return "lines" if len(x) > 8 else "lines+markers"


def _dash(dashes: tuple[float, ...]) -> str:
    return ",".join(f"{2 * length:g}px" for length in dashes) or "solid"


def _rgb(color: str) -> str:
    return ",".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
