"""Links between ranks, and the time that messages take on them: plain numbers.

The model is that of Hockney (1994): a message of n bytes takes latency + n / bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nbdist.study.estimate import Traffic


@dataclass(frozen=True, slots=True)
class Link:
    """Between two ranks, in one direction.

    Attributes:
        latency_s: Of a message without content.
        bandwidth: Bytes a second that one rank sends.
        name: As people write it: "NVLink 4".
        source: Where the figures come from.
    """

    latency_s: float
    bandwidth: float
    name: str = ""
    source: str = ""

    def time_s(self, sent: Traffic) -> float:
        """Return the seconds of collectives whose messages all go over this link."""
        return sent.rounds * self.latency_s + sent.nbytes / self.bandwidth


# By the word that users write. What a training reaches is less than a data sheet says: each source
# is of measured collectives, or the share is named.
LINKS: Final[Mapping[str, Link]] = {}
