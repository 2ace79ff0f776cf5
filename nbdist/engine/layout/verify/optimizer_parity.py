"""The user's optimizer in a proof: on parts it does what it does on whole tensors, or differs.

A new optimizer of its class and options steps on the live parts, and one on rank 0's plain model.
Both get one process' gradients bit by bit, so what differs in their updates is the optimizer's.
Twins on rank 0, whose gradients are moved by half a unit of their last place, show its round-off;
of the coarsest dtype that a step computes in, as Muon does in bfloat16. Where that is as large as
updates, nothing can be told, and that is said. Then the live weights become the plain ones', and
the next step begins alike.

Main thread, all ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.axes import whole_matrices, zero1
from nbdist.engine.layout.like_optimizer import made_like
from nbdist.engine.layout.verify.compare import Findings
from nbdist.engine.layout.verify.preconditions import SOURCE, Provable
from nbdist.engine.layout.verify.report import NORM_MULTIPLE
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.layout.weights.full_tensors import TensorFacts
from nbdist.shared.error_text import text_of
from nbdist.shared.errors import LayoutError

LEAST_RATE: Final = 0.01  # below it an update drowns in the round-off of the weights
_TWINS: Final = 2
_MOST_NOISE: Final = 0.5  # of updates, in the distance that is allowed: beyond it nothing is told
_ROUNDING: Final = 1e-6  # of a learning rate in float32


# Updates by name, how far they are from the truth, and the smallest relative error that counts.
_Steps = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an optimizer like the user's is made.

    Attributes:
        original: The user's; of states that are cut over ranks, that of this rank's.
        groups: The options of its groups, without parameters.
        group_of: The number of the group of each parameter that it trains, over all ranks.
        is_cut: Whether its states are cut over ranks.
        raised_from: The smallest learning rate, where `LEAST_RATE` is taken for it.
        has_hooks: Whether its steps have hooks, which a new one has not.
    """

    original: Optimizer
    groups: tuple[Mapping[str, Any], ...]
    group_of: Mapping[str, int]
    is_cut: bool
    raised_from: float | None
    has_hooks: bool

    @property
    def name(self) -> str:
        """Of the class."""
        return type(self.original).__name__

    def make(self, tensors: Mapping[str, torch.Tensor]) -> Optimizer:
        """Return an optimizer of those of these tensors that it trains, on one process."""
        return made_like(self.original, self._filled(tensors))

    def make_live(self, layout: Provable) -> Optimizer:
        """Return an optimizer of this rank's parts."""
        filled = self._filled(full_tensors.names(layout.model))
        if not self.is_cut:
            return made_like(self.original, filled)
        shared = partial(zero1.make, type(self.original), group=layout.mesh.get_group("dp"))
        return made_like(self.original, filled, shared)

    def _filled(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        filled = []
        for number, options in enumerate(self.groups):
            names = [name for name, of in self.group_of.items() if of == number]
            filled.append({**options, "params": [tensors[n] for n in names if n in tensors]})
        # A stage of a pipeline may have nothing to train: torch takes a group without parameters.
        return [group for group in filled if group["params"]] or [{"params": []}]


def recipe(optimizer: object, layout: Provable) -> Recipe:
    """Return how to make an optimizer like the user's. Collective.

    Raises:
        LayoutError: It is none, or trains nothing of this model.
    """
    if not isinstance(optimizer, Optimizer):
        raise LayoutError(
            f"verify got a {type(optimizer).__name__} as its optimizer.",
            do="layout.verify((x, y), loss_fn, optimizer=opt) with one that trains this model; of "
            "several, one after the other",
        )
    own = {id(tensor): name for name, tensor in full_tensors.names(layout.model).items()}
    mine = {
        own[id(parameter)]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) in own
    }
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    group_of = {name: number for one in everyone for name, number in one.items()}
    if not group_of:
        raise LayoutError(
            f"This {type(optimizer).__name__} trains nothing of the model that is verified.",
            do="give the one that was made of this model's parameters, after parallelize",
        )
    inner: Any = getattr(optimizer, "optim", optimizer)
    groups, lowest = [], None
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        if "lr" in options and float(options["lr"]) < LEAST_RATE * (1 - _ROUNDING):
            lowest = min(float(options["lr"]), LEAST_RATE if lowest is None else lowest)
            options["lr"] = LEAST_RATE
        options.pop("initial_lr", None)  # a schedule's
        groups.append(options)
    has_hooks = any(map(torch_hooks.has_step_hooks, (inner, optimizer)))
    return Recipe(inner, tuple(groups), group_of, inner is not optimizer, lowest, has_hooks)


class OptimizerParity:
    """Steps of the user's optimizer on parts and on whole tensors."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Provable,
        plain: nn.Module | None,
        places: Mapping[str, TensorFacts],
    ) -> None:
        """Make the optimizers. Collective.

        Args:
            optimizer: The user's; neither it nor its states are touched.
            layout: The layout that is proven.
            plain: The plain model; on rank 0 only.
            places: The tensors of the layout.

        Raises:
            LayoutError: No optimizer like it can be made.
        """
        self.recipe = recipe(optimizer, layout)
        self._layout = layout
        self._places = {n: p for n, p in places.items() if n in self.recipe.group_of}
        self._whole: dict[str, torch.Tensor] = {}
        if plain is not None:
            held = full_tensors.names(plain)
            self._whole = {name: held[name] for name in self._places}
        self._twins = [_copies(self._whole) for _ in range(_TWINS)]
        self._random = torch.Generator().manual_seed(0)
        self._epsilon = 0.0  # of the coarsest dtype that a step computes in
        try:
            self._live = self.recipe.make_live(layout)
            self._alone = [self.recipe.make(t) for t in (self._whole, *self._twins) if t]
        except Exception as error:
            raise LayoutError(
                f"No second {self.recipe.name} can be made, to step on one process.",
                why=_in_a_line(error),
                do="let its constructor take what its param_groups hold, and nothing else that has "
                "no default",
            ) from error

    def step(
        self,
        step: int,
        findings: Findings,
        gradients: Mapping[str, torch.Tensor],
        reached: Iterable[str],
    ) -> None:
        """Step on all sides with one process' gradients, and compare the weights. Collective.

        Args:
            step: Which, from 1.
            findings: Take what is found.
            gradients: Those of one process, on rank 0.
            reached: The parameters that have one.
        """
        reached = set(reached)
        trained = {n: p for n, p in self._places.items() if n in reached}
        device = self._layout.mesh.device_type
        held = full_tensors.names(self._layout.model)
        mine = {name: held[name] for name in self._places if name in held}
        before = {name: tensor.detach().clone() for name, tensor in mine.items()}
        for tensor in mine.values():
            tensor.grad = None
        for name, full in full_tensors.from_rank_0(trained, gradients, device):
            if name in mine:
                mine[name].grad = full_tensors.cut_like(full, mine[name])
        (updates, errors, least), chance = self._step_alone(gradients)
        self._step_live()
        is_equal = findings.compare_norms(
            "update",
            step,
            {name: tensor.detach() - before[name] for name, tensor in mine.items()},
            full_tensors.from_rank_0(self._places, updates, device),
            full_tensors.from_rank_0(self._places, errors, device),
            least,
        )
        if NORM_MULTIPLE * chance > _MOST_NOISE:
            self._refuse_chance(chance, is_equal=is_equal)
        for name, full in full_tensors.from_rank_0(self._places, self._whole, device):
            if name in mine:
                full_tensors.put(mine[name], full)

    def _step_live(self) -> None:
        try:
            whole_matrices.here.step(self._live)
        except LayoutError:  # it says what works
            raise
        except Exception as error:
            raise LayoutError(
                f"{self.recipe.name} does not step on parts of tensors, as this layout has them.",
                why=_in_a_line(error),
                do='the layout "ddp" keeps them whole, and "zero1", with layout.optimizer, too',
            ) from error

    def _refuse_chance(self, share: float, *, is_equal: bool) -> None:
        """Refuse updates that chance makes, unless they are equal on all ranks. Collective.

        Raises:
            LayoutError: They are not.
        """
        everyone = [is_equal] * dist.get_world_size()
        dist.all_gather_object(everyone, is_equal)
        if not all(everyone):
            raise LayoutError(
                f"What {self.recipe.name} does on parts cannot be told from chance.",
                why="on one process, gradients that differ by a rounding give it updates that "
                f"differ by {100 * share:.0f} %: it draws random numbers, or rounds coarsely",
                do="prove it without these, or layout.verify((x, y), loss_fn) alone",
            )

    def _step_alone(self, gradients: Mapping[str, torch.Tensor]) -> tuple[_Steps, float]:
        """Step on rank 0; updates are empty on the others. Collective.

        Returns:
            The updates, and which share of them is chance.

        Raises:
            LayoutError: The optimizer does not step so.
        """
        made: _Steps = {}, {}, 0.0
        sent: list[Any] = [None]
        if self._whole:
            try:
                made = self._stepped_alone(gradients)
                sent[0] = made[2], _share(*made[:2])
            except Exception as error:
                sent[0] = _in_a_line(error)
        dist.broadcast_object_list(sent, src=SOURCE)
        if isinstance(sent[0], str):
            raise LayoutError(
                f"{self.recipe.name} does not step on whole tensors in one process.",
                why=sent[0],
                do="prove one that steps without a closure, on gradients as this model makes them",
            )
        least, share = sent[0]
        return (made[0], made[1], least), share

    def _stepped_alone(self, gradients: Mapping[str, torch.Tensor]) -> _Steps:
        """Return updates, their errors, and the smallest relative error that counts."""
        mine, *twins = self._alone
        before = {name: whole.detach().clone() for name, whole in self._whole.items()}
        for name, whole in self._whole.items():
            whole.grad = gradients.get(name)
        with _Coarsest() as seen:
            torch_hooks.step_without_hooks(mine)
        own = max(float(torch.finfo(w.dtype).eps) for w in self._whole.values())
        self._epsilon = max(self._epsilon, seen.epsilon, own)
        # An update is a difference of weights: it has their last place.
        errors = {n: whole.detach().abs() * (own / 2) for n, whole in self._whole.items()}
        for optimizer, copies in zip(twins, self._twins, strict=True):
            for name, copy in copies.items():
                copy.grad = self._moved(gradients.get(name))
            torch_hooks.step_without_hooks(optimizer)
            for name, copy in copies.items():
                whole = self._whole[name].detach()
                errors[name] = torch.maximum(errors[name], (copy.detach() - whole).abs())
                copy.detach().copy_(whole)
        updates = {name: whole.detach() - before[name] for name, whole in self._whole.items()}
        return updates, errors, own

    def _moved(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient moved by half a unit of its last place, up or down at random."""
        if gradient is None:
            return None
        signs = torch.randint(0, 2, gradient.shape, generator=self._random) - 0.5
        return gradient * (1 + self._epsilon * signs.to(gradient.device, torch.float64)).to(
            gradient.dtype
        )


class _Coarsest(TorchDispatchMode):
    """Sees the coarsest dtype of what operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.epsilon = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.epsilon = max(self.epsilon, float(torch.finfo(leaf.dtype).eps))
        return result


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: nn.Parameter(tensor.detach().clone()) for name, tensor in tensors.items()}


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(text_of(error).splitlines() or [''])[0]}"


def _share(updates: Mapping[str, torch.Tensor], errors: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of errors over that of updates; 0 where nothing moves."""
    off, size = (
        math.hypot(*(float(one.double().norm()) for one in tensors.values()))
        for tensors in (errors, updates)
    )
    return off / size if size else 0.0
