"""Find the modules of experts in a model, proven by a forward before anything is changed.

No name tells: all parameters of such a module have the experts as their first dim, and a forward
calls it with tokens, their experts and weights. What it computes with a rank's experts, on
the rows that come to them, must be what the whole of it computes. Lists of experts: `find_lists`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import is_parametrized

from nbdist.engine.compat import torch_fakes
from nbdist.engine.layout.axes.ep import exchange, find_lists
from nbdist.engine.layout.axes.ep.experts import Called, Experts, with_count
from nbdist.engine.layout.axes.ep.lists import Listed
from nbdist.engine.layout.axes.tp.proof import difference, evaluating, of_rank_0, tolerance
from nbdist.engine.layout.plan import numbers
from nbdist.engine.layout.plan.examples import ask_for, of_example
from nbdist.engine.layout.plan.guesses import guesses
from nbdist.engine.layout.plan.inputs import Inputs, tokens_in
from nbdist.engine.layout.plan.trace import first_line, untouched
from nbdist.shared.errors import LayoutError


def find(model: nn.Module, example: Any, mesh: DeviceMesh) -> tuple[list[Experts], list[Listed]]:
    """Return a model's modules of experts, and its lists of them. Collective; changes nothing.

    Args:
        model: On its device, with the same weights on every rank.
        example: From `ExpertParallel.example`; None tries guesses.
        mesh: The axis `ep`.

    Raises:
        LayoutError: There are none, or the model does not run; ranks cannot have as many of them
            each; or experts compute something else where they are apart.
    """
    with untouched(model), evaluating(model), torch.no_grad():
        tokens, seen = _seen(model, example)
        lists: list[Listed] = []
        unfit = ["which experts of a list are called is decided by numbers, not known here"]
        if numbers.are_here():
            lists, unfit = find_lists.find(model, seen.parents, tokens, set(seen.calls), mesh)
        if not seen.calls and not lists:
            reasons = [f"{name} of all experts" for name in seen.shared] + unfit
            raise LayoutError(
                f"{type(model).__name__} has no experts that ep can share out.",
                why="it takes modules whose parameters are stacks, with the experts as their first "
                "dimension, and whose forward is given tokens (T, H), the experts of each (T, K) "
                "and their weights (T, K), as experts of transformers are; or lists of modules "
                "that are alike, which a forward calls with rows (..., H)"
                + "".join(f"; {reason}" for reason in reasons),
                do='make experts one of these, or use "zero3", which shards any model',
            )
        stacked = [
            _proven(name, model.get_submodule(name), called, tokens, mesh)
            for name, called in seen.calls.items()
        ]
        return stacked, lists


def count_in(module: nn.Module) -> int:
    """Return how many experts a module may have: the first dim of all its parameters, else 0.

    One of them is a stack of matrices: that of a linear has two dims.
    """
    shapes = [p.shape for p in module.parameters()]
    if max(map(len, shapes), default=0) < 3 or not all(shapes):
        return 0
    sizes = {shape[0] for shape in shapes}
    return sizes.pop() if len(sizes) == 1 else 0


@dataclass
class _Seen:
    """First calls in a forward, by the name of the module.

    Attributes:
        calls: Of modules of experts.
        parents: Of those that have lists which may be of experts.
        shared: Parameters of what would be a module of experts without them.
    """

    calls: dict[str, Called] = field(default_factory=dict)
    parents: dict[str, Inputs] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)


def _shared_in(module: nn.Module) -> dict[str, torch.Size]:
    """Return the parameters of a module of stacks that are none."""
    shapes = {name: p.shape for name, p in module.named_parameters()}
    sizes = {shape[0] for shape in shapes.values() if len(shape) > 2}
    return {n: s for n, s in shapes.items() if len(sizes) == 1 and (not s or s[0] not in sizes)}


def _seen(model: nn.Module, example: Any) -> tuple[int, _Seen]:
    """Return the tokens of the inputs, and what is called in a forward.

    A real forward on all ranks, for experts may decide by numbers what they do.
    """
    is_given = example is not None
    given = [of_example(model, example).map(of_rank_0)] if is_given else list(guesses(model))
    first: Exception | None = None
    for inputs in given:
        try:
            return tokens_in((inputs.args, inputs.keywords)) or 1, _run(model, inputs)
        except (LayoutError, *torch_fakes.ASKED_NUMBERS):
            raise
        except Exception as error:
            first = first or error
    raise LayoutError(
        f"{type(model).__name__} does not run with "
        + ("the example" if example is not None else "any input that was tried")
        + ", so its experts cannot be found.",
        why=f"{type(first).__name__}: {first_line(first)}"
        if first
        else "no layer shows which inputs it takes",
        do=ask_for("ExpertParallel"),
    ) from first


def _run(model: nn.Module, inputs: Inputs) -> _Seen:
    seen = _Seen()
    parents = {candidate.parent for candidate in find_lists.candidates(model)}

    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if name in parents:
                given = Inputs(args, keywords).map(lambda tensor: tensor.clone())
                seen.parents.setdefault(name, given)
            called = Called.of(args, keywords) if name else None
            is_inside = any(name.startswith(outer + ".") for outer in seen.calls)
            if called is None or is_inside:
                return
            if count_in(module) <= 1:
                shared = _shared_in(module)
                seen.shared += [f"{name}.{n} {tuple(shape)} is" for n, shape in shared.items()]
                return
            seen.calls.setdefault(name, called)
            if is_parametrized(module):
                raise LayoutError(
                    f"The weights of experts in {name} are made anew in each forward.",
                    why="an adapter on them (PEFT's target_parameters) or a parametrization "
                    "makes them of all experts, of which a rank of ep has some",
                    do='leave target_parameters out, and adapt other layers; or use "zero3"',
                )

        return record

    hooks = [
        module.register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name in parents or (name and (count_in(module) > 1 or _shared_in(module)))
    ]
    try:
        inputs.run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _proven(name: str, module: nn.Module, called: Called, tokens: int, mesh: DeviceMesh) -> Experts:
    """Return a module's place in the plan. Collective.

    Raises:
        LayoutError: Ranks cannot have as many experts each, or compute something else with them.
    """
    count, ranks = count_in(module), mesh.size()
    if count % ranks:
        raise LayoutError(
            f"{name} has {count} experts, of which {ranks} ranks cannot have as many each.",
            do=f"use for ep a divisor of {count}: "
            + ", ".join(str(n) for n in range(2, count + 1) if count % n == 0),
        )
    # Ranks bring unequal numbers of tokens, as they may in training.
    few = max(len(called.hidden) - mesh.get_local_rank(), 1)
    given = (called.hidden[:few], called.index[:few], called.weight[:few])
    whole = called.run(module.forward, *given)
    closest = torch.inf
    for sized in _ways(module, count):
        made = _apart(module, called, given, sized, mesh)
        fits = made is not None and made.shape == whole.shape and made.dtype == whole.dtype
        worst = _worst(difference(whole, made) if made is not None and fits else None, mesh)
        if worst <= tolerance(whole.dtype):
            return Experts(
                name,
                count,
                sized,
                given[1].shape[1],
                exchange.row_bytes(given[0], given[2], whole) * called.index.numel() / tokens,
            )
        closest = min(closest, worst)
    raise LayoutError(
        f"Experts of {name} compute something else where ranks have some of them each"
        + (f": by {closest:.1e} of its largest value" if closest < torch.inf else "")
        + ", in a forward that was tried.",
        why="its forward counts on all experts, or on all tokens, being in one place",
        do='leave ep out; "zero3" shards any model',
    )


def _worst(error: Tensor | None, mesh: DeviceMesh) -> float:
    """Return the largest error of all ranks; of tensors without numbers 0. Collective."""
    if not numbers.are_here():
        return torch.inf if error is None else 0.0
    own = torch.inf if error is None else error.item()
    worst = torch.tensor([own], dtype=torch.float64, device=mesh.device_type).nan_to_num(torch.inf)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def _ways(module: nn.Module, count: int) -> Iterator[tuple[str, ...]]:
    """Yield which attributes may say how many experts a module has: none, all, or one of them.

    Another size, such as the width, may by chance be the same number: the proof tells.
    """
    found = tuple(n for n, value in vars(module).items() if type(value) is int and value == count)
    yield ()
    yield found
    yield from ((name,) for name in found if len(found) > 1)


def _apart(
    module: nn.Module,
    called: Called,
    given: tuple[Tensor, Tensor, Tensor],
    sized: tuple[str, ...],
    mesh: DeviceMesh,
) -> Tensor | None:
    """Return what ranks with their parts compute; None where a forward of this rank fails."""
    count, has_failed = count_in(module), False
    rank, own = mesh.get_local_rank(), count // mesh.size()
    parts = {name: p.detach()[rank * own :][:own] for name, p in module.named_parameters()}

    def compute(hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        nonlocal has_failed
        try:
            with with_count(module, sized, own):
                return called.run(
                    lambda *args, **keywords: torch.func.functional_call(
                        module, parts, args, keywords
                    ),
                    hidden,
                    index,
                    weight,
                )
        except Exception:
            has_failed = True  # this way is none; the others wait in the exchange
            return torch.zeros_like(hidden)

    made, _ = exchange.on_owners(compute, *given, count, mesh)
    return None if has_failed else made
