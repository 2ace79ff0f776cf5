"""Experts that are modules of a list: ranks have some each, and compute them for all.

The forward that calls them stays as it is written, whichever experts it calls, in which order, and
how often. It runs twice (`twice`): all its calls are known, and their rows go to the ranks of their
experts at once. All ranks make the same exchanges, forward and backward, also one whose tokens
choose no expert, and one whose experts no token has chosen.
"""

# R rows of a call, H width, E experts, N ranks of ep

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.axes.ep import exchange, own_weights
from nbdist.engine.layout.axes.ep.twice import Call, Twice, called
from nbdist.engine.layout.plan import random_numbers
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.training import expert_load

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of experts in the plan of ep.

    Attributes:
        name: Its qualified name.
        parent: That of the module whose forward calls them.
        count: How many they are.
        width: H, of what they are given.
        keyword: By which name; None by position.
        chosen: Experts of a token.
        token_bytes: Of rows, for a token of a batch, were all of them sent, forward and backward.
    """

    name: str
    parent: str
    count: int
    width: int
    keyword: str | None
    chosen: float
    token_bytes: float


class Owners:
    """The experts of a list, each with its owner. Main thread, or autograd's.

    Attributes:
        counts: Rows of each of this rank's experts in the newest forward; empty before the first.
    """

    def __init__(
        self,
        parent: nn.Module,
        experts: Sequence[nn.Module],
        plan: Listed,
        mesh: DeviceMesh,
        *,
        is_alone: bool,
    ) -> None:
        """Note where the experts have their parameters; these are whole yet.

        `is_alone`: no ranks beside those of the mesh average gradients with them.
        """
        self.counts: list[int] = []
        self._parent, self._experts = parent, list(experts)
        self._plan, self._mesh, self._is_alone = plan, mesh, is_alone
        self._count = plan.count // mesh.size()
        self._first = mesh.get_local_rank() * self._count
        self._places = [own_weights.places_of(expert) for expert in experts]
        self.places = list(chain.from_iterable(self._places))
        # A forward that reads them instead of calling experts fails: who has some has others, too.
        self._nowhere = [own_weights.Elsewhere.of(m.get_parameter(n)) for m, n in self.places]
        self._results: dict[Any, tuple[int, torch.dtype]] = {}

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        weights_of: Callable[[list[list[Tensor]]], list[list[Tensor]]],
    ) -> Any:
        """Return what the parent's forward makes with experts of all ranks.

        Args:
            forward: The parent's.
            args: Its arguments.
            keywords: And keywords.
            weights_of: Makes this rank's experts' parameters of what it holds of all experts'.

        Raises:
            LayoutError: See `Twice`.
        """
        each = len(self._places[0])
        with own_weights.holding(self.places, self._nowhere) as held:
            weights = weights_of([held[i:][:each] for i in range(0, len(held), each)])

            def placeholder(rows: Tensor) -> Tensor:
                width, dtype = self._result(rows, weights)
                return rows.new_full((*rows.shape[:-1], width), 0.5, dtype=dtype)

            twice = Twice(
                self._plan.name,
                self._parent,
                forward,
                self._experts,
                self._plan.keyword,
                on_gpu=self._mesh.device_type == "cuda",
            )
            twice.look(args, keywords, placeholder)
            own = [p for p in self._parent._parameters.values() if p is not None]
            before = [*chain.from_iterable(weights), *twice.given, *own]
            back = self._exchange(twice.calls, weights, before)
            output = twice.run(args, keywords, _by_call(back, twice.calls))
        leaves, spec = tree_flatten(output)
        floats = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
        for i, after in zip(
            floats, exchange.after([back], *(leaves[i] for i in floats)), strict=True
        ):
            leaves[i] = after
        return tree_unflatten(leaves, spec)

    def weight_bytes(self, dims: list[int | None]) -> int:
        """Return what a forward and its backward exchange of parameters cut in these dims."""
        total, ranks = 0, self._mesh.size()
        each = zip(self.places, self._nowhere, dims * self._plan.count, strict=True)
        for (module, name), whole, dim in each:
            parameter, size = module._parameters[name], whole.element_size()
            if dim is not None and parameter is not None:
                nbytes = whole.numel() // ranks * size
                # Of a gradient also whether there is one.
                total += nbytes + (nbytes + size) * parameter.requires_grad
        return total

    def _exchange(
        self, calls: list[Call], weights: list[list[Tensor]], before: list[Tensor]
    ) -> Tensor:
        """Return the results of all rows of calls, in the order of their experts.

        `before`: Of what calls may have been made, so that backward gets there also without any.
        """
        own, group = self._count, self._mesh.get_group()
        in_order = sorted(calls, key=lambda call: call.number)  # stable
        given = [call.rows.reshape(-1, call.rows.shape[-1]) for call in in_order]
        rows, sends, come = self._told(in_order, given, weights[0][0])
        sizes = [n // 2 for _, *of_experts, _ in come for n in of_experts]
        receives = [sum(sizes[i:][:own]) for i in range(0, len(sizes), own)]
        (rows,) = exchange.after(before, rows)
        arrived = exchange.sent(rows, sends, receives, group)
        pieces = list(arrived.split(sizes))
        self.counts = [sum(sizes[j::own]) for j in range(own)]
        if self._parent.training and not torch_hooks.is_in_backward():  # else it runs again
            even = sum(of_rank[-1] for of_rank in come) / len(come)
            expert_load.here.note(self._plan.name, self._first, self.counts, even)
        width, dtype = self._result(rows, weights)
        made = [piece.new_empty((len(piece), width), dtype=dtype) for piece in pieces]
        for j in range(own):
            given_j = torch.cat(pieces[j::own])
            if any(of_rank[j + 1] % 2 for of_rank in come):
                result = self._call(j, weights[j], given_j)
            elif self._is_alone:
                continue  # no gradient, as in one process
            else:
                # Zeros, for others that average with these may have called it.
                result = self._call(j, weights[j], given_j.new_ones(1, given_j.shape[1]))[:0]
            made[j::own] = result.to(dtype).split([len(piece) for piece in pieces[j::own]])
        (results,) = exchange.after([arrived], torch.cat(made))
        return exchange.sent(results, receives, sends, group)

    def _told(
        self, in_order: list[Call], given: list[Tensor], like: Tensor
    ) -> tuple[Tensor, list[int], list[list[int]]]:
        """Return the rows, how many each rank gets, and what comes; the host waits once.

        From each rank comes what rows are, for one without any to make its own so, and of each of
        this rank's experts twice how many, and one more if it is called at all; last, all its rows.
        """
        own, ranks = self._count, self._mesh.size()
        numbers = [0] * self._plan.count
        for call, rows in zip(in_order, given, strict=True):
            numbers[call.number] = (numbers[call.number] + 2 * len(rows)) | 1
        kind = max((_DTYPES.index(rows.dtype) + 1 for rows in given), default=0)
        everything = sum(map(len, given))
        table = torch.tensor(
            [[kind, *numbers[i:][:own], everything] for i in range(0, len(numbers), own)],
            device=like.device,
        )
        come = torch.empty_like(table)
        dist.all_to_all_single(come, table, group=self._mesh.get_group())
        told: list[list[int]] = come.tolist()
        highest = max(of_rank[0] for of_rank in told)
        dtype = _DTYPES[highest - 1] if highest else like.dtype
        rows = torch.cat([like.new_empty((0, self._plan.width), dtype=dtype), *given]).to(dtype)
        sends = [sum(n // 2 for n in numbers[i:][:own]) for i in range(0, ranks * own, own)]
        return rows, sends, told

    def _call(self, j: int, weights: list[Tensor], rows: Tensor) -> Tensor:
        number = self._first + j
        with own_weights.holding(self._places[number], weights):
            return called(self._experts[number], rows, self._plan.keyword)

    @torch.no_grad()
    def _result(self, rows: Tensor, weights: list[list[Tensor]]) -> tuple[int, torch.dtype]:
        """Return the width and the type of results, tried with one row for each kind of rows."""
        device = rows.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kind = rows.dtype, rows.shape[-1], weights[0][0].dtype, cast
        if kind not in self._results:
            before = random_numbers.states(rows.is_cuda)
            one = self._call(0, weights[0], rows.new_ones(1, rows.shape[-1]))
            random_numbers.restore(before)
            self._results[kind] = one.shape[-1], one.dtype
        return self._results[kind]


class ListOnOwners(Around):
    """The forward of a module that calls experts of a list, of which this rank has some.

    Attributes:
        of: How many experts there are.
        step_bytes: What one forward and backward exchange beside rows, with a rank's own part.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: Sequence[nn.Module],
        plan: Listed,
        mesh: DeviceMesh,
        *,
        is_alone: bool,
    ) -> None:
        """Wrap the present forward of `module`; for the others see `Owners` and `own_weights`."""
        super().__init__(module)
        self.of = plan.count
        self._owners = Owners(module, experts, plan, mesh, is_alone=is_alone)
        self._mesh = mesh
        whole = [m.get_parameter(name) for m, name in own_weights.places_of(experts[0])]
        self._dims = [own_weights.dim_to_cut(parameter, mesh.size()) for parameter in whole]

    @property
    def counts(self) -> list[int]:
        """Tokens of each of this rank's experts in the newest forward."""
        return self._owners.counts

    @property
    def cut(self) -> dict[int, int]:
        """In which dim parameters are cut, by their `id`."""
        places = self._owners.places
        ids = [id(module._parameters[name]) for module, name in places]
        dims = self._dims * self.of
        return {one: dim for one, dim in zip(ids, dims, strict=True) if dim is not None}

    @property
    def step_bytes(self) -> int:
        """Bytes."""
        counts = (self.of + 2 * self._mesh.size()) * torch.int64.itemsize
        return counts + self._owners.weight_bytes(self._dims)

    @torch_hooks.left_alone
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the forward, with experts where they are.

        Raises:
            LayoutError: It does not ask the same of them twice.
        """

        def whole(parts: list[list[Tensor]]) -> list[list[Tensor]]:
            return own_weights.own(parts, self._dims, self._mesh)

        return self._owners.run(self.inner, args, keywords, whole)


def _by_call(back: Tensor, calls: list[Call]) -> list[Tensor]:
    order = sorted(range(len(calls)), key=lambda i: calls[i].number)
    sizes = [calls[i].rows.shape[:-1].numel() for i in order]
    found = dict(zip(order, back.split(sizes), strict=True))
    # Copies: a forward may change a result in place, as it could an expert's.
    width = back.shape[-1]
    return [found[i].view(*call.rows.shape[:-1], width).clone() for i, call in enumerate(calls)]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
