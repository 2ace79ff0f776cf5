"""`%dist scaling`: the notebook's own step on several numbers of ranks, and what would change it.

Main thread.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.export import ExportRequest, export
from nbdist.client.export.needed import cells_for
from nbdist.client.export.parts import name_cells
from nbdist.client.export.worlds import Measured, ScalingError, cores, measure, scratch
from nbdist.client.metrics.analysis.values import LEFT_OUT
from nbdist.client.metrics.world import world_of
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from nbdist.shared.errors import ClusterError, UsageError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.text import counted
from nbdist.study import forecast, scaling, what_if
from nbdist.study.links import LINKS, Link
from nbdist.study.machine import EXAMPLE, Machine, parse_machine
from nbdist.study.scaling_report import Scaling, notes_of

if TYPE_CHECKING:
    from nbdist.client.cells.trained_cell import TrainedCell

_BEYOND = (2, 4, 8)  # times the ranks that were measured
_EMULATES = "emulate_link("
_EMULATED = "The cells call nbdist.emulate_link: the link as measured is an emulated one."
_DEVICES = "On these GPUs the ranks of the notebook hold memory, too: less was left for this."


def scale_out(
    asked: argparse.Namespace, cells: Sequence[NotebookCell], running: ClusterOptions | None
) -> Scaling:
    """Measure a cell's steps, and return them with a forecast.

    Args:
        asked: The words of `%dist scaling`.
        cells: What the kernel has run.
        running: What the cluster runs with, if there is one.

    Raises:
        UsageError: A word makes no sense, or no cell has trained.
        ScalingError: The cell runs on none of these numbers of ranks.
    """
    most = running.n if running else 2
    numbers = asked.n or ranks_until(most)
    there = None if asked.on is None else parse_place(" ".join(asked.on))
    if asked.weak and any(n % numbers[0] for n in numbers):
        raise UsageError(
            f"-n {','.join(map(str, numbers))}: batches cannot grow with these ranks.",
            why=f"--weak multiplies a batch of {numbers[0]} ranks by whole numbers",
        )
    if asked.steps <= LEFT_OUT:
        raise UsageError(f"--steps is {LEFT_OUT + 1} or more: the first {LEFT_OUT} are left out.")
    chosen = cells_for(cells, asked.cell, parse_distributed)
    threads = running.threads if running else max(1, cores() // max(numbers))
    folder = Path.cwd()
    with scratch(folder) as path:
        made = export(
            ExportRequest(path, threads=threads),
            chosen,
            parse_dist,
            parse_distributed,
            folder=folder,
            running=running,
        )
        run = partial(measure, made, folder=folder, steps=asked.steps, tell=_tell)
        measured = run(numbers)
        weak = _weak(run, numbers, measured.worlds) if asked.weak else None
    made_steps = counted(min(world.steps for world in measured.worlds), "step")
    counts = f"{made_steps} on each, {counted(threads, 'thread')} a rank"
    notes = [f"Cell {chosen[-1].number}, {counts}, in processes beside the notebook's."]
    if others := [cell.number for cell in chosen[:-1] if cell.losses]:
        notes.append(
            "Left out, but for imports, definitions and assignments of names that nothing else "
            f"gives: {name_cells(others)}."
        )
    if made.script.options.nodes > 1:
        notes.append("All of these run on this machine: the links between hosts are not measured.")
    if running and running.device == "cuda":
        notes.append(_DEVICES)
    if running and running.machine is not None:
        late = max(world.starved_s / world.step_s for world in measured.worlds)
        kept = f"This machine kept up with {100 * (1 - late):.0f} % of the virtual time."
        notes.append(f"Emulated: {running.machine.told()}. {kept}")
    if _EMULATES in made.script.text:
        notes.append(_EMULATED)
    if isinstance(weak, str):
        notes.append(weak)
    found = _report(measured, notes, there)
    if isinstance(weak, Measured):
        return replace(found, beside=_report(weak, (), there))
    return found


def _weak(
    run: Callable[..., Measured], numbers: Sequence[int], strong: Sequence[scaling.World]
) -> Measured | str:
    """Return what weak scaling is beside strong one, or in a sentence why there is none."""
    first = strong[0]
    more = [n for n in numbers if n > first.n and n % first.n == 0]
    if scaling.kind_of(strong) == "strong":
        try:
            grown = run(more, weak_from=first.n)
        except ScalingError as error:
            return f"Weak: {error}"
        if scaling.kind_of(worlds := (first, *grown.worlds)) == "weak":
            return Measured(worlds, grown.failed)
    return (
        "Weak: not measured beside it, which takes two numbers of ranks, and batches of "
        "nbdist.loader that they divide."
    )


def _tell(line: str) -> None:
    print(line, flush=True)


def ranks_until(most: int) -> tuple[int, ...]:
    """Return the numbers of ranks that are measured: 1, 2, 4 and so on, and the most."""
    return tuple(sorted({2**power for power in range(most.bit_length())} | {most}))


def _report(measured: Measured, notes: Sequence[str], there: Link | Machine | None) -> Scaling:
    worlds = measured.worlds
    known = scaling.kind_of(worlds)
    kind = known or "weak"
    said = [*notes, *notes_of(worlds, kind, is_known=known is not None), *measured.failed]
    predicted: tuple[forecast.Forecast, ...] = ()
    others: tuple[forecast.Forecast, ...] = ()
    try:
        model = forecast.fit(worlds, kind)
    except UsageError as error:
        said.append(str(error))
    else:
        fitted = ", ".join(str(world.n) for world in worlds if not world.is_crowded)
        said.append(
            f"The forecast rests on {fitted} ranks; its band on the spread of these steps, and on "
            "20 % of the communication that was not measured."
        )
        if not model.link.latency_s:
            said.append("No latency was measured: all communication counts as bandwidth.")
        if any(1 < call.ranks < model.last.n for call in model.last.calls):
            said.append(
                "Some collectives join fewer than all ranks: these groups stay as they are."
            )
        beyond = [times * worlds[-1].n for times in _BEYOND]
        predicted = tuple(model.predict(n) for n in beyond)
        others = () if there is None else _elsewhere(model, there, beyond)
        if isinstance(there, Machine):
            said.append(f"On {there}: links from presets, computation as measured here.")
    points = scaling.points(worlds, kind)
    return Scaling(kind, worlds, points, predicted, others, tuple(said))


def parse_place(text: str) -> Link | Machine:
    """Return the link of that name, or the machine that a text describes.

    Raises:
        UsageError: It is neither.
    """
    word = text.strip().lower()
    if " " in word:
        return parse_machine(text)
    if word not in LINKS:
        raise UsageError(
            f"--on: no link is called {text!r}.",
            why=f"known are {', '.join(LINKS)}",
            do=f'or name a machine, such as "{EXAMPLE}"',
        )
    return LINKS[word]


def _elsewhere(
    model: forecast.StepModel, there: Link | Machine, beyond: Sequence[int]
) -> tuple[forecast.Forecast, ...]:
    """Return forecasts over a link on as many ranks as over the measured one, or of a machine.

    Of a machine, one host and all of them.
    """
    if isinstance(there, Link):
        return tuple(model.predict(n, there) for n in beyond)
    numbers = sorted({there.per_host, there.world_size})
    return tuple(model.predict(n, there.link_of(range(n)), "nccl") for n in numbers)


def outcomes(
    asked: argparse.Namespace, trained: "TrainedCell | None", cells: Sequence[NotebookCell]
) -> str:
    """Return what changes would make of the newest training's step, as a table.

    Args:
        asked: The words of `%dist scaling --what-if`.
        trained: The newest training.
        cells: What the kernel has run.

    Raises:
        UsageError: Other words are about what would run, or `--on` names no link for the ranks.
        ClusterError: Nothing has trained, or nothing was explained.
    """
    if asked.cell is not None or asked.n or asked.weak:
        raise UsageError(
            "--what-if is about the newest training's own step, and runs nothing.",
            do="leave out CELL, -n and --weak",
        )
    if trained is None:
        raise ClusterError(
            "There is no training yet that could be changed.",
            do="run the %%distributed cell that trains, then %dist scaling --what-if",
        )
    info = trained.info
    is_nccl = "nccl" in info.backend and any(one.startswith("cuda") for one in info.devices)
    backend = "nccl" if is_nccl else "gloo"
    world = world_of(trained.analysis, _steps(trained), backend=backend)
    if world is None:
        raise ClusterError(
            "The newest training's steps were not explained.",
            why="its ranks measured no step: too few were made, or the tap is off",
            do="let it make some ten steps, with the tap as it is by default",
        )
    facts = list(trained.telemetry.facts.values())
    layout = next((of_rank["layout"] for of_rank in facts if "layout" in of_rank), "")
    there = None if asked.on is None else parse_place(" ".join(asked.on))
    link = there.link_of(range(world.n)) if isinstance(there, Machine) else there
    found = what_if.what_if(world, layout, link)
    machine = trained.telemetry.machine
    where = f"emulated ({machine})" if machine else "measured here"
    said = [what_if.table(world, found, where)]
    if any(_EMULATES in cell.source for cell in cells):
        said.append(_EMULATED)
    return "\n".join(said)


def _steps(trained: "TrainedCell") -> dict[int, list[dict[str, float]]]:
    """Return the recent steps of each rank but its first two: time, samples, waits."""
    from nbdist.client.metrics.analysis.values import RECENT

    found: dict[int, dict[int, dict[str, float]]] = {}
    for name in ("step_s", "samples", "starved_s"):
        for rank, series in trained.telemetry.series(name).items():
            recent = slice(max(0, series.n - RECENT), series.n)
            for step, value in zip(series.steps[recent], series.values[recent], strict=True):
                if step > LEFT_OUT:
                    found.setdefault(rank, {}).setdefault(int(step), {})[name] = value
    return {rank: [row for row in rows.values() if "step_s" in row] for rank, rows in found.items()}
