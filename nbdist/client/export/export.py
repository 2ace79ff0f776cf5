"""Export a notebook: its cells to a script beside which a job's files may lie.

Called by `%dist export`, with what the kernel knows, and by `nbdist export`, with a file alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.client.cluster.launchers.slurm_words import read_lines
from nbdist.client.export import jobs
from nbdist.client.export.modules import beside, other_folders
from nbdist.client.export.notebook_cells import NotebookCell, choose
from nbdist.client.export.place import require_own_name, require_place, write_all
from nbdist.client.export.rank_cells import Parse
from nbdist.client.export.resolve import Resolved, resolve
from nbdist.client.export.script import Script, ScriptOptions, write
from nbdist.errors import UsageError
from nbdist.formatting import counted
from nbdist.options import TIMEOUT_S, ClusterOptions

TORCHRUN = "torchrun"
FORMATS = (TORCHRUN, *jobs.FORMATS)
# Words of a job that not all formats have a place for, and those that do.
_KNOWN_BY = {
    "--time": ("sbatch", "trainjob", "skypilot", "sagemaker", "vertex", "azureml"),
    "--partition": ("sbatch",),
    "--sbatch": ("sbatch",),
}


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is asked for.

    Attributes:
        path: Of the script.
        format: `torchrun` for the script alone, or that of the job around it.
        cells: Numbers, such as `3,5-8`; "" for the `%%distributed` cells.
        force: Overwrite what is there.
        time_limit: Of the job.
        partition: Of Slurm.
        nodes: Of the job; None for what the notebook had.
        sbatch: More of Slurm's options, or files with `#SBATCH` lines, as in `%dist start`.
    """

    path: Path
    format: str = TORCHRUN
    cells: str = ""
    force: bool = False
    time_limit: str = ""
    partition: str = ""
    nodes: int | None = None
    sbatch: tuple[str, ...] = ()


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
        lines += [f"Left out: cell {number}, which {reason}." for number, reason in script.left_out]
        lines += [f"Cell {number} is without {', '.join(gone)}." for number, gone in script.without]
        for number, runs in script.repeated:
            lines.append(
                f"Cell {number} has run {runs} times, and stands there once, as of the last."
            )
        for number, names in script.not_given:
            lines.append(
                f"Cell {number} uses {', '.join(names)}, which nothing in the script gives."
            )
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
        UsageError: It cannot be written there, a word makes no sense, or no cell is left.
    """
    if request.format not in FORMATS:
        raise UsageError(f"--format is {', '.join(FORMATS)}, not {request.format!r}.")
    _require_words(request)
    chosen = choose(cells, request.cells) if request.cells else None
    require_place(request.path, force=request.force)
    resolved = resolve(cells, chosen, parse_dist, parse_distributed)
    if not any(block.code for block in resolved.blocks):
        raise _nothing(resolved, chosen)
    options = _options(resolved, running, request.nodes)
    modules = beside(resolved.code, resolved.written, folder)
    code = "\n".join([resolved.code, *modules.values()])
    doubts = other_folders(code, folder) if folder else []
    script = write(resolved, options, request.path.name, notebook, modules, doubts)
    if request.path.name in {*resolved.written, *script.modules}:
        raise UsageError(
            f"{request.path.name} is a module that the script needs; nothing was written.",
            do=f"export to another name, such as train_{request.path.name}",
        )
    files = {request.path.name: script.text}
    if request.format != TORCHRUN:
        started = resolved.starts[0] if resolved.starts else argparse.Namespace()
        files |= jobs.files(request.format, _job(request, script, started))
    require_own_name(request.path.name, files)
    place = request.path.parent
    for name in files:
        require_place(place / name, force=request.force)
    write_all(place, files)
    lacking = [module for module in script.modules if not (place / module).exists()]
    has_them = folder is not None and any((folder / module).exists() for module in lacking)
    made = tuple(place / name for name in files)
    return Exported(made, script, folder if has_them else None)


def _require_words(request: ExportRequest) -> None:
    """Refuse words that would change nothing of what is written."""
    given = {
        "--time": request.time_limit,
        "--partition": request.partition,
        "--sbatch": request.sbatch,
    }
    for word, formats in _KNOWN_BY.items():
        if given[word] and request.format not in formats:
            what = "the script alone" if request.format == TORCHRUN else request.format
            raise UsageError(
                f"{word} means nothing for {what}; nothing was written.",
                do=f"leave it out, or use --format {' or '.join(formats)}",
            )
    if request.nodes is not None and request.nodes < 1:
        raise UsageError(f"--nodes {request.nodes}: ranks need one machine or more.")


def _nothing(resolved: Resolved, chosen: Sequence[int] | None) -> UsageError:
    why = "; ".join(
        f"cell {block.number} {block.reason}"
        for block in resolved.blocks
        if not block.code and not block.is_notebooks
    )
    what = "None of these cells" if chosen else "No %%distributed cell"
    return UsageError(
        f"{what} can be exported; nothing was written.",
        why=why or "there is none that has run",
        do="run the %%distributed cells that train, and export again",
    )


def _options(
    resolved: Resolved, running: ClusterOptions | None, asked_nodes: int | None
) -> ScriptOptions:
    """Return what the script is started with: as the first `%dist start`, which cells began on.

    Where `%dist scale` came before the last of them, their number of ranks is what it left.

    Raises:
        UsageError: So many machines are asked for that the ranks cannot be spread over evenly.
    """
    asked = resolved.starts[0] if resolved.starts else argparse.Namespace()

    def word(name: str) -> object:
        return getattr(asked, name, None)

    n = resolved.n or word("n") or (running.n if running else 2)
    assert isinstance(n, int)
    device = word("device") or (running.device if running else "cpu")
    hosts = str(word("hosts") or "")
    nodes = asked_nodes or word("nodes") or (len(hosts.split(",")) if hosts else 1)
    assert isinstance(nodes, int)
    per_node = word("gpus_per_node")
    if isinstance(per_node, int) and resolved.n is None:
        n = per_node * nodes
    if n % nodes and asked_nodes:
        fitting = ", ".join(str(number) for number in range(1, n + 1) if n % number == 0)
        raise UsageError(
            f"--nodes {nodes}: {counted(n, 'rank')} cannot be spread over {nodes} machines evenly.",
            why="torchrun starts as many ranks on each machine",
            do=f"--nodes takes {fitting} here",
        )
    if n % nodes:
        nodes = 1
    threads, timeout = word("threads"), word("timeout")
    if running and not resolved.starts:  # by nbdist.start
        threads = running.threads
        timeout = None if running.timeout == TIMEOUT_S else running.timeout
    return ScriptOptions(
        n,
        str(device),
        nodes,
        str(word("backend") or ""),
        threads if isinstance(threads, int) else None,
        timeout if isinstance(timeout, float) else None,
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
