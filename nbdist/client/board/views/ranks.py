"""Each rank: what it is, how fast, how much memory, and the time of its steps.

A small multiple for each rank; more than `MOST_CARDS` are strips, with the extremes named. Below,
what processes and devices do over time: a lane a rank.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbdist.client.board import palette
from nbdist.client.board.drawn.measures import MARGIN_PX, TITLE_PT, is_narrow
from nbdist.client.board.tables import NONE, ViewTable, or_dash
from nbdist.shared.text import counted, figure, name_bytes, name_ranks

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.page import Page
    from nbdist.client.board.scales import Floats
    from nbdist.client.board.scene.experts import ExpertTokens
    from nbdist.client.board.scene.scene import Row, Scene

NAME, CAPTION = "ranks", "Speed and memory"
HELP = "each rank's state, speed, memory and device"
SHOWS_VERDICTS = False

MOST_CARDS = 16
CARD_PX, WORDS_PX, GAP_PX = 138, 58, 26
TITLE_PX = 24
LEFT_PX = 34
STRIP_PX, STRIPS_LEFT_PX, STRIPS_WORDS_PX, ABOVE_PX, BELOW_PX = 36, 96, 258, 12, 36
LANES_A_ROW, LANES_ABOVE_PX, LANES_BELOW_PX, LANES_RIGHT_PX = 3, 44, 30, 52
LANES_WORDS_PX = 24
EXPERTS_PX, EXPERTS_ABOVE_PX = 30, 28
LANE_PX = {4: 22, 16: 15, 64: 6}  # how high a lane is, of so many at most

Get = Callable[["Row"], float | None]
Write = Callable[[float], str]

# Name, colour, what is read of a row, how it is written.
_NUMBERS: tuple[tuple[str, str, Get, Write], ...] = (
    ("steps/s", palette.LINE_COLORS[0], lambda row: row.steps_per_s, figure),
    ("samples/s", palette.LINE_COLORS[5], lambda row: row.samples_per_s, figure),
    ("tokens/s", palette.LINE_COLORS[2], lambda row: row.tokens_per_s, figure),
    ("memory", palette.LINE_COLORS[1], lambda row: row.memory_bytes, name_bytes),
    ("device memory", palette.LINE_COLORS[3], lambda row: row.cuda_bytes, name_bytes),
    ("its peak", palette.LINE_COLORS[3], lambda row: row.cuda_peak_bytes, name_bytes),
)

# What else the table shows, by the names of records of kind "device".
_OF_DEVICE = {
    "cpu_pct": "cpu %",
    "device_pct": "device %",
    "device_bytes": "in use by all",
    "device_c": "°C",
    "device_w": "W",
}


def height(scene: "Scene", width: int) -> int:
    """Return the height of the page."""
    experts = 0 if scene.experts is None else EXPERTS_ABOVE_PX + BELOW_PX
    experts += 0 if scene.experts is None else EXPERTS_PX * len(scene.experts.shown)
    return _height_above_experts(scene, width) + experts


def _height_above_experts(scene: "Scene", width: int) -> int:
    rows = math.ceil(len(scene.devices) / _lanes_a_row(width))
    return _height_now(scene, width) + rows * _lanes_px(scene)


def _height_now(scene: "Scene", width: int) -> int:
    """Return the height of what is above the lanes."""
    if len(scene.ranks) > MOST_CARDS:
        return ABOVE_PX + STRIP_PX * max(1, len(_names(scene))) + BELOW_PX
    rows = math.ceil(len(scene.ranks) / _columns(scene, width))
    return TITLE_PX + CARD_PX * rows


def compose(page: "Page", scene: "Scene") -> None:
    """Put a card for each rank, or a strip for each number, and lanes below."""
    if len(scene.ranks) > MOST_CARDS:
        _strips(page, scene)
    else:
        _cards(page, scene)
    _lanes(page, scene)
    if scene.experts is not None:
        _experts(page, scene, scene.experts)


def _experts(page: "Page", scene: "Scene", experts: "ExpertTokens") -> None:
    """Put a strip for each mixture, a cell for each expert of each rank."""
    from nbdist.client.board.drawn.plots.strips import Strip, draw_strips

    strips = [
        Strip(
            f"…{name[-13:]}" if len(name) > 14 else name,
            palette.LINE_COLORS[0],
            tokens,
            "{:,.0f}".format,
        )
        for name, tokens in experts.shown.items()
    ]
    above = _height_above_experts(scene, page.width)
    top = page.top + above + EXPERTS_ABOVE_PX / 2
    page.write(MARGIN_PX, top, experts.title, size=TITLE_PT)
    width = page.width - STRIPS_LEFT_PX - STRIPS_WORDS_PX
    size = width, EXPERTS_PX * len(strips)
    axes = page.axes(STRIPS_LEFT_PX, above + EXPERTS_ABOVE_PX, *size)
    draw_strips(axes, page.theme, experts.columns, strips, "rank:expert")


def _cards(page: "Page", scene: "Scene") -> None:
    from nbdist.client.board.drawn.plots.cards import PLOT_PX, draw_card, shared_limits

    columns = _columns(scene, page.width)
    width = (page.width - LEFT_PX - MARGIN_PX - (GAP_PX + LEFT_PX) * (columns - 1)) / columns
    limits = shared_limits(scene)
    page.write(MARGIN_PX, page.top + TITLE_PX / 2, "step time, ms, over the steps", size=TITLE_PT)
    for index in range(len(scene.rows)):
        row, column = divmod(index, columns)
        left = LEFT_PX + column * (width + GAP_PX + LEFT_PX)
        top = TITLE_PX + row * CARD_PX + WORDS_PX
        axes = page.axes(left, top, width, PLOT_PX)
        draw_card(axes, page, scene, index, limits)


def _lanes(page: "Page", scene: "Scene") -> None:
    from nbdist.client.board.drawn.plots.lanes_over_time import draw_lanes

    columns = min(_lanes_a_row(page.width), len(scene.devices))
    above, height = _height_now(scene, page.width), _lanes_px(scene)
    for index, panel in enumerate(scene.devices):
        row, column = divmod(index, columns)
        each = page.width / columns
        width = each - LEFT_PX - LANES_RIGHT_PX
        size = width, height - LANES_ABOVE_PX - _lanes_below_px(scene)
        axes = page.axes(
            LEFT_PX + column * each, above + row * height + LANES_ABOVE_PX, width, size[1]
        )
        draw_lanes(axes, panel, scene.ranks, page.theme, size)


def _lanes_a_row(width: int) -> int:
    return 1 if is_narrow(width) else LANES_A_ROW


def _lanes_px(scene: "Scene") -> int:
    """Return the height of one panel of lanes."""
    lanes = len(scene.ranks)
    each = next((height for most, height in LANE_PX.items() if lanes <= most), 4)
    return LANES_ABOVE_PX + each * lanes + _lanes_below_px(scene)


def _lanes_below_px(scene: "Scene") -> int:
    """Return what is below a panel of lanes: of many, the extremes in words."""
    return LANES_BELOW_PX + (LANES_WORDS_PX if len(scene.ranks) > MOST_CARDS else 0)


def sentence(scene: "Scene") -> str:
    """Return how far and how fast the ranks are, memory and devices, and who is silent."""
    if not scene.reporting:
        return "No rank has reported yet."
    text = f"{counted(len(scene.reporting), 'rank')} at step {scene.first_step:,}"
    if scene.last_step > scene.first_step:
        text += f" to {scene.last_step:,}"
    if scene.steps_per_s:
        text += f", {figure(scene.steps_per_s)} steps/s"
    memory = {row.rank: row.memory_bytes for row in scene.rows if row.memory_bytes}
    if memory:
        most = max(memory, key=memory.__getitem__)
        text += f"; most memory: {name_bytes(memory[most])} on rank {most}"
    text += _of_devices(scene) + _of_experts(scene)
    quiet = [row.rank for row in scene.rows if row not in scene.reporting]
    text += f"; {name_ranks(quiet)} silent." if quiet else "."
    return f"{text} {scene.gpu_unknown}" if scene.gpu_unknown else text


def _of_experts(scene: "Scene") -> str:
    """Return whose experts get most tokens."""
    loads = {r.rank: r.expert_load for r in scene.rows if r.expert_load is not None}
    if not loads:
        return ""
    most = max(loads, key=loads.__getitem__)
    return f"; experts of rank {most} get {loads[most]:.2f} times an even share of the tokens"


def _of_devices(scene: "Scene") -> str:
    """Return how busy devices are and how warm the warmest; without them, the processor."""
    text = ""
    devices = {row.rank: row.of_device for row in scene.rows}
    for key, words in (("device_pct", "device use"), ("cpu_pct", "processor use of a core")):
        use = {rank: values[key] for rank, values in devices.items() if key in values}
        if use and not text:
            least, most = min(use, key=use.__getitem__), max(use, key=use.__getitem__)
            text = f"; {words} {use[least]:.0f} % on rank {least}"
            text += f" to {use[most]:.0f} % on rank {most}" if most != least else ""
    warm = {rank: values["device_c"] for rank, values in devices.items() if "device_c" in values}
    if warm:
        warmest = max(warm, key=warm.__getitem__)
        text += f", at most {warm[warmest]:.0f} °C on rank {warmest}"
    return text


def table(scene: "Scene") -> ViewTable:
    """Return each rank's state, speed, memory and device."""
    head = ["rank", "device", "state", "step", "steps/s", "samples/s", "tokens/s", "memory"]
    has_cuda = any(row.cuda_bytes is not None for row in scene.rows)
    if has_cuda:
        head += ["device memory", "its peak", "reserved"]
    known = [
        (key, name)
        for key, name in _OF_DEVICE.items()
        if any(key in r.of_device for r in scene.rows)
    ]
    head += [name for _, name in known]
    has_experts = any(row.expert_load is not None for row in scene.rows)
    head += ["experts' tokens", "times an even share"] if has_experts else []
    rows = []
    for row in scene.rows:
        cells = [str(row.rank), row.device, scene.state(row), f"{row.step:,}"]
        cells += map(or_dash, (row.steps_per_s, row.samples_per_s, row.tokens_per_s))
        cells.append(or_dash(row.memory_bytes, name_bytes))
        if has_cuda:
            of_cuda = (row.cuda_bytes, row.cuda_peak_bytes, row.cuda_reserved_bytes)
            cells += [or_dash(size, name_bytes) for size in of_cuda]
        cells += [_cell(row, key) for key, _ in known]
        if has_experts:
            cells += [
                or_dash(row.expert_tokens, "{:,.0f}".format),
                or_dash(row.expert_load, "{:.2f}".format),
            ]
        rows.append(tuple(cells))
    caption = "Ranks now" if scene.outcome is None else "Ranks at the end of the cell"
    return ViewTable(caption, tuple(head), tuple(rows))


def _cell(row: "Row", key: str) -> str:
    """Return a value of a device's newest record, as a cell of the table."""
    value, total = row.of_device.get(key), row.of_device.get("device_total_bytes")
    if value is None:
        return NONE
    if key == "device_bytes":
        return f"{name_bytes(value)} of {name_bytes(total)}" if total else name_bytes(value)
    return f"{value:.0f}"


def _strips(page: "Page", scene: "Scene") -> None:
    from nbdist.client.board.drawn.plots.strips import Strip, draw_strips

    names = _names(scene)
    strips = [
        Strip(name, color, _column(scene, get), write)
        for name, color, get, write in _NUMBERS
        if name in names
    ]
    width = page.width - STRIPS_LEFT_PX - STRIPS_WORDS_PX
    axes = page.axes(STRIPS_LEFT_PX, ABOVE_PX, width, STRIP_PX * max(1, len(names)))
    draw_strips(axes, page.theme, scene.ranks, strips)


def _names(scene: "Scene") -> tuple[str, ...]:
    """Return the numbers that any rank has reported."""
    return tuple(
        name for name, _, get, _ in _NUMBERS if any(get(row) is not None for row in scene.rows)
    )


def _column(scene: "Scene", get: Get) -> "Floats":
    import numpy as np

    values = [get(row) for row in scene.rows]
    return np.array([math.nan if value is None else value for value in values])


def _columns(scene: "Scene", width: int) -> int:
    return min(2 if is_narrow(width) else 4, len(scene.ranks))
