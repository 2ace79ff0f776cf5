"""`nbdist.dry`: whether a cell comes to its end on any number of ranks, without a cluster.

A process of its own runs the cell once as each rank, on tensors without numbers (`engine/dry`), and
compares what they would call (`study/dry`).
"""

import pickle
import re
import subprocess
import sys
from collections.abc import Sequence

from nbdist.shared.errors import UsageError
from nbdist.shared.text import parse_ranks
from nbdist.study.dry import DryRun

MOST_RANKS = 1024
_TIMEOUT_S = 400.0
_MOST_LINES = 12  # of what a process said that ended without an answer
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def dry(
    code: str,
    n: int,
    *,
    memory: str | int | None = None,
    ranks: str = "all",
    before: Sequence[str | tuple[int, str]] = (),
    ranks_on_host: int = 8,
) -> DryRun:
    """Return what a cell would do on `n` ranks: its end, or what goes wrong, with the line.

    Needs no cluster, and touches no rank, variable, run, checkpoint or file: a process of its own
    runs the cell as each rank, where tensors have shapes and no numbers, and what is written goes
    nowhere. Of loops that train, the first two turns and the last are run. Where the cell decides
    by a number of a tensor, both outcomes are tried.

    Args:
        code: The cell's.
        n: Ranks, 1 to 1024.
        memory: Bytes that the tensors of a rank may take, such as "80GB"; None asks nothing.
        ranks: Those that run the cell, as `%%distributed -r` has them.
        before: Code of cells that ran before it, with their numbers if they have some: models and
            data that ranks hold cannot be taken over, and are made again.
        ranks_on_host: Ranks of one host, for `local_rank`.

    Raises:
        UsageError: An argument makes no sense, or the process ended without an answer.
    """
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_RANKS:
        raise UsageError(f"A dry run is of 1 to {MOST_RANKS:,} ranks, and not of {n!r}.")
    earlier = [one if isinstance(one, tuple) else (at, one) for at, one in enumerate(before, 1)]
    cell = {
        "code": code,
        "before": tuple(earlier),
        "world_size": n,
        "ranks_on_host": min(ranks_on_host, n),
        "memory": 0 if memory is None else size_of(memory),
    }
    return _ask({"path": sys.path, "cell": cell, "ranks": parse_ranks(ranks, n)})


def size_of(text: str | int) -> int:
    """Return the bytes that such as "80GB" means.

    Raises:
        UsageError: It means none.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([kKMGT]?i?B?)\s*", str(text))
    try:
        assert found is not None
        return int(float(found[1]) * _UNITS[found[2]])
    except (AssertionError, KeyError, ValueError):
        raise UsageError(
            f"{text!r} is no size of memory.", do='give bytes, or such as "80GB" or "24GiB"'
        ) from None


def _ask(request: dict[str, object]) -> DryRun:
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "nbdist.engine.dry.cell_child"],
            input=pickle.dumps(request),
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"The dry run has no answer after {_TIMEOUT_S:.0f} s.") from error
    if not ran.stdout:
        said = ran.stderr.decode(errors="replace").splitlines()[-_MOST_LINES:]
        raise UsageError("The process of the dry run ended without an answer.", why="\n".join(said))
    found = pickle.loads(ran.stdout)  # of our own process
    assert isinstance(found, DryRun)
    return found
