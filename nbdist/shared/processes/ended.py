"""How a process has ended: a value for the hosts, the launchers and the faults.

`str(ended)` puts it into words, for people only: whoever decides asks `kind`.
"""

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class EndKind(StrEnum):
    """What is known of an end."""

    EXIT_CODE = "exit code"
    SIGNAL = "signal"
    OOM_KILLER = "OOM killer"  # the kernel's, which sends SIGKILL; see `host/oom.py`
    HOST_LOST = "host lost"
    UNSEEN = "unseen"  # no process was there to collect its exit status


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process has ended.

    Attributes:
        kind: What is known of it.
        number: The exit code, or the signal's number.
        host: The one that is lost.
        detail: More in words: the memory it held, why its host is lost. Of a signal only the log
            of events has it: that nothing speaks for the OOM killer helps no reader.
        because: Why nbdist ended it, where it did.
    """

    kind: EndKind
    number: int = 0
    host: str = ""
    detail: str = ""
    because: str = ""

    @classmethod
    def from_status(cls, status: int) -> "Ended":
        """Return what a status says: an exit code, or minus a signal's number."""
        return cls(EndKind.EXIT_CODE if status >= 0 else EndKind.SIGNAL, abs(status))

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> "Ended":
        """Return what `to_wire` wrote."""
        return cls(**{**fields, "kind": EndKind(fields["kind"])})

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON-like fields."""
        return asdict(self)

    def unmeasured(self) -> "Ended":
        """Return it without what differs from one time to the next: the memory it held."""
        return replace(self, detail="") if self.kind is EndKind.OOM_KILLER else self

    def __str__(self) -> str:
        """Return e.g. `killed by SIGKILL`, which completes "rank 1 died: "."""
        return self._words() + (f", because {self.because}" if self.because else "")

    def _words(self) -> str:
        match self.kind:
            case EndKind.EXIT_CODE:
                return f"exit code {self.number}"
            case EndKind.SIGNAL:
                return f"killed by {_name_signal(self.number)}"
            case EndKind.OOM_KILLER:
                size = f" ({self.detail})" if self.detail else ""
                return f"killed by the kernel's OOM killer{size}"
            case EndKind.HOST_LOST:
                return f"its host {self.host} is lost: {self.detail}"
            case EndKind.UNSEEN:
                return self.detail or "it ended unseen, after the process that had started it"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
