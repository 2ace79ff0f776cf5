"""Find lists of experts in a model, proven by a forward before anything is changed.

No name tells: the members of a list are alike, and the forward of the module that has it calls them
with rows, none with what another has made. What it makes with experts of all ranks, which compute
the rows of all, must be what it makes alone. Any other list is left whole on every rank.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from nbdist.engine.layout.axes.ep.lists import Listed, Owners
from nbdist.engine.layout.axes.ep.twice import Twice, as_before, called, is_mere_list, rows_in
from nbdist.engine.layout.axes.tp.proof import difference, tolerance
from nbdist.engine.layout.plan import random_numbers
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.trace import first_line


@dataclass(frozen=True, slots=True)
class Candidate:
    """A list whose members may be experts.

    Attributes:
        name: The list's qualified name.
        parent: That of the module whose forward may call them; "" for the model.
        unfit: Why they are none, as far as it is seen without a forward; else nothing.
    """

    name: str
    parent: str
    unfit: str = ""


def candidates(model: nn.Module) -> list[Candidate]:
    """Return lists of modules that are alike, and have parameters; outer ones first."""
    every = model.named_parameters(remove_duplicate=False)
    places = Counter(id(parameter) for _, parameter in every)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and _are_alike(module):
            parent = name.rpartition(".")[0] if is_mere_list(module) else name
            found.append(Candidate(name, parent, _unfit(module, places)))
    return found


def experts_in(members: nn.Module) -> list[nn.Module]:
    """Return the members of a list that have parameters."""
    return [one for one in members.children() if next(one.parameters(), None) is not None]


def _are_alike(members: nn.Module) -> bool:
    each = [
        (type(one), [(name, p.shape, p.dtype) for name, p in one.named_parameters()])
        for one in experts_in(members)
    ]
    return len(each) > 1 and all(one == each[0] for one in each)


def _unfit(members: nn.Module, places: Counter[int]) -> str:
    for name, buffer in members.named_buffers():
        return f"has a buffer, {name} {tuple(buffer.shape)}, which ranks would change apart"
    for name, parameter in members.named_parameters():
        if places[id(parameter)] > 1:
            return f"shares a parameter, {name}, with another module"
    if any(is_parametrized(module) for module in members.modules()):
        return "makes its weights anew in each forward"
    return ""


def find(
    model: nn.Module, inputs: dict[str, Inputs], tokens: int, taken: set[str], mesh: DeviceMesh
) -> tuple[list[Listed], list[str]]:
    """Return the lists of experts, and why others are none. Collective; changes nothing.

    Args:
        model: Evaluating, with the same weights on every rank.
        inputs: What modules that have `candidates` were called with, by name.
        tokens: Of the model's inputs.
        taken: Names of modules that have been found to be experts.
        mesh: The axis `ep`.
    """
    found: list[Listed] = []
    why: list[str] = []
    for candidate in candidates(model):
        beside = [one.name for one in found] + sorted(taken)
        is_nested = any(
            _is_in(candidate.name, one) or _is_in(one, candidate.name) for one in beside
        )
        if is_nested or candidate.parent in {one.parent for one in found}:
            continue
        if candidate.parent in inputs:
            with as_before(model.get_submodule(candidate.parent)):
                proof = _Proof(candidate, model, inputs[candidate.parent], mesh)
                plan, unfit = proof.result(tokens)
                proof.put_back_draws()
            if plan is not None:
                found.append(plan)
            else:
                why.append(f"{candidate.name} {unfit}")
    return found, why


def _is_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


class _Proof:
    """Whether the members of a list are experts. Collective."""

    def __init__(
        self, candidate: Candidate, model: nn.Module, given: Inputs, mesh: DeviceMesh
    ) -> None:
        self._candidate, self._given, self._mesh = candidate, given, mesh
        self._parent = model.get_submodule(candidate.parent)
        self._experts = experts_in(model.get_submodule(candidate.name))
        self._calls: list[tuple[int, Tensor, Tensor]] = []  # of which expert, given, made
        self._keyword: str | None = None
        self._random = random_numbers.states(mesh.device_type == "cuda")

    def result(self, tokens: int) -> tuple[Listed | None, str]:
        """Return the place in the plan, or None and why there is none."""
        why = ""
        try:
            whole = self._alone()
            self._check_apart()
            self._check_rows()
        except Exception as error:
            why, whole = first_line(error), []
        if not self._is_true_everywhere(not why):
            return None, why or "is none on another rank"
        count, ranks = len(self._experts), self._mesh.size()
        if count % ranks:
            return None, f"has {count}, of which {ranks} ranks cannot have as many each"
        plan = self._plan(tokens)
        try:
            made = self._by_owners(plan)
            errors = [difference(one, other).item() for one, other in zip(whole, made, strict=True)]
            limits = [tolerance(one.dtype) for one in whole]
            is_same = all(error <= limit for error, limit in zip(errors, limits, strict=True))
        except Exception as error:
            why, is_same = f"fails where its weights are not here: {first_line(error)}", False
        if self._is_true_everywhere(is_same):
            return plan, ""
        return None, why or "computes something else where ranks have some of them each"

    def put_back_draws(self) -> None:
        """Let what follows draw as if nothing had been tried."""
        random_numbers.restore(self._random)

    def _is_true_everywhere(self, claim: bool) -> bool:
        flag = torch.tensor(int(claim), device=self._mesh.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def _inputs(self) -> Inputs:
        """Return the inputs; a forward of them draws what each other one does."""
        random_numbers.restore(self._random)
        return self._given.map(lambda tensor: tensor.clone())

    def _alone(self) -> list[Tensor]:
        """Return what the parent makes, and note its calls."""

        def note(number: int) -> Any:
            def hook(_: nn.Module, args: Any, keywords: dict[str, Any], made: Any) -> None:
                self._keyword = next(iter(keywords), None)
                rows = rows_in(args, keywords, self._keyword)
                if rows is None:
                    raise ValueError("is called with something else than rows (..., H)")
                if not isinstance(made, Tensor) or made.shape[:-1] != rows.shape[:-1]:
                    raise ValueError("makes something else of rows (..., H) than as many")
                self._calls.append((number, rows.clone(), made.clone()))

            return hook

        hooks = [
            expert.register_forward_hook(note(number), with_kwargs=True)
            for number, expert in enumerate(self._experts)
        ]
        try:
            output = self._inputs().run(self._parent)
        finally:
            for hook in hooks:
                hook.remove()
        if not self._calls:
            raise ValueError(f"is not called by {self._candidate.parent or 'the model'}")
        return _floats(output)

    def _check_apart(self) -> None:
        """Check that no expert gets what another has made.

        Raises:
            ValueError: One does.
        """
        made = iter(self._calls)

        def placeholder(rows: Tensor) -> Tensor:
            _, before, result = next(made)
            if before.shape != rows.shape or not torch.equal(before, rows):
                raise ValueError("is no list of experts: they get what others of it have made")
            return torch.full_like(result, 0.5)

        given = self._inputs()
        twice = Twice(
            self._candidate.name,
            self._parent,
            self._parent.forward,
            self._experts,
            self._keyword,
            on_gpu=self._mesh.device_type == "cuda",
        )
        twice.look(given.args, given.keywords, placeholder)
        if [call.number for call in twice.calls] != [number for number, *_ in self._calls]:
            raise ValueError("is called on both sides of another module, or by what it makes")

    def _check_rows(self) -> None:
        """Check that an expert makes the same of a row wherever it is computed.

        Raises:
            ValueError: One does not, or is unfit without that.
        """
        if self._candidate.unfit:
            raise ValueError(self._candidate.unfit)
        for number, rows, made in self._calls:
            if not rows.numel():
                continue
            among = torch.cat([rows.new_full((3, rows.shape[-1]), 0.3), rows.flatten(0, -2)])
            found = called(self._experts[number], among, self._keyword)[3:]
            if not float(difference(made.flatten(0, -2), found)) <= tolerance(made.dtype):
                raise ValueError("makes something else of a row among others")

    def _plan(self, tokens: int) -> Listed:
        _, rows, made = self._calls[0]
        total = sum(rows.shape[:-1].numel() for _, rows, _ in self._calls)
        width = rows.shape[-1] * rows.element_size() + made.shape[-1] * made.element_size()
        return Listed(
            self._candidate.name,
            self._candidate.parent,
            len(self._experts),
            rows.shape[-1],
            self._keyword,
            total / tokens,
            2 * width * total / tokens,
        )

    def _by_owners(self, plan: Listed) -> list[Tensor]:
        """Return what the parent makes with experts that each have one owner."""
        _, _, made = self._calls[0]
        owners = _Tried(self._parent, self._experts, plan, self._mesh, is_alone=True)
        owners.made_of = lambda rows: made.new_zeros(len(rows), made.shape[-1])
        own = len(self._experts) // self._mesh.size()
        first = self._mesh.get_local_rank() * own
        given = self._inputs()
        output = owners.run(
            self._parent.forward, given.args, given.keywords, lambda held: held[first:][:own]
        )
        if owners.error is not None:
            raise owners.error
        return _floats(output)


class _Tried(Owners):
    """Goes on where an expert fails: others wait in the exchange."""

    error: Exception | None = None
    made_of: Callable[[Tensor], Tensor]

    def _call(self, j: int, weights: list[Tensor], rows: Tensor) -> Tensor:
        try:
            return super()._call(j, weights, rows)
        except Exception as error:
            self.error = error
            return self.made_of(rows)


def _floats(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
