"""The findings of a rank while a layout is proven: its parts compared with one process's tensors.

Each rank keeps what it finds; `conclude` puts all together.
"""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.verify.report import (
    Difference,
    Noise,
    OnePiece,
    Proof,
    judge,
    norm_allowances,
)
from nbdist.engine.layout.weights import full_tensors


class Findings:
    """Of one rank, in the order of steps.

    Attributes:
        is_bit_equal: Whether no distance was found.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._found: list[Difference] = []
        self.is_bit_equal = True

    def compare(
        self,
        what: str,
        name: str,
        step: int,
        live: torch.Tensor,
        full: torch.Tensor,
        noise: Noise,
        allowed: float,
    ) -> None:
        """Compare this rank's part of a tensor with the whole of one process. No collective."""
        mine = torch_hooks.local_part(live.detach())
        theirs = full_tensors.part_of(full, live)
        if mine.shape != theirs.shape:
            self.note(what, name, step, math.inf, noise.floor, allowed)
        elif mine.numel():
            by = float((mine.double() - theirs.double()).abs().max())
            self.note(what, name, step, by, noise.floor, allowed)

    def compare_norms(
        self,
        what: str,
        step: int,
        live: Mapping[str, torch.Tensor],
        wholes: Iterable[tuple[str, torch.Tensor]],
        errors: Iterable[tuple[str, torch.Tensor]],
        smallest: float,
    ) -> bool:
        """Compare the norms of this rank's parts of tensors. Collective as the iterables.

        Args:
            what: They are, such as "gradient".
            step: Which.
            live: By name.
            wholes: Those of one process.
            errors: How far they are from the truth, element by element; in the same order.
            smallest: As for `allowances`.

        Returns:
            Whether all are equal bit for bit here.
        """
        by: dict[str, float] = {}
        noise: dict[str, Noise] = {}
        sizes: dict[str, int] = {}
        for (name, full), (_, error) in zip(wholes, errors, strict=True):
            if name in live:
                mine = torch_hooks.local_part(live[name])
                theirs, off = (
                    full_tensors.part_of(full, live[name]),
                    full_tensors.part_of(error, live[name]),
                )
                by[name] = _norm(mine.double() - theirs.double())
                noise[name] = Noise(_norm(off), _norm(theirs))
                sizes[name] = mine.numel()
        allowed = norm_allowances(noise, sizes, smallest)
        for name, distance in by.items():
            self.note(what, name, step, distance, noise[name].floor, allowed[name])
        return not any(by.values())

    def note(
        self, what: str, name: str, step: int, by: float, floor: float, allowed: float
    ) -> None:
        """Record a distance; see `Difference` for the arguments."""
        self.is_bit_equal &= by == 0
        self._found.append(Difference(what, name, step, self._rank, by, floor, allowed))

    def beyond(self) -> set[tuple[str, str]]:
        """Return what is further off on this rank than allowed, by kind and name."""
        return {(one.what, one.name) for one in self._found if not one.is_allowed}

    def conclude(
        self,
        layout: str,
        steps: int,
        losses: Iterable[tuple[float, float]],
        notes: Iterable[str],
        terms: Iterable[str],
        unreached: Iterable[str],
        one_piece: OnePiece | None,
    ) -> Proof:
        """Combine the findings of all ranks; the same on every rank. Collective."""
        mine = (_nearest(self._found), self.is_bit_equal, list(notes), list(terms))
        everyone: list[tuple[list[Difference], bool, list[str], list[str]]]
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return judge(
            layout,
            steps,
            [difference for found, *_ in everyone for difference in found],
            losses,
            dict.fromkeys(note for _, _, notes, _ in everyone for note in notes),
            everyone[0][3],
            unreached,
            one_piece,
            is_bit_equal=all(is_equal for _, is_equal, *_ in everyone),
        )


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def _nearest(found: list[Difference]) -> list[Difference]:
    """Return of each tensor and step the furthest difference, and so what others must know."""
    kept: dict[tuple[str, str], Difference] = {}
    first: dict[tuple[str, str], Difference] = {}
    for difference in found:
        key = (difference.what, difference.name)
        if key not in kept or difference.share > kept[key].share:
            kept[key] = difference
        if not difference.is_allowed:
            first.setdefault(key, difference)
    return list(dict.fromkeys([*kept.values(), *first.values()]))
