"""Values from the notebook to ranks and back; each waits on the main thread until all have them."""

import logging
import re
import signal
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.requests import PendingReply
from nbdist.shared import payload
from nbdist.shared.error_text import named
from nbdist.shared.errors import ClusterError, Interrupted, NBDistError, TransferError, UsageError
from nbdist.shared.text import begin_with_ranks

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
_NO_NAME = re.compile(r'rank (\d+): NameError: there is no variable (".*")')
_BY_NAME = re.compile(r"Can't get attribute '([\w.]+)' on <module '__main__'")
_INTERRUPT_TIMEOUT_S = 3.0

_Futures = Mapping[int, PendingReply]


def push(cluster: Cluster, values: Mapping[str, Any], ranks: Iterable[int]) -> None:
    """Set names on these living ranks; see `Session.push`."""
    if not isinstance(values, Mapping):
        raise UsageError(
            f"push takes a dict of names and their values, not {values!r:.50}.",
            do='for example session.push({"lr": 0.1})',
        )
    for name in values:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"{name!r} is not a name that Python allows.")
    try:
        buffers = payload.pack(list(values.values()))
    except TransferError as error:
        raise _name_culprit(values) or error from error
    names, requests = list(values), cluster.requests
    futures = {
        rank: requests.ask(rank, "transfer.push", buffers=buffers, names=names) for rank in ranks
    }
    _wait(cluster, futures, "push")


def pull(cluster: Cluster, name: str, ranks: Iterable[int]) -> list[Any]:
    """Return the value of a name on each of these living ranks; see `Session.pull`."""
    requests = cluster.requests
    futures = {rank: requests.ask(rank, "transfer.pull", buffers=[], name=name) for rank in ranks}
    answers = _wait(cluster, futures, "pull")
    try:
        return [payload.unpack(buffers) for _, buffers in answers.values()]
    except Exception as error:
        raise TransferError(
            f"{name} arrived, but cannot be unpickled in the notebook.",
            why=named(error),
            do="pull what it is made of (state_dict, arrays, numbers), or import its module "
            "here first.",
        ) from error


def _wait(cluster: Cluster, futures: _Futures, what: str) -> dict[int, Any]:
    try:
        return _answers(futures, what, _TIMEOUT_S)
    except KeyboardInterrupt:
        for rank, future in futures.items():
            if not future.done():
                cluster.signal(rank, signal.SIGCONT)  # a stopped process hears nothing else
                cluster.requests.interrupt(rank, future.message)
        try:
            _answers(futures, what, _INTERRUPT_TIMEOUT_S)
        except NBDistError as error:
            log.info("%s", error)
        # What is still on its way is unknown: a large push may arrive after all.
        late = [rank for rank, future in futures.items() if not future.done()]
        still = f" {begin_with_ranks(late)} may still finish it." if late else ""
        raise Interrupted(f"The {what} was stopped.{still}") from None


def _answers(futures: _Futures, what: str, timeout_s: float) -> dict[int, Any]:
    answers = {}
    deadline = time.monotonic() + timeout_s
    for rank, future in futures.items():
        try:
            answers[rank] = future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise TransferError(
                f"Rank {rank} did not answer the {what} in {timeout_s:.0f} s.",
                do="%dist stacks shows what it does.",
            ) from None
        except ClusterError:
            raise
        except Exception as error:
            raise _failed(what, str(error)) from error
    return answers


def _failed(what: str, reason: str) -> TransferError:
    """Return the error for a rank that failed with `reason`. Pure."""
    if what == "pull" and (no_name := _NO_NAME.match(reason)):
        rank, name = no_name.groups()
        return TransferError(f"Rank {rank} has no variable {name}; a %%distributed cell sets one.")
    by_name = _BY_NAME.search(reason) if what == "push" else None
    if by_name is None:
        return TransferError(f"{what} failed: {reason}")
    return TransferError(
        f"{what} failed: {reason}",
        why=f"{by_name[1]} is pickled by its name, as functions of functools.cache are, and the "
        "ranks have no such name",
        do=f"define {by_name[1]} in a %%distributed cell, or push the function that it wraps",
    )


def _name_culprit(values: Mapping[str, Any]) -> TransferError | None:
    """Return the error of the first value that cannot travel by itself, with its name."""
    for name, value in values.items():
        try:
            payload.pack(value)
        except TransferError as error:
            return TransferError(f"{name}: {error.what}", do=error.do)
    return None
