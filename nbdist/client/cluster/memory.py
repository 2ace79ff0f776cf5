"""The state that a kernel needs to attach to a cluster: sent to the keeper at each change.

Plain values, which the keeper does not look into (`host/door.py`): the facts of the cluster, what
the session adds, and the cell that runs. Sent by the main thread.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)


class ClusterMemory:
    """The state of one cluster, as long as this kernel has it."""

    def __init__(
        self,
        name: str,
        facts: Callable[[], Mapping[str, Any] | None],
        send: Callable[[Any, str], None],
    ) -> None:
        """Begin with nothing sent.

        Args:
            name: The cluster's.
            facts: Returns what `Cluster.adopt` takes; None once it is stopped.
            send: Takes the value, and a line about what runs.
        """
        self.name = name
        self.session: Mapping[str, Any] = {}
        self.cells = 0  # that have been run
        self._facts = facts
        self._send = send
        self._cell: Mapping[str, Any] | None = None

    def cell_began(self, cell: Mapping[str, Any]) -> None:
        """Note a cell that has been sent; its listener is made again from `cell`."""
        self._cell = cell
        self.cells = cell["start"]["number"]
        self.changed()

    def cell_ended(self) -> None:
        """Note that the end of the cell has been shown."""
        self._cell = None
        self.changed()

    def changed(self) -> None:
        """Send everything again; a cluster that is being stopped sends nothing."""
        facts = self._facts()
        if facts is None:
            return
        value = {"cluster": facts, "session": self.session, "cells": self.cells, "cell": self._cell}
        self._send(value, self._says(facts))

    def _says(self, facts: Mapping[str, Any]) -> str:
        n = len(facts["ranks"])
        text = f"{n} rank{'s' if n != 1 else ''} on {facts['options']['device']}"
        if self._cell is None:
            return f"{text}, no cell runs"
        at = time.strftime("%H:%M", time.localtime(self._cell["began"]))
        return f"{text}, cell [{self._cell['start']['prompt']}] began at {at}"
