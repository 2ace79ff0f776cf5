"""Draw the speed-up over the number of ranks, beside the ideal line; forecasts with their bands.

Importing this module loads matplotlib (0.2 s). Main thread.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from PIL import Image

from nbdist.client.board.drawn.compare_plot import TEXT_PT, frame
from nbdist.client.board.drawn.picture import few_colors, single
from nbdist.client.board.palette import Theme, line_style, theme_named
from nbdist.client.output.slots import Slots, is_live
from nbdist.study.forecast import Forecast
from nbdist.study.scaling import Point
from nbdist.study.scaling_report import Scaling

WIDTH_IN, HEIGHT_IN, DPI = 9.6, 3.4, 200


def show(scaling: Scaling, theme: str) -> None:
    """Display the picture, with its words, where pictures are shown."""
    if is_live() and len(scaling.points) > 1:
        colors = theme_named(theme)
        Slots(live=False).settle([single(picture(scaling, colors), str(scaling), colors)])


def picture(scaling: Scaling, theme: Theme) -> bytes:
    """Return the speed-up, a PNG with two pixels for each CSS pixel."""
    figure = Canvas(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor=theme.background or "none")
    canvas = FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    frame(axes, theme)
    ranks = [point.n for point in scaling.points]
    shown = sorted({*ranks, *(one.n for one in (*scaling.forecasts, *scaling.others))})
    axes.plot(shown, shown, color=theme.text, linewidth=0.8, linestyle=(0, (4, 3)), label="ideal")
    both = [one for one in (scaling, scaling.beside) if one]
    for number, one in zip((0, 3), both, strict=False):
        axes.plot(
            [point.n for point in one.points], [point.speed_up for point in one.points], marker="o",
            markersize=5, color=line_style(number)[0], linewidth=1.6, label=f"measured, {one.kind}",
        )  # fmt: skip
    last = scaling.points[-1]
    _forecast(axes, scaling.forecasts, 1, "forecast, link as measured", last)
    if scaling.others:
        _forecast(axes, scaling.others, 2, f"forecast, {scaling.others[-1].link.name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(shown, [str(n) for n in shown])
    axes.set_yticks(shown, [str(n) for n in shown])
    axes.minorticks_off()
    axes.set_xlabel("ranks", color=theme.text, fontsize=TEXT_PT)
    axes.set_ylabel("speed-up", color=theme.text, fontsize=TEXT_PT)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="upper left", ncols=5, frameon=False,
        fontsize=TEXT_PT, labelcolor=theme.text, handlelength=2.6,
    )  # fmt: skip
    figure.subplots_adjust(left=0.07, right=0.985, bottom=0.14, top=0.88)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    return few_colors(Image.fromarray(pixels), theme)


def _forecast(
    axes: Axes, forecasts: tuple[Forecast, ...], number: int, name: str, behind: Point | None = None
) -> None:
    """Draw a line, and the band in which steps take by their error less or more.

    Args:
        axes: Where.
        forecasts: By their number of ranks.
        number: Of the line.
        name: In the legend.
        behind: The measured point at which it begins.
    """
    if not forecasts:
        return
    color, dashes = line_style(number)
    rows = [] if behind is None else [(behind.n, *[behind.speed_up] * 3)]
    for one in forecasts:
        slow = one.speed_up * one.step_s / (one.step_s + one.error_s)
        fast = one.speed_up * one.step_s / max(one.step_s - one.error_s, 0.1 * one.step_s)
        rows.append((one.n, slow, one.speed_up, min(one.n, fast)))
    ranks, slowest, middle, fastest = zip(*rows, strict=True)
    axes.fill_between(ranks, slowest, fastest, color=color, alpha=0.16, linewidth=0)
    axes.plot(
        ranks, middle, color=color, linestyle=(0, dashes or (4, 2)), linewidth=1.4, marker="o",
        markersize=4, markerfacecolor="none", label=name,
    )  # fmt: skip
