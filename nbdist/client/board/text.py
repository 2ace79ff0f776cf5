"""The words of the board: caption and progress, and how it writes numbers.

The caption stays in the notebook and is compared by nbval: it holds no time and no trained
number. The rest is live only. What a view says of itself is in its module.
"""

import html
import re
from typing import TYPE_CHECKING

from nbdist.shared.text import counted, figure

if TYPE_CHECKING:  # for its type alone: the scene loads numpy
    from nbdist.client.board.scene.scene import Scene

STYLE = "font: 12px/1.5 var(--jp-ui-font-family, sans-serif); font-variant-numeric: tabular-nums"
_LISTED = re.compile(r"^(\d*)([-+=.)])")  # what begins a list or a heading
MARKDOWN = str.maketrans({c: "\\" + c for c in "\\`*_[]<>#$|~&"})
ENDINGS = {
    "finished": " over ",
    "failed": ", failed after ",
    "interrupted": ", interrupted after ",
    "running": ", still running after ",
}


def caption(scene: "Scene", outcome: str, subject: str = "") -> str:
    """Return the sentence below the picture in the notebook.

    For example "Loss and communication time on 2 ranks over 80 steps." In a cell that failed or was
    interrupted all its ranks took part: one that died may have reported nothing.

    Args:
        scene: What is seen.
        outcome: "finished", "failed", "interrupted" or "running".
        subject: What is seen of it; the plots there are when empty.
    """
    took_part = scene.rows if outcome in ("failed", "interrupted") else scene.reporting
    ranks = counted(len(took_part), "rank")
    said = f"{subject or _subject(scene)} on {ranks}{ENDINGS[outcome]}{length(scene)}."
    return f"{said} {emulated(scene)}." if scene.emulated else said


def emulated(scene: "Scene") -> str:
    """Return that times are those of virtual devices: Emulated: 2 GFLOP/s, 100 Mbit/s."""
    return f"Emulated: {scene.emulated}" if scene.emulated else ""


def _subject(scene: "Scene") -> str:
    names = {"comm_s": "communication time"}
    subjects = [names.get(panel.key, panel.key) for panel in scene.panels]
    if not subjects:
        subjects = sorted({key for row in scene.rows for key in row.own}) or ["training"]
    what = subjects[0] if len(subjects) == 1 else f"{', '.join(subjects[:-1])} and {subjects[-1]}"
    if what.startswith(("loss", "communication", "training")):
        what = what[0].upper() + what[1:]
    return what


def length(scene: "Scene") -> str:
    """Return how long the cell ran, in its own count: 80 steps."""
    if scene.last_step:
        return counted(scene.last_step, "step")
    return counted(scene.records, "record")


def markdown(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, whatever a key or a run is called.

    Lines stay lines, each in the same paragraph; none begins a list.
    """
    lines = (line.strip().translate(MARKDOWN) for line in text.splitlines())
    return "  \n".join(_LISTED.sub(r"\1\\\2", line) for line in lines)


def progress(scene: "Scene", elapsed_s: float) -> str:
    """Return the progress: 812 [00:24, 34.1 steps/s] · 12/100 of this epoch, 00:03 left in it.

    Where the training stalls or is paused, that is shown instead of the time left.

    A loader knows the end of its pass alone, so nothing is said of the end of the loop.
    """
    done, speed = scene.first_step, scene.steps_per_s
    parts = [clock(elapsed_s)]
    stands_still = scene.stands_still or scene.is_paused
    if speed and not stands_still:
        parts.append(f"{figure(speed)} steps/s")
    text = f"{done:,} [{', '.join(parts)}]" if scene.last_step else f"[{parts[0]}]"
    if scene.epoch is not None:
        text += f" · {scene.epoch}"
        if speed and not stands_still:
            text += f", {clock((scene.epoch.steps - scene.epoch.done) / speed)} left in it"
    if scene.is_paused:
        text += f" · paused after step {scene.paused_at:,}"
    elif stands_still:
        text += f" · no {'step' if scene.last_step else 'record'} for {clock(scene.idle_s)}"
    if scene.is_behind:
        last = next(row.rank for row in scene.reporting if row.step == scene.first_step)
        text += f" · ranks at {scene.first_step:,}–{scene.last_step:,}, rank {last} is last"
    return f"{text} · {emulated(scene)}" if scene.emulated else text


def spoken(sentence: str) -> str:
    """Return HTML of a line of text that screen readers speak when it changes."""
    return f'<div role="status" style="{STYLE}">{html.escape(sentence)}</div>'


def tick(value: float, position: int | None = None) -> str:
    """Return a short label: 0.5, 20, 1k, 12k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def count(value: float) -> str:
    """Return a mean count: 3, or 2.50 where it is not whole."""
    return f"{value:.0f}" if abs(value - round(value)) < 0.005 else figure(value)


def clock(seconds: float) -> str:
    """Return mm:ss, or h:mm:ss from an hour on."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def slower(share: float) -> str:
    """Return by how much a rank is slower, as its verdict says: "48 %", "2.5 x" from twice on."""
    times = 1 + share
    if share < 1:
        return f"{100 * share:.0f} %"
    return f"{times:.0f} x" if times >= 9.95 else f"{times:.1f} x"
