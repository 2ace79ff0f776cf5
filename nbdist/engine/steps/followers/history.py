"""Know in which turns something has moved, and so in which it is due again. Pure."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class History:
    """When something has moved, in turns.

    Attributes:
        born: The turn in which it was found.
        moved: The last in which it has moved; None: never.
        least: Turns between two moves, and the most; 0 before the first.
        beside: The names of the optimizers that have stepped in the turn of its last move.
    """

    born: int
    moved: int | None = None
    least: int = 0
    most: int = 0
    beside: frozenset[str] = frozenset()

    def after_move(self, turn: int, beside: frozenset[str] = frozenset()) -> "History":
        """Return this with a move in `turn`, in which the optimizers of these names stepped."""
        gap = turn - self.born + 1 if self.moved is None else turn - self.moved
        least = min(self.least or gap, gap) if self.moved is not None or not self.least else gap
        return replace(self, moved=turn, least=least, most=max(self.most, gap), beside=beside)

    def is_due(self, turn: int, stepped: frozenset[str] = frozenset()) -> bool:
        """Return whether it should move in `turn`; of what was found in it, this is not known.

        It moves with its optimizers: where none of them is among those that have `stepped`, never.
        """
        if self.moved is None:
            return turn == self.born and not self.beside
        if self.beside and not self.beside & stepped:
            return False
        return self.least <= turn - self.moved <= self.most

    def is_regular(self, turn: int) -> bool:
        """Return whether what is due in `turn` moves in it for certain, and not now and then."""
        return self.moved is not None and (self.least == self.most or turn - self.moved == 1)
