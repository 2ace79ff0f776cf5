"""Everything that is worked out of a cell's records, on one thread: `nbdist-insight`'s."""

from collections.abc import Sequence

from nbdist.client.insight.parts import Parts
from nbdist.client.insight.values import Analysis, ExplainedStep
from nbdist.wire import Record


class Analyst:
    """One cell's steps and collectives."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Know nothing yet of these ranks."""
        self._ranks = ranks
        self._parts = Parts()
        self._left_out = 0

    def take(self, records: Sequence[Record], *, is_last: bool) -> list[ExplainedStep]:
        """Take records of any ranks; return the steps that are explained now, in order.

        Args:
            records: Each rank's in the order in which it made them, as far as they have come.
            is_last: No more will come: do not wait for a rank's.
        """
        for record in records:
            if record.kind == "step":
                self._parts.add_step(record.rank, record.values)
            elif record.detail is not None:
                self._left_out += record.detail.skipped
        return []

    def analysis(self) -> Analysis:
        """Return all that is known."""
        return Analysis(ranks=self._parts.means(), left_out=self._left_out)
