"""Export a notebook: its cells to a script beside which a job's files may lie.

Called by `%dist export`, with what the kernel knows, and by `nbdist export`, with a file alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nbdist.client.cluster.launchers.slurm_words import read_lines
from nbdist.client.export import jobs
from nbdist.client.export.cells import NotebookCell, Parse, dist_lines, numbers
from nbdist.client.export.modules import beside
from nbdist.client.export.parts import Part, parts_of, trains
from nbdist.client.export.place import require_own_name, require_place, write_all
from nbdist.client.export.script import Script, ScriptOptions, write
from nbdist.shared.errors import UsageError
from nbdist.shared.options import TIMEOUT_S, ClusterOptions
from nbdist.shared.text import counted

TORCHRUN = "torchrun"
FORMATS = (TORCHRUN, *jobs.FORMATS)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is asked for.

    Attributes:
        path: Of the script.
        format: `torchrun` for the script alone, or that of the job around it.
        cells: Numbers, such as `3,5-8`; "" for the `%%distributed` cells.
        skip: Numbers of cells to leave out.
        force: Overwrite what is there.
        time_limit: Of the job.
        partition: Of Slurm.
        nodes: Of the job; None for what the notebook had.
        sbatch: More of Slurm's options, or files with `#SBATCH` lines, as in `%dist start`.
        threads: CPU threads a rank; None for what the notebook had.
    """

    path: Path
    format: str = TORCHRUN
    cells: str = ""
    skip: str = ""
    force: bool = False
    time_limit: str = ""
    partition: str = ""
    nodes: int | None = None
    sbatch: tuple[str, ...] = ()
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written; printed, what it is and how it runs.

    Attributes:
        files: All that were written, the script first.
        script: What is in the first.
        copy_from: The folder in which modules lie that the script needs beside it; None where they
            lie beside it already.
    """

    files: tuple[Path, ...]
    script: Script
    copy_from: Path | None = None

    def __str__(self) -> str:
        script = self.script
        lines = [f"Wrote {self.files[0]}, of {counted(len(script.cells), 'cell')}."]
        if len(self.files) > 1:
            lines.append(f"Beside it: {', '.join(path.name for path in self.files[1:])}.")
        if script.modules:
            there = f"; copy them from {self.copy_from}" if self.copy_from else ""
            lines.append(f"It needs beside it: {', '.join(script.modules)}{there}.")
        lines += [f"Left out: {line}." for line in script.left_out_lines]
        lines += [f"Cell {number} is without {', '.join(gone)}." for number, gone in script.without]
        command = script.command_of(str(self.files[0]))
        return "\n".join([*lines, *script.doubts, f"Run it: {command}"])


def export(
    request: ExportRequest,
    cells: Sequence[NotebookCell],
    parse_dist: Parse,
    parse_distributed: Parse,
    *,
    notebook: str = "",
    folder: Path | None = None,
    running: ClusterOptions | None = None,
) -> Exported:
    """Write the script and the files around it.

    Args:
        request: What is asked for.
        cells: The notebook's.
        parse_dist: Reads the words after `%dist`.
        parse_distributed: Reads those after `%%distributed`.
        notebook: Its name, for the header.
        folder: Where modules lie that cells import.
        running: What the cluster was started with, where one runs.

    Raises:
        UsageError: It cannot be written there, a word makes no sense, or no cell is left that
            trains.
    """
    _require_words(request)
    chosen = numbers(cells, "--cells", request.cells) if request.cells else None
    skipped = numbers(cells, "--skip", request.skip) if request.skip else set()
    require_place(request.path, force=request.force)
    parts = parts_of(cells, chosen, skipped, parse_distributed)
    modules = beside("\n".join(part.code for part in parts), folder)
    _require_training(parts, cells, list(modules.values()))
    last = max(part.number for part in parts if part.code)
    started = list(dist_lines([cell for cell in cells if cell.number <= last], parse_dist))
    least = max(part.least_ranks for part in parts)
    options = _options(started, running, request.nodes, least)
    options = replace(options, threads=request.threads or options.threads)
    doubts = _doubts_of_runs(cells)
    script = write(parts, options, request.path.name, notebook, modules, doubts, cells)
    if request.path.name in script.modules:
        raise UsageError(
            f"{request.path.name} is a module that the script needs; nothing was written.",
            do=f"export to another name, such as train_{request.path.name}",
        )
    files = {request.path.name: script.text}
    if request.format != TORCHRUN:
        files |= jobs.files(request.format, _job(request, script, _start(started)))
    require_own_name(request.path.name, files)
    place = request.path.parent
    write_all(place, files, force=request.force)
    lacking = [module for module in script.modules if not (place / module).exists()]
    made = tuple(place / name for name in files)
    return Exported(made, script, folder if lacking else None)


def _require_words(request: ExportRequest) -> None:
    """Refuse words that make no sense, or would change nothing of what is written."""
    if request.format not in FORMATS:
        raise UsageError(f"--format is {', '.join(FORMATS)}, not {request.format!r}.")
    given = {
        "--time": request.time_limit,
        "--partition": request.partition,
        "--sbatch": request.sbatch,
    }
    for word, value in given.items():
        formats = [name for name, words in jobs.WORDS.items() if word in words]
        if value and request.format not in formats:
            what = "the script alone" if request.format == TORCHRUN else request.format
            raise UsageError(
                f"{word} means nothing for {what}; nothing was written.",
                do=f"leave it out, or use --format {' or '.join(formats)}",
            )
    if request.nodes is not None and request.nodes < 1:
        raise UsageError(f"--nodes {request.nodes}: ranks need one machine or more.")


def _require_training(
    parts: Sequence[Part], cells: Sequence[NotebookCell], modules: Sequence[str]
) -> None:
    """Refuse a script without code, or one that is left without the training that the cells have.

    Raises:
        UsageError: It is one; the text names the cell that would train, and why it stays out.
    """
    kept = [part.code for part in parts if part.code]
    left = "; ".join(f"cell {part.number} {part.reason}" for part in parts if part.reason)
    if not kept:
        raise UsageError(
            "No cell can be exported; nothing was written.",
            why=left or "there is no %%distributed cell that has run",
            do="run the %%distributed cells that train, and export again",
        )
    if any(map(trains, [*kept, *modules])):
        return
    there = {part.number for part in parts if part.code}
    # One that is there has trained by code of others, or of a library.
    training = {cell.number for cell in cells if cell.losses or trains(cell.source)} - there
    if training:
        reasons = {part.number: part.reason for part in parts if part.number in training}
        why = "; ".join(
            f"cell {number} would train, and {reasons.get(number) or 'is not among --cells'}"
            for number in sorted(training)
        )
        raise UsageError(
            "No optimizer steps in the script; nothing was written.",
            why=why,
            do="let a cell that trains succeed and be among --cells, and not among --skip",
        )


def _doubts_of_runs(cells: Sequence[NotebookCell]) -> list[str]:
    """Return in sentences what the runs of cells make doubtful: their order, number and faults."""
    mine = [cell for cell in cells if (cell.is_of_ranks or cell.sent) and not cell.trouble]
    said = [
        f"Cell {cell.number} has run {cell.runs} times, and stands there once, as of the last."
        for cell in mine
        if cell.runs > 1
    ]
    said += [
        f"Cell {cell.number} has made steps in a run that failed, and the notebook's model has"
        " them: in the script it has not, unless its loop continued where it stood."
        for cell in cells
        if cell.has_lost_steps
    ]
    ran = [cell.number for cell in mine]
    if ran != sorted(ran):
        order = ", ".join(map(str, ran))
        said.append(f"The cells ran last in another order than they stand there: {order}.")
    return said


def _start(started: Sequence[argparse.Namespace]) -> argparse.Namespace:
    """Return the words of the newest `%dist start`."""
    starts = [one for one in started if one.command == "start"]
    return starts[-1] if starts else argparse.Namespace()


def _ranks(started: Sequence[argparse.Namespace]) -> int | None:
    """Return how many ranks the newest `%dist start` or `scale` has asked for."""
    n: int | None = None
    for one in started:
        if one.command == "start":
            n = one.n
            if isinstance(one.gpus_per_node, int):
                n = one.gpus_per_node * (one.nodes or 1)
        elif one.command == "scale":
            n = one.n
    return n


def _options(
    started: Sequence[argparse.Namespace],
    running: ClusterOptions | None,
    asked_nodes: int | None,
    least: int,
) -> ScriptOptions:
    """Return what the script is started with: as the `%dist` lines say, else as the ranks that run.

    Args:
        started: The words of these lines.
        running: What runs.
        asked_nodes: Machines; None for as many as there were.
        least: Ranks that the cells need.

    Raises:
        UsageError: So many machines are asked for that the ranks cannot be spread over evenly.
    """
    asked = _start(started)

    def word(name: str) -> object:
        return getattr(asked, name, None)

    hosts = str(word("hosts") or "")
    nodes = asked_nodes or word("nodes") or (len(hosts.split(",")) if hosts else 1)
    assert isinstance(nodes, int)
    n = max(_ranks(started) or (running.n if running else 2), least)
    if n % nodes and asked_nodes:
        fitting = ", ".join(str(number) for number in range(1, n + 1) if n % number == 0)
        raise UsageError(
            f"--nodes {nodes}: {counted(n, 'rank')} cannot be spread over {nodes} machines evenly.",
            why="torchrun starts as many ranks on each machine",
            do=f"--nodes takes {fitting} here",
        )
    threads, timeout = word("threads"), word("timeout")
    if running and not vars(asked):  # by nbdist.start
        threads = running.threads
        timeout = None if running.timeout == TIMEOUT_S else running.timeout
    return ScriptOptions(
        n,
        str(word("device") or (running.device if running else "cpu")),
        1 if n % nodes else nodes,
        str(word("backend") or ""),
        threads if isinstance(threads, int) else None,
        timeout if isinstance(timeout, float) else None,
        (running.virtual if running else None) or "",
    )


def _job(request: ExportRequest, script: Script, started: argparse.Namespace) -> jobs.Job:
    """Return the job; what is not asked for is as the notebook's ranks were `started`."""
    options = script.options
    lines = request.sbatch or tuple(getattr(started, "sbatch", None) or ())
    sbatch, before = read_lines(lines) if request.format == "sbatch" else ((), ())
    return jobs.Job(
        script.name,
        ranks_per_node=options.n // options.nodes,
        nodes=options.nodes,
        device="cuda" if options.device == "cuda" else "cpu",
        modules=script.modules,
        packages=_packages(request, script),
        time_limit=request.time_limit or getattr(started, "time", None) or "",
        partition=request.partition or getattr(started, "partition", None) or "",
        sbatch=sbatch,
        before=before,
    )


def _packages(request: ExportRequest, script: Script) -> tuple[str, ...]:
    """Return what pip installs; a Slurm cluster's nodes share the environment that there is.

    What the user has to fill in is in capitals. Until there is a release no index has nbdist.
    """
    if request.format == "sbatch":
        return ()
    return ("nbdist @ git+URL-OF-NBDIST",) if script.needs_nbdist else ("torch",)
