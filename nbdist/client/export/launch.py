"""Run a script's first steps under torchrun, on ranks of their own, and read what they recorded.

The notebook's ranks know nothing of it; on a GPU they share its memory with these.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nbdist.client.export.script import ScriptOptions
from nbdist.shared.options import HASH_SEED
from nbdist.shared.packed import Calls
from nbdist.shared.wire import Record

_MOST_LINES = 6  # of what a script that fails has said
_OF_RANK = re.compile(r"\[rank\d+\]: ")
_RUNNER = "nbdist.engine.rank.first_step"
_RUNNER_FILE = "rank/first_step.py"
_END_S = 10.0  # for torchrun, to end its ranks


class LaunchFailed(Exception):
    """A rank has failed; the text is the end of what it said."""


def launch(
    path: Path,
    options: ScriptOptions,
    records: Path,
    *,
    timeout_s: float,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run a script on the ranks of this machine until its first steps are over.

    Args:
        path: The script.
        options: What it is started with.
        records: A folder for what ranks record.
        timeout_s: After which ranks are ended.
        folder: Where it runs; beside the script without it.
        environ: What is added to the environment.

    Raises:
        LaunchFailed: A rank failed.
        subprocess.TimeoutExpired: They were not over in time.
    """
    words = {
        "device": options.device,
        "backend": options.backend or None,
        "threads": options.threads,
        **({} if options.timeout is None else {"timeout": options.timeout}),
    }
    script = path.name if folder is None else str(path.resolve())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.n}", "-m", _RUNNER, script, str(records)]
    ranks = subprocess.Popen(
        [*command, json.dumps(words), str(os.getpid())],
        env={**os.environ, "PYTHONHASHSEED": HASH_SEED, **(environ or {})},
        cwd=folder or path.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = ranks.communicate(timeout=timeout_s)
    except BaseException:  # an interrupt, too: killed at once, torchrun would leave its ranks
        ranks.terminate()
        try:
            ranks.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            ranks.kill()
            ranks.communicate()
        raise
    if ranks.returncode:
        raise LaunchFailed(_end_of_traceback(said))


def read_records(folder: Path, n: int) -> dict[int, list[Record]]:
    """Return what each rank has recorded; nothing of one that wrote no file."""
    return {rank: _read(rank, folder / f"rank-{rank}.jsonl") for rank in range(n)}


def _read(rank: int, file: Path) -> list[Record]:
    if not file.exists():
        return []
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [
        Record(
            rank,
            seq,
            row["kind"],
            row["step"],
            row["time_ns"],
            row["values"],
            Calls.from_wire(row["detail"]) if "detail" in row else None,
        )
        for seq, row in enumerate(rows)
    ]


def _end_of_traceback(said: str) -> str:
    """Return the end of what one rank has said: torch puts `[rank0]: ` before each line of it."""
    lines = said.splitlines()
    first = next((found[0] for line in lines if (found := _OF_RANK.match(line))), "")
    mine = [line.removeprefix(first) for line in lines if first and line.startswith(first)]
    mine = [line for line in mine if "<frozen runpy>" not in line and _RUNNER_FILE not in line]
    return "\n".join(mine[-_MOST_LINES:])
