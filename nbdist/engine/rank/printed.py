"""Print the values of `nbdist.log` in a script: each name by exactly one rank.

It is rank 0 if that logs the name. With pipeline stages it may not: only the last stage has a
loss. Then it is the lowest of the ranks that do, which write so to the store. No rank
waits for another. A rank holds its first line of a name until its next step, its next line of that
name or the script's end: ranks that train together meet in every step, so a lower one that logs the
name has written so by then. A rank that has printed a name prints it at once from then on.

Main thread.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed import DistError

from nbdist.shared.text import figure


class PrintedNumbers:
    """The lines of one rank."""

    def __init__(self, rank: int, world_size: int, names: Any) -> None:
        """Begin with nothing logged.

        Args:
            rank: This one.
            world_size: Number of ranks; with one, no other is asked.
            names: torch's store of all ranks, with a prefix.
        """
        self._rank = rank
        self._names = names  # of which torch's types lack methods
        self._is_alone = world_size == 1
        self._is_mine: dict[str, bool] = {}  # by name, once it is decided
        self._held: list[tuple[int, Mapping[str, float]]] = []
        self._step = 0

    def stepped(self, step: int) -> None:
        """Note the step that is complete."""
        self._step = step
        self.decide()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Print a line, or hold it.

        Args:
            step: At which it was logged; 0 if steps are not counted, except by `stepped`.
            numbers: By name.
        """
        if any(name in held for _, held in self._held for name in numbers):
            self.decide()
        step = step or self._step
        unknown = [name for name in numbers if name not in self._is_mine]
        for name in unknown:
            self._note(name)
        if any(name not in self._is_mine for name in unknown):
            self._held.append((step, numbers))
        else:
            self._print(step, numbers)

    def decide(self) -> None:
        """Print what is held, as far as no other rank prints it."""
        held, self._held = self._held, []
        for step, numbers in held:
            for name in numbers:
                if name not in self._is_mine:
                    self._is_mine[name] = self._take(name)
            self._print(step, numbers)

    def _note(self, name: str) -> None:
        """Write to the store that this rank logs a name, while the printing rank is unknown."""
        if self._is_alone:
            self._is_mine[name] = True
        elif self._rank == 0:
            self._is_mine[name] = self._take(name)
        else:
            try:
                self._names.append(f"by/{name}", f"{self._rank} ")
            except DistError:
                self._is_mine[name] = True  # it cannot ask: twice is better than never

    def _take(self, name: str) -> bool:
        """Return whether this rank prints a name from here on."""
        try:
            if self._rank:
                loggers = map(int, self._names.get(f"by/{name}").split())
                if min(loggers) < self._rank:
                    return False
            me = str(self._rank)
            printer: bytes = self._names.compare_set(f"of/{name}", "", me)
            return printer.decode() == me
        except DistError:
            return True

    def _print(self, step: int, numbers: Mapping[str, float]) -> None:
        text = ", ".join(
            f"{name} {figure(value)}" for name, value in numbers.items() if self._is_mine[name]
        )
        if text:
            print(f"step {step:,}: {text}" if step else text, flush=True)
