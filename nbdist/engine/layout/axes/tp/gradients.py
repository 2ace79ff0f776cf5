"""Find, by a small backward, which parameters get but a part of their gradient on each rank.

What lies between columns and their row sees a part of the heads or features: its gradients are
added up. What lies outside sees all. Where a parameter is used its module does not tell: an
attention may scale its input by one, and its queries by another. So both are measured: the gradient
in one process, and those of ranks, alone and added up. Where neither is right, the plan is not.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from nbdist.engine.layout.axes.tp.cuts import ATTENTION, COPIED, SUMMED, TensorPlan
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.shared.errors import LayoutError

# A part of a gradient lies far from the whole, further than any order of summation.
_NEAR = {torch.float64: 0.02, torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.2}
_EXACT = (torch.float32, torch.float64)  # in others rounding alone may lie as far
_LARGE = 1 << 20  # numbers of a parameter, whose gradients would be there twice
_NOTHING = 1e-5  # of the largest gradient: rounding, as that of a bias of keys

Gradients = dict[str, torch.Tensor]


def of(
    model: nn.Module,
    plan: TensorPlan,
    state: Mapping[str, torch.Tensor],
    inputs: Inputs,
    mesh: DeviceMesh | None,
) -> Gradients:
    """Return the gradients of what a plan leaves whole, in one process or on this rank.

    Args:
        model: Not changed; in evaluation.
        plan: Of words only.
        state: What takes the place of parameters.
        inputs: The same on every rank.
        mesh: The axis `tp`, over which rows are summed, and gradients of what columns take; None
            runs the model whole.
    """
    leaves = {name: p.detach().requires_grad_() for name, p in _whole(model, plan).items()}
    made: list[torch.Tensor] = []
    hooks = [*_ends(model, plan, mesh, made)]
    try:
        with torch.enable_grad():
            # All with gradients, as in a training: kernels are chosen by that.
            held = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in state.items()}
            everything = {**held, **leaves}
            torch.func.functional_call(model, everything, inputs.args, inputs.keywords)
            loss = torch.stack([_weighed(output) for output in made]).sum()
            if not (loss.requires_grad and leaves):
                return {}  # a forward without gradients
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def summed(whole: Gradients, own: Gradients, mesh: DeviceMesh, source: str) -> dict[str, bool]:
    """Return whether ranks must add up the gradient of a parameter, where it can be told.

    Raises:
        LayoutError: It is neither whole on each rank nor the sum.
    """
    largest = max((float(g.abs().max()) for g in whole.values()), default=0.0)
    found: dict[str, bool] = {}
    for name, expected in whole.items():
        mine = own.get(name, torch.zeros_like(expected))
        added = mine.clone()
        dist.all_reduce(added, group=mesh.get_group())
        errors = torch.stack([(t - expected).abs().max() for t in (mine, added)])
        errors = errors.nan_to_num(torch.inf)
        dist.all_reduce(errors, dist.ReduceOp.MAX, group=mesh.get_group())
        if not errors.isfinite().all():  # what overflows tells nothing, on any rank
            continue
        scale = float(expected.abs().max())
        if scale <= _NOTHING * largest:
            continue
        near = _NEAR[expected.dtype] * scale
        alone, together = (float(error) <= near for error in errors)
        if not alone and not together:
            if expected.dtype not in _EXACT:
                continue
            raise _wrong(name, source)
        found[name] = not alone
    return found


def check_copied(plan: TensorPlan, summed: Mapping[str, bool]) -> None:
    """Refuse a column that is whole on each rank, and whose gradient is no sum of the ranks'.

    Raises:
        LayoutError: Each rank has all of it: something else uses what the column makes.
    """
    copied = tuple(f"{cut.module}." for cut in plan.cuts if cut.style == COPIED)
    for name, is_summed in summed.items():
        if name.startswith(copied) and not is_summed:
            raise _wrong(name, plan.source)


def _wrong(name: str, source: str) -> LayoutError:
    return LayoutError(
        f"With these cuts {name} would get a wrong gradient.",
        why="some of it comes of what a rank has whole, and some of its part of heads or "
        f"features (the plan: {source})",
        do="leave out what is cut around it, with a plan of your own: TensorParallel(plan={...})",
    )


def _whole(model: nn.Module, plan: TensorPlan) -> dict[str, torch.Tensor]:
    """Return the parameters that the plan leaves whole, of what can be compared.

    Beside attentions and mlps large ones are left out: small ones before them tell the same.
    """
    known = [cut for cut in plan.cuts if cut.style != SUMMED]
    own = [cut for cut in known if cut.style != COPIED]
    cut = tuple(f"{cut.module}." for cut in own if not cut.own or cut.style == ATTENTION)
    cut += tuple(f"{cut.module}.{name}" for cut in plan.cuts for name in cut.own)
    owners = tuple(f"{pair.owner}." if pair.owner else "" for pair in plan.pairs)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dtype in _NEAR
        and not name.startswith(cut)
        and (name.startswith(owners) or parameter.numel() <= _LARGE)
    }


def _ends(
    model: nn.Module, plan: TensorPlan, mesh: DeviceMesh | None, made: list[torch.Tensor]
) -> list[Any]:
    hooks: list[Any] = []
    for pair in plan.pairs:
        if mesh is not None:
            take = partial(_taken, mesh=mesh)
            columns = [model.get_submodule(name) for name in pair.columns]
            hooks += [c.register_forward_pre_hook(take, with_kwargs=True) for c in columns]
        row = model.get_submodule(pair.row)
        hooks.append(row.register_forward_hook(_given(mesh, made)))
    return hooks


def _taken(_module: nn.Module, args: Any, keywords: Any, mesh: DeviceMesh) -> Any:
    def share(x: torch.Tensor) -> torch.Tensor:
        return _share(x, mesh) if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, share, (args, keywords))


def _given(mesh: DeviceMesh | None, made: list[torch.Tensor]) -> Callable[..., Any]:
    def sum_up(part: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _Summed.apply(part, mesh)  # type: ignore[no-untyped-call]
        return summed

    def give(_module: nn.Module, _args: object, output: Any) -> Any:
        if mesh is not None:
            output = tree_map_only(torch.Tensor, sum_up, output)
        made.append(output[0] if isinstance(output, tuple) else output)
        return output

    return give


def _weighed(output: torch.Tensor) -> torch.Tensor:
    places = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return (output * places.sin().view(output.shape).to(output.dtype)).sum()


def _share(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    shared: torch.Tensor = _Shared.apply(x, mesh)  # type: ignore[no-untyped-call]
    return shared


class _Shared(torch.autograd.Function):
    """What columns take: its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.clone()  # which a forward may change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.mesh.get_group())
        return whole, None


class _Summed(torch.autograd.Function):
    """What a row makes: the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=mesh.get_group())
        return whole

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
