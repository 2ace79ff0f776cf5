"""The time that a rank owes its virtual device. Pure."""

from typing import Final

SLICE_S: Final = 1e-3  # what is worth a sleep: the system's own sleeps are 0.1 ms too long
MOST_CREDIT_S: Final = 0.1


class Debt:
    """What computation still has to wait, or by how much it is late.

    Computation that took longer here than on the device is made up by what follows, as a GPU's
    queue makes up for slow launches, but not beyond a collective: there other ranks see it.

    Attributes:
        virtual_s: Seconds that the device has computed for.
        late_s: Seconds of these ranks' computation that nothing made up for.
    """

    def __init__(self) -> None:
        self.virtual_s = 0.0
        self.late_s = 0.0
        self._owed_s = 0.0

    def charge(self, virtual_s: float, spent_s: float) -> float:
        """Add a computation; return the seconds to sleep now, 0 while they are too few.

        Args:
            virtual_s: What it takes on the device.
            spent_s: What it took here.
        """
        self.virtual_s += virtual_s
        self._owed_s += virtual_s - spent_s
        if self._owed_s < -MOST_CREDIT_S:
            self.late_s -= self._owed_s + MOST_CREDIT_S
            self._owed_s = -MOST_CREDIT_S
        return self._owed_s if self._owed_s >= SLICE_S else 0.0

    def settle(self) -> float:
        """Return the seconds to sleep before a collective; what is late by then stays late."""
        if self._owed_s < 0:
            self.late_s -= self._owed_s
            self._owed_s = 0.0
        return self._owed_s

    def begin_again(self) -> None:
        """Count from here on; what is owed stays."""
        self.virtual_s = self.late_s = 0.0

    def slept(self, seconds: float) -> None:
        """Note for how long it has slept, which is longer than it was asked to."""
        self._owed_s -= seconds


def share_kept(virtual_s: float, late_s: float) -> float:
    """Return the share of the virtual time that real time kept up with, from 0 to 1."""
    return virtual_s / (virtual_s + late_s) if virtual_s > 0 else 1.0
