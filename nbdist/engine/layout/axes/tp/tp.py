"""The `tp` axis: each weight cut over ranks that work on the same samples.

torch's own styles cut the modules that the plan names; all other parameters become replicas (see
`local_parameters`). Columns that one tensor feeds share one DTensor of it, so that their gradients
are summed before they are sent: one all-reduce where torch's styles alone need one a column.
"""

import gc
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from nbdist.engine.compat import torch_sharded, torch_transformer
from nbdist.engine.layout.axes.tp import (
    find_cuts,
    fit,
    local_parameters,
    local_sizes,
    plain_cuts,
    proof,
    sequence,
)
from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    GATHER,
    HEAD,
    ROW,
    SPLIT,
    SUMMED,
    VOCAB,
    TensorPlan,
    is_known,
)
from nbdist.engine.layout.plan import numbers, trace
from nbdist.engine.layout.policies.policies import TensorParallel
from nbdist.shared.errors import LayoutError


def find_plan(
    model: nn.Module, policy: TensorParallel, mesh: DeviceMesh, blocks: dict[str, nn.Module]
) -> TensorPlan:
    """Return the plan for a model, checked in every way there is. Collective; changes nothing.

    A plan of words is tried on fake tensors with a rank's shapes, and then proven by a small
    forward: of several that a model may mean, the first that is proven counts. One with styles of
    torch is used unchanged: their effect is not known to us. Where there is a plan and no example,
    a model that runs with no guessed input is believed, but not what torch's styles cannot cut, as
    adapters: how they are cut is our guess.

    Raises:
        LayoutError: Nothing to cut, or a plan that does not fit the model.
    """
    inputs, calls, unproven = None, list[trace.ModuleCall](), None
    try:
        inputs, calls = trace.find_inputs(model, policy.example)
    except LayoutError as error:
        unproven = error
        has_words = policy.plan is not None or find_cuts.plan_of(model) is not None
        if policy.example is not None or not has_words:
            raise
    refused: LayoutError | None = None
    counted: LayoutError | None = None
    for plan in find_cuts.candidates(model, policy.plan, calls, mesh.size()):
        cut = [(model.get_submodule(cut.module), cut) for cut in plan.cuts]
        if unproven is not None and any(plain_cuts.is_cut_here(*each) for each in cut):
            raise unproven
        try:
            fit.check(model, plan, mesh.size(), inputs)
            _check_loss(plan, policy)
            if policy.sequence:
                sequence.check(blocks, plan)
            if inputs is None or not is_known(plan):
                return plan
            proven = proof.prove(model, plan, mesh, inputs)
            if policy.sequence:
                sequence.check_gradients(proven)
            passed = counted or refused
            return replace(proven, passed=_said(passed)) if passed else proven
        except LayoutError as error:
            refused = refused or error
            # With what a forward counts with divided, it got furthest.
            counted = counted or (error if plan.sizes else None)
    assert refused is not None, "there is a candidate, or an error that says why not"
    raise refused


def _said(refused: LayoutError) -> str:
    return f"{refused.what.rstrip('.')}, for {refused.why}"


def apply(
    model: nn.Module,
    plan: TensorPlan,
    policy: TensorParallel,
    mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
    runs: list[list[nn.Module]] | None = None,
) -> None:
    """Cut `model` over the one-dimensional mesh, in place.

    Args:
        model: On its device, with the same weights on every rank.
        plan: From `find_plan`.
        policy: The cuts beside weights.
        mesh: The axis `tp`.
        blocks: The model's repeated blocks, by name, in order.
        runs: Those that follow each other on this rank, where a pipeline has the others.
    """
    tied = list(fit.ties(model))
    summed = {model.get_submodule(cut.module) for cut in plan.cuts if cut.style == SUMMED}
    if policy.sequence:
        summed |= set(sequence.norms(blocks, plan))
        sequence.apply(model, plan, mesh, runs or [list(blocks.values())])
    else:
        for pair in plan.pairs:
            if pair.row not in pair.columns:  # experts take their input by themselves
                columns = [model.get_submodule(name) for name in pair.columns]
                _Shared(mesh).hook(columns, model.get_submodule(pair.row))
    for cut in plan.cuts:
        style, layer = _style(cut.style, policy), model.get_submodule(cut.module)
        if plain_cuts.is_cut_here(layer, cut):
            plain_cuts.apply(layer, cut, mesh, scatters=policy.sequence)
        elif style is not None:
            # None: all ranks hold the same already.
            parallelize_module(layer, mesh, style, src_data_rank=None)
            if isinstance(cut.style, str):
                layer.register_forward_hook(_own_output)
            if cut.style == VOCAB:
                # Before the style's own, which makes a DTensor of what is given.
                layer.register_forward_pre_hook(_refuse_unknown, prepend=True)
    local_sizes.apply(model, plan.sizes)
    measured = plan.gradients
    if policy.sequence:  # beside these modules all see parts of the sequence
        owners = tuple(f"{pair.owner}." for pair in plan.pairs)
        measured = {name: got for name, got in measured.items() if name.startswith(owners)}
    units = [*blocks.values(), model]
    local_parameters.replicate_rest(model, mesh, units, summed, measured)
    for (module, name), *others in tied:
        for other, its_name in others:
            shared = model.get_submodule(module)._parameters[name]
            model.get_submodule(other)._parameters[its_name] = shared
    torch_transformer.keep_padding(model)
    gc.collect(0)  # the whole weights, where a cycle held them


def _check_loss(plan: TensorPlan, policy: TensorParallel) -> None:
    """Refuse a parallel loss where there is no head to cut.

    Raises:
        LayoutError: The plan has none.
    """
    if policy.loss and not any(cut.style == HEAD for cut in plan.cuts):
        left = "; ".join(f"{module}: {why}" for module, why in plan.left)
        raise LayoutError(
            "TensorParallel(loss=True) needs a head that is cut over the vocabulary, and the plan "
            "has none.",
            why=left or "no linear at the model's end makes the logits of all tokens",
            do='leave loss out, make the vocabulary a multiple of tp, or name the head "head" in '
            "a plan of your own",
        )


def _style(style: Any, policy: TensorParallel) -> ParallelStyle | None:
    if isinstance(style, ParallelStyle):
        return style
    if style == COLUMN:
        return ColwiseParallel()
    if style == ROW:
        return RowwiseParallel(output_layouts=Shard(1) if policy.sequence else Replicate())
    if style in (SPLIT, VOCAB):
        return RowwiseParallel(input_layouts=Replicate())
    if style in (GATHER, HEAD):
        stays_cut = style == HEAD and policy.loss
        return ColwiseParallel(
            output_layouts=Shard(-1) if stays_cut else Replicate(), use_local_output=not stays_cut
        )
    return None


def _refuse_unknown(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse numbers beyond a table, of which no rank has the row and all would add zeros.

    On a GPU nothing waits: the kernel stops, as that of a whole table does.

    Raises:
        IndexError: As a whole table does, on all ranks of the axis.
    """
    if not numbers.are_here():
        return
    weight: Any = layer.weight
    given, rows = args[0], weight.shape[0]
    is_known = ((given >= 0) & (given < rows)).all()
    if given.is_cuda:
        torch_sharded.assert_there(is_known)
    elif not torch.compiler.is_compiling() and not given.is_meta and not is_known:
        raise IndexError(
            f"index out of range: {torch_sharded.plain_name(layer)} has {rows} rows, and was "
            f"given {int(given.min())} to {int(given.max())}. A tokenizer may have more words than "
            "its model."
        )


def _own_output(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    """Let a program change what a layer returns in place, as it may that of a plain layer."""
    return output if isinstance(output, DTensor) else torch_sharded.as_own(output)


class _Shared:
    """The input of a pair's columns, as one DTensor for all that the same tensor feeds.

    Autograd then adds the columns' gradients, each a part of the sum, before it sends them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._given: torch.Tensor | None = None
        self._made: DTensor | None = None

    def hook(self, columns: list[nn.Module], row: nn.Module) -> None:
        """Installed before the columns; forgets at the row."""
        for column in columns:
            column.register_forward_pre_hook(self._before_column)
        row.register_forward_pre_hook(self._before_row)

    def _before_column(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given = args[0]
        if given is not self._given or self._made is None:
            self._given = given
            self._made = DTensor.from_local(given, self._mesh, [Replicate()], run_check=False)
        return (self._made, *args[1:])

    def _before_row(self, _module: nn.Module, _args: object) -> None:
        self._given = self._made = None
