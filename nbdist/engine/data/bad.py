"""Say what is wrong with data: a sample that cannot be loaded, workers that died or hung.

Workers are started again, which is safe: no loop had received what they had fetched. A few times;
then it is an error. Main thread.
"""

import logging
import re
import signal
from collections.abc import Sequence
from typing import Self

import torch.distributed as dist

from nbdist.engine.compat.torch_loaders import SampleFault
from nbdist.shared.errors import DataError
from nbdist.shared.text import counted, name_ranks

MOST_RESTARTS = 3  # of one loop's workers

_HUNG = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
_GO_ON = "%dist retry, which goes on with this batch"
_log = logging.getLogger("nbdist.data")


class ElsewhereError(Exception):
    """Stands for what a worker raised, with its traceback as text."""

    def __str__(self) -> str:
        return str(self.args[0])

    @classmethod
    def of(cls, fault: SampleFault) -> Self:
        """Return it for a sample."""
        return cls(f"in a worker of the loader:\n{fault.traceback}")


def of_sample(fault: SampleFault, *, skips: bool) -> DataError:
    """Return the error for a sample, or, with `skips`, for a batch of which nothing is left."""
    where = f" of {fault.origin}" if fault.origin else ""
    place = f", raised at {fault.place}" if fault.place else ""
    error = fault.error.strip()
    if skips:
        return DataError(
            f"Nothing of a whole batch could be loaded on rank {_rank()}.",
            why=f"its last try, sample {fault.sample}{where}, failed with {error}{place}",
            do=f"see what fails with dataset[{fault.sample}], then {_GO_ON}",
        )
    return DataError(
        f"Sample {fault.sample}{where} could not be loaded on rank {_rank()}: {error}",
        why=f"the dataset raised it for this sample{place}",
        do=f'correct it, then {_GO_ON}; nbdist.loader(..., on_bad="skip") leaves such samples out',
    )


def end_of_workers(error: Exception, dead: Sequence[tuple[int, int]]) -> str | None:
    """Return how workers ended, such as "worker 4711 was killed by SIGKILL"; None if none did.

    Args:
        error: What torch raised.
        dead: Pid and exit code of each that has died.
    """
    if dead:
        return ", ".join(f"worker {pid} {_end(code)}" for pid, code in dead)
    hung = _HUNG.search(str(error))
    return f"workers gave no batch for {hung[1]} s (timeout=)" if hung else None


def of_workers(how: str, error: Exception, times: int) -> DataError:
    """Return the error for workers that end again and again.

    torch's own words stay in it: of a full /dev/shm they say so.
    """
    return DataError(
        f"The loader's workers ended {times} times on rank {_rank()}: {how}.",
        why=f"memory is the usual reason, for each worker holds what the dataset reads; torch says "
        f"{str(error).strip()!r}",
        do=f"use fewer workers or smaller batches, or num_workers=0 to see an error of its own; "
        f"then {_GO_ON}",
    )


def tell_restart(how: str, times: int, consumed: int) -> None:
    """Say that other workers go on."""
    _log.warning(
        "%s: %s. The loader started others, which go on at sample %s of the epoch (%s of %s).",
        name_ranks([_rank()]).capitalize(),
        how,
        f"{consumed:,}",
        counted(times, "restart"),
        MOST_RESTARTS,
    )


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
