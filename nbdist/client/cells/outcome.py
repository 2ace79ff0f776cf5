"""The outcome of a cell: which ranks launch no more collectives, and what is raised.

Pure: it reads what the ranks have reported.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from nbdist.client.cells.listener import CellFailure, RankListener
from nbdist.client.cluster.processes import RankProcess
from nbdist.client.faults.advice import WhatRan
from nbdist.client.faults.failures import Death, Failure, collective_of, is_consequence, place_of
from nbdist.client.faults.rank_state import Inactive
from nbdist.client.faults.stderr_tail import LastOutput
from nbdist.client.output.merge import Shown
from nbdist.client.output.result import RankResult
from nbdist.client.output.terminal import RankOutput
from nbdist.shared import gpu_errors, plain
from nbdist.shared.text import name_ranks


def gone(
    ranks: Mapping[int, RankProcess], collectors: Mapping[int, RankListener], ran: WhatRan
) -> dict[int, Inactive]:
    """Return the ranks that launch nothing more in a cell, and why.

    Args:
        ranks: All of the cluster.
        collectors: Of the ranks that were asked to run it.
        ran: How it is called.
    """
    _, _, asked = name_ranks(collectors).partition(" ")
    found = {}
    for rank, state in ranks.items():
        collector = collectors.get(rank)
        if collector is None and state.alive:
            found[rank] = Inactive("absent", f"-r {asked.replace(' ', '')}", ran)
        elif collector is None:
            found[rank] = Inactive("dead", str(state.ended), ran)
        elif collector.death is not None:
            found[rank] = Inactive("died", str(collector.death), ran)
        elif collector.failure is not None:
            found[rank] = _gone_by(failure(rank, collector.failure), ran)
        elif collector.replied:
            found[rank] = Inactive("finished", ran=ran)
    return found


def is_news(collectors: Collection[RankListener]) -> bool:
    """Return whether there is more to do than to wait on: a rank has failed, or all have settled.

    Args:
        collectors: Of the ranks that were asked to run the cell.
    """
    has_fault = any(c.failure or c.death is not None for c in collectors)
    return has_fault or all(c.settled for c in collectors)


def _gone_by(failed: Failure, ran: WhatRan) -> Inactive:
    if is_consequence(failed):
        return Inactive("freed", collective_of(failed), ran)
    detail = ", ".join(filter(None, (failed.ename, place_of(failed))))
    return Inactive("failed", detail, ran)


def in_loops(collectors: Mapping[int, RankListener]) -> bool:
    """Return whether loops of the cell would start over if it were run by hand."""
    return any(collector.summary.in_loops for collector in collectors.values())


def deaths(
    collectors: Mapping[int, RankListener], last_words: Callable[[int], LastOutput]
) -> list[Death]:
    """Return how ranks died in the cell, with what they wrote last."""
    found = []
    for rank, collector in collectors.items():
        if (ended := collector.death) is not None:
            said, at = last_words(rank), collector.died_at
            found.append(Death(rank, ended, at, said.lines, said.place, said.gpu))
    return found


def places(ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """Return each rank's host and device, such as `node-b, cuda:0`."""
    return {rank: f"{state.host}, {state.device}" for rank, state in ranks.items()}


def result(collector: RankListener, output: RankOutput) -> RankResult:
    """Return what one rank gave."""
    summary = collector.summary
    value = summary.value_repr if summary.value_repr is not None else plain.decode(summary.value)
    error = None
    if collector.failure:
        error = (collector.failure.ename, collector.failure.evalue)
    elif collector.death:
        error = ("Died", str(collector.death))
    return RankResult(
        rank=collector.rank,
        value=value,
        text=output.text(),
        displays=tuple(item.display for item in output.items() if isinstance(item, Shown)),
        error=error,
        seconds=summary.seconds,
    )


def failures(
    collectors: Mapping[int, RankListener], last_words: Callable[[int], LastOutput]
) -> list[Failure]:
    """Return the errors of the ranks that raised, with what of a GPU is known of them."""
    found = []
    for rank, collector in collectors.items():
        if (error := collector.failure) is not None:
            gpu = gpu_errors.explain(error.evalue)
            if gpu is not None and gpu.ends_context:
                # Which check of a kernel it was is on the rank's standard error alone.
                gpu = gpu_errors.explain(error.evalue, "\n".join(last_words(rank).asserted))
            found.append(replace(failure(rank, error), gpu=gpu))
    return found


def failure(rank: int, error: CellFailure) -> Failure:
    """Return a rank's error as `rank_errors` takes it."""
    return Failure(rank, error.ename, error.evalue, error.traceback, error.at)
