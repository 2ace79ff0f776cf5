"""Prove a tensor-parallel plan on the model itself, before anything is changed.

Each rank runs one small forward twice: with its whole weights, and with the parts that the plan
gives it, where rows are summed over the ranks. What rows make must be the same. So a plan that is
wrong, though its shapes fit (a norm over features that were cut, a packed projection), is refused
and named, instead of training something else. Adapters are all active in it, with numbers as after
some training.

Gradients of what stays whole are compared by a small backward as well (`gradients`). A layer with
an adapter that passes has right gradients, too. As a column it makes a part of the outputs of the
same input, as a row one of the addends: what its whole parameters and its input get is the sum over
ranks in either case, and of its parts each rank has all (`plain_cuts`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from nbdist.engine.compat import torch_modules, torch_transformer
from nbdist.engine.layout.axes.tp import fit, gradients, local_sizes, multihead
from nbdist.engine.layout.axes.tp.cuts import Cut, TensorPlan, added_once, cut_dims
from nbdist.engine.layout.plan import adapted, numbers
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.trace import untouched
from nbdist.shared.errors import LayoutError

# Largest difference, relative to the largest value, that comes of another order of summation.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def prove(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, inputs: Inputs) -> TensorPlan:
    """Compare the two forwards, and gradients, over the mesh's ranks. Collective.

    Args:
        model: On its device, with the same weights on every rank; not changed.
        plan: Of words only.
        mesh: The axis `tp`.
        inputs: With which the model runs.

    Returns:
        The plan, with what was measured of gradients.

    Raises:
        LayoutError: They differ; names the first row that does, by how much, or a parameter.
    """
    if not numbers.are_here():
        return plan
    inputs = inputs.map(of_rank_0)
    rows = [pair.row for pair in plan.pairs]
    with _undisturbed(model) as draws, torch.no_grad():
        added = _added(model)
        whole = _outputs(model, added, rows, inputs, None)
        is_random = draws.happened()
        draws.begin()
        with _as_on_rank(model, plan, mesh):
            parts = _outputs(model, added | _parts(model, plan, mesh, added), rows, inputs, mesh)
    for row in rows:
        error = float(difference(whole[row], parts[row]))
        if not error <= tolerance(whole[row].dtype):
            pair = next(pair for pair in plan.pairs if pair.row == row)
            raise LayoutError(
                f"Cutting {', '.join(pair.columns)} and {row} changes what the model computes: by "
                f"{error:.1e} of its largest value, in a forward that was tried.",
                why=(
                    "its forward draws random numbers, and others where ranks hold parts"
                    if is_random
                    else "something between them works across features or heads that different "
                    "ranks would hold"
                )
                + f" (the plan: {plan.source})",
                do="leave them out with a plan of your own: TensorParallel(plan={...})"
                + (', or use "zero3"' if is_random else _with_adapter(model, row)),
            )
    if not rows:
        return plan
    with _undisturbed(model) as draws:
        alone = gradients.of(model, plan, added, inputs, None)
        draws.begin()
        with _as_on_rank(model, plan, mesh):
            state = added | _parts(model, plan, mesh, added)
            own = gradients.of(model, plan, state, inputs, mesh)
    measured = gradients.summed(alone, own, mesh, plan.source)
    gradients.check_copied(plan, measured)
    return replace(plan, gradients=measured)


class _Draws:
    """Random numbers of a proof: the same on all ranks, and in each of its forwards."""

    def begin(self) -> None:
        # torch.manual_seed would also seed a GPU that nobody has asked for yet.
        torch.default_generator.manual_seed(0)
        if _on_gpu():
            torch.cuda.manual_seed(0)
        self._first = self._states()

    def happened(self) -> bool:
        """Return whether some were drawn since."""
        return any(not torch.equal(*each) for each in zip(self._first, self._states(), strict=True))

    def _states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if _on_gpu() else [])]


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[_Draws]:
    """Leave a model as it is, and the generators; all adapters are in use."""
    devices = [torch.cuda.current_device()] if _on_gpu() else []
    with (
        torch.random.fork_rng(devices=devices),
        untouched(model),
        evaluating(model),
        adapted.all_active(model),
    ):
        draws = _Draws()
        draws.begin()
        yield draws


@contextmanager
def _as_on_rank(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> Iterator[None]:
    with (
        local_sizes.divided(model, plan.sizes),
        multihead.on_parts(model, plan, mesh.get_local_rank()),
    ):
        yield


def _with_adapter(model: nn.Module, row: str) -> str:
    if adapted.layer_in(model.get_submodule(row)) is None:
        return ""
    name = row.rpartition(".")[2]
    return (
        f"; or put no adapter on {name} that computes over all of its inputs, as DoRA's norm does "
        '(target_modules), or use "zero3"'
    )


def difference(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the largest difference, in units of the largest value expected."""
    scale = expected.double().abs().max()
    error = (expected.double() - found.double()).abs().max()
    return torch.where(scale > 0, error / scale, error)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference that comes of another order of summation."""
    return TOLERANCE.get(dtype, 1e-4)


def _outputs(
    model: nn.Module,
    state: dict[str, torch.Tensor],
    rows: list[str],
    inputs: Inputs,
    mesh: DeviceMesh | None,
) -> dict[str, torch.Tensor]:
    """Run a forward with some parameters replaced; returns what rows make."""
    found: dict[str, torch.Tensor] = {}
    hooks = [
        model.get_submodule(row).register_forward_hook(_recorder(row, found, mesh)) for row in rows
    ]
    try:
        torch.func.functional_call(model, state, inputs.args, inputs.keywords)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _recorder(row: str, found: dict[str, Any], mesh: DeviceMesh | None) -> Callable[..., Any]:
    def sum_up(part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        dist.all_reduce(part, group=mesh.get_group() if mesh else None)
        return part

    def record(_module: nn.Module, _args: object, output: Any) -> Any:
        if mesh is not None:
            output = tree_map_only(torch.Tensor, sum_up, output)
        # An attention returns its weights, too.
        found[row] = output[0] if isinstance(output, tuple) else output
        return output

    return record


def _added(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the numbers of all adapters in a proof, by name."""
    added = {}
    for name, module in adapted.wrappers(model):
        own = adapted.in_use(module)
        added.update({f"{name}.{key}": numbers for key, numbers in own.items()})
    return added


def _parts(
    model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, added: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the pairs' parameters, without a copy; a row's bias is shared."""
    parts: dict[str, torch.Tensor] = {}

    def whole(cut: Cut, name: str) -> torch.Tensor:
        full = f"{cut.module}.{name}"
        return added[full] if full in added else model.get_parameter(full).detach()

    for cut in plan.cuts:
        if cut.style not in fit.IN_PARTS:
            continue
        module = model.get_submodule(cut.module)
        for name, own in cut_dims(cut, module).items():
            part = own.take(whole(cut, name), mesh.size(), mesh.get_local_rank())
            parts[f"{cut.module}.{name}"] = part
        for name in added_once(cut.style, module):
            parts[f"{cut.module}.{name}"] = whole(cut, name) / mesh.size()
    return parts


def of_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Return rank 0's, for an example may differ between ranks."""
    copy = tensor.detach().clone()
    if numbers.are_here():
        torch_modules.broadcast_coalesced([copy], 0)
    return copy


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have no dropout and no running statistics, and no kernel that skips modules."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch_transformer.by_modules():
            yield
    finally:
        for module in training:
            module.training = True
