"""The public functions of `torch.distributed`, as they are before any cell runs.

A cell may put functions of its own in their place (`dist.is_initialized = lambda: False`, as tests
of programs do). What they answer is no answer for a recovery, which asks the same names.
"""

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbdist.engine.component import Component, EndedCell


class Functions(Component):
    """What the names of `torch.distributed` lead to when this is made. Main thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, dict[str, Any]]] = [
            (module, {name: it for name, it in vars(module).items() if _is_public(name, it)})
            for module in (dist, distributed_c10d)
        ]

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Put them back after a cell that has failed."""
        if not cell.has_succeeded:
            for line in self.put_back():
                print(line)
        return ()

    def put_back(self) -> list[str]:
        """Put these functions back where others are in their place, while no cell runs.

        Returns:
            A line for people, or none.
        """
        replaced = set()
        for module, kept in self._kept:
            for name, own in kept.items():
                if vars(module).get(name) is not own:
                    setattr(module, name, own)
                    replaced.add(name)
        if not replaced:
            return []
        names = ", ".join(sorted(replaced)[:3]) + (", ..." if len(replaced) > 3 else "")
        return [f"torch.distributed: torch's own {names} put back, which a cell had replaced"]


def _is_public(name: str, value: object) -> bool:
    # `isinstance` asks the value for its class, upon which `dist.reduce_op` warns.
    return type(value) is FunctionType and not name.startswith("_")
