"""A host is told to leave while a cell runs: its training is saved, and the cell is ended.

Ranks do the saving (`engine/checkpoint/automatic.py`), where the cell was given `--checkpoint`.
Main thread only; asks on the control channel and never waits for an answer.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any, Final

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.requests import PendingReply
from nbdist.client.faults.advice import WhatRan
from nbdist.client.faults.fault_handler import FaultHandler
from nbdist.client.output.live_text import LiveText
from nbdist.shared.errors import ClusterError

log = logging.getLogger(__name__)

_ASK_S: Final = 0.3  # between two looks at what is being written


class Leaving:
    """What one cell does about a notice."""

    def __init__(self, cluster: Cluster, live: LiveText, ran: WhatRan) -> None:
        """Begin without a notice."""
        self._cluster = cluster
        self._live = live
        self._ran = ran
        self._asked: dict[int, PendingReply] = {}
        self._next = "hold"  # what is asked next; "" when all is done
        self._ask_at = 0.0
        self._saved: dict[str, Any] = {}

    def error(self) -> ClusterError | None:
        """Return what has ended the cell, where it is this."""
        if not self._saved:
            return None
        notice = self._cluster.notice
        if error := self._saved["error"]:
            return ClusterError(f"{notice} {self._ran.title} was stopped.", why=error)
        return ClusterError(
            f"{notice} The training was saved, and {self._ran.name} was stopped.",
            why=f"step {self._saved['step']:,} is in {self._saved['folder']}.",
            do=self._ran.after_leaving,
        )

    def attend(self, running: list[int], faults: FaultHandler) -> None:
        """Do what is due: ask the ranks that run, and interrupt them when all is saved."""
        if not self._cluster.notice or not self._next:
            return
        if not self._asked:
            if time.monotonic() >= self._ask_at:
                self._ask(running)
            return
        if not all(one.done() for one in self._asked.values()):
            return
        asked, self._asked = self._asked, {}
        failed = [error for one in asked.values() if (error := one.exception()) is not None]
        if failed:  # a rank has died, and others see to that
            log.warning("The training is not saved before its hosts leave: %s", failed[0])
            self._end_hold(None)
            self._next = ""
            return
        self._take([one.result() for one in asked.values()])
        if self._saved and not faults.interrupted:
            faults.interrupt(running)

    def _ask(self, running: Iterable[int]) -> None:
        requests = self._cluster.requests
        self._ask_at = time.monotonic() + _ASK_S
        if self._next == "hold":
            self._live.tell(self._cluster.notice)
            self._asked |= {rank: requests.ask(rank, "leaving.hold", busy=True) for rank in running}
        else:
            self._asked |= {
                rank: requests.ask(rank, "leaving.outcome", busy=True) for rank in running
            }

    def _take(self, answers: list[dict[str, Any]]) -> None:
        """Take what all ranks have answered."""
        if self._next == "outcome":
            if all(one["is_over"] for one in answers):
                self._next = ""
                self._saved = next((one for one in answers if one["error"]), answers[0])
        elif all(one["saves"] for one in answers):
            self._end_hold(1 + max(one["passed"] for one in answers))
            self._next = "outcome"
        else:
            self._live.tell(
                f"With {self._ran.checkpoint}, the training would be saved now. It goes on."
            )
            self._next = ""

    def _end_hold(self, boundary: int | None) -> None:
        for rank in self._cluster.living():
            self._cluster.requests.ask(rank, "leaving.go_on_to", busy=True, boundary=boundary)
