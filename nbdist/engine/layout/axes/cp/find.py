"""Find how a model's sequences can be cut, on fake tensors, and prove it by a small forward."""

from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from nbdist.engine.layout.axes.cp import attention, context, exchange, follow
from nbdist.engine.layout.axes.cp.context import FEWEST, Context
from nbdist.engine.layout.axes.tp import local_sizes, proof
from nbdist.engine.layout.axes.tp.cuts import Size
from nbdist.engine.layout.plan import examples, numbers, trace
from nbdist.engine.layout.plan.inputs import Inputs, tokens_in
from nbdist.engine.layout.policies.policies import ContextParallel
from nbdist.shared.errors import LayoutError

_GUESSED = 16  # tokens, at least, of a guessed sequence


def find(
    model: nn.Module,
    policy: ContextParallel,
    mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
    parts: dict[str, torch.Size],
    sizes: tuple[Size, ...],
) -> Context:
    """Return the plan of cp for a model, proven by a small forward. Collective; changes nothing.

    Args:
        model: On its device, with the same weights on every rank.
        policy: The policy of cp.
        mesh: The axis `cp`.
        blocks: The model's repeated blocks, by name, in order.
        parts: Shapes of one rank's parts under tp; empty without tp.
        sizes: Numbers that modules count with, which tp divides.

    Raises:
        LayoutError: The model has no list of blocks, or no attention that cp knows, or computes
            something else on parts of a sequence.
    """
    cp = mesh.size()
    candidates = blocks | _alone(model, blocks)
    _check_blocks(model, candidates)
    inputs = _inputs(model, policy, cp)
    with local_sizes.divided(model, sizes):
        first, second = _runs(model, candidates, inputs, parts)
    if not first.attended:
        raise attention.none_found(model)
    lists = list(dict.fromkeys(follow.list_of(call.block) for call in first.attended))
    blocks = {n: b for at in lists for n, b in candidates.items() if follow.list_of(n) == at}
    first.order = [name for name in first.order if name in blocks]
    _check_order(model, first, list(blocks))
    _check_statistics(blocks)
    follows = follow.follows(first, second)
    hidden = {name: _hidden(name, first, follows) for name in blocks}
    for name, (place, _) in hidden.items():
        follows.others[name].pop(place, None)
    _check_attention(first, follows, policy, cp)
    sent = _token_bytes(first, hidden, follows, policy, mesh, inputs)
    lengths = tuple(map(first.tokens, lists))
    found = Context(policy.method, len(first.attended), sent, lengths, hidden, follows)
    if numbers.are_here():
        _prove(model, found, policy, mesh, blocks, inputs)
    return found


def _alone(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return blocks that are the only one of a list: a model's of one layer."""
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # No list of torch's own, as of parametrizations.
        is_alone = type(module) is nn.ModuleList and len(module) == 1 and any(module[0].children())
        if is_alone and not inside.intersection(map(id, module.modules())):
            found[f"{name}.0"] = module[0]
            inside.update(map(id, module.modules()))
    return found


def _check_blocks(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    if not blocks:
        raise LayoutError(
            f"cp needs lists of blocks, and found none in {type(model).__name__}.",
            why="the sequence is cut before the first and put together after the last",
            do='leave cp out; "zero3" takes any model',
        )


def _check_statistics(blocks: dict[str, nn.Module]) -> None:
    """Refuse what a forward that is tried does not show, for it is one of evaluation."""
    for name, block in blocks.items():
        for inner, module in block.named_modules():
            if isinstance(module, _BatchNorm):
                raise LayoutError(
                    f"{f'{name}.{inner}'.rstrip('.')} is a batch norm, in a block that cp cuts.",
                    why="in training it takes the mean of all tokens, and a rank has a part of a "
                    "sequence",
                    do="use another norm in blocks, such as nn.LayerNorm, or leave cp out",
                )


def _check_order(model: nn.Module, run: follow.Run, names: list[str]) -> None:
    if run.order != names:
        raise LayoutError(
            f"{type(model).__name__} calls its blocks in another order than they stand in, or not "
            f"once each: {', '.join(run.order[:8])}.",
            why="the sequence is cut before the first and put together after the last",
            do="leave cp out",
        )


def _check_attention(
    run: follow.Run, follows: follow.Follows, policy: ContextParallel, cp: int
) -> None:
    for call in run.attended:
        given, others = run.given[call.block], follows.others[call.block]
        length = run.tokens(follow.list_of(call.block))
        keys = {length, *(given[place].shape[dim] for place, (dim,) in others.items())}
        attention.check_lengths(call.query, call.key, length, keys, is_causal=call.is_causal)
        if policy.method == "ulysses":
            attention.check_heads(call.query, cp)


def _inputs(model: nn.Module, policy: ContextParallel, cp: int) -> Inputs:
    """Return inputs whose sequences can be cut."""
    tokens = cp * max(FEWEST, _GUESSED // cp)
    inputs, _ = trace.find_inputs(model, policy.example, "ContextParallel", tokens)
    if policy.example is None:
        # So that sizes of a batch and of its sequences are not taken for those of one sequence.
        inputs = inputs.map(lambda x: torch.cat([x, x.flip(0, 1)]))
    follow.check_sequences(inputs)
    length = follow.length_of(inputs)
    if length // cp < FEWEST:
        context.check_length(length, cp)
    return follow.shortened(inputs, length - length % cp)


def _runs(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    inputs: Inputs,
    parts: dict[str, torch.Size],
) -> tuple[follow.Run, follow.Run | None]:
    """Return a forward with the inputs, and one with shorter sequences where the model can that."""
    try:
        first = follow.run(model, blocks, inputs, parts)
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{type(model).__name__} does not run with sequences of {follow.length_of(inputs)} "
            f"tokens: {str(error).strip().splitlines()[0]}",
            do=f"give ContextParallel(example=batch), {examples.BATCH}, whose sequences cp divides",
        ) from error
    for shorter in follow.shorter(inputs):
        with suppress(Exception):  # its table of positions is added as a whole, perhaps
            return first, follow.run(model, blocks, shorter, parts)
    return first, None


def _hidden(name: str, run: follow.Run, follows: follow.Follows) -> tuple[str, int]:
    """Return the place of a block's hidden states, and their dim of tokens."""
    for place, tensor in run.given[name].items():
        dims = follows.given[name].get(place, ())
        if tensor.is_floating_point() and tensor.dim() > 1 and dims:
            return place, 1 if 1 in dims else dims[0]
    raise LayoutError(
        f"{name} is given no hidden states that follow the sequence.",
        why=f"it was called with {[tuple(t.shape) for t in run.given[name].values()]}, where the "
        f"sequence had {run.tokens(follow.list_of(name))} tokens",
        do="leave cp out",
    )


def _token_bytes(
    run: follow.Run,
    hidden: dict[str, tuple[str, int]],
    follows: follow.Follows,
    policy: ContextParallel,
    mesh: DeviceMesh,
    inputs: Inputs,
) -> float:
    tokens = tokens_in((inputs.args, inputs.keywords)) or 1
    times = attention.repeats if policy.method == "ulysses" else lambda _key, _cp: 1

    def width(*tensors: Tensor) -> float:
        return sum(t.numel() * t.element_size() for t in tensors) / tokens

    given = {name: run.given[name][place] for name, (place, _) in hidden.items()}
    features = {tensor.shape[-1] for tensor in given.values()}
    *before, last = (given[names[0]] for names in context.by_list(hidden))
    theirs = [run.given[name][at] for name, others in follows.others.items() for at in others]
    return exchange.context_bytes(
        policy.method,
        width(last),
        [
            (
                width(call.query),
                width(call.key, call.value) * times(call.key, mesh.size()),
                width(call.query) / call.query.shape[-1] * call.value.shape[-1],
            )
            for call in run.attended
        ],
        cp=mesh.size(),
        backend="gloo" if mesh.device_type == "cpu" else "nccl",
        loss=policy.loss,
        before=2 * width(*before) + width(*(t for t in theirs if t.shape[-1] in features)),
    )


def _prove(
    model: nn.Module,
    plan: Context,
    policy: ContextParallel,
    mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
    inputs: Inputs,
) -> None:
    """Compare a forward on parts with one on whole sequences. Collective; leaves the model alone.

    Raises:
        LayoutError: They differ.
    """
    inputs = inputs.map(proof.of_rank_0)
    with trace.untouched(model), proof.evaluating(model), torch.no_grad():
        whole = follow.tensors_of(inputs.run(model))
        context.apply(plan, policy, mesh, blocks)
        parts = _run_on_parts(model, inputs)
    error = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for place, found in parts.items():
        expected = whole[place]
        is_part = expected.numel() == found.numel() * mesh.size()
        if policy.loss and is_part and expected.shape[2:] == found.shape[2:]:
            expected = exchange.own_part(expected, 1, mesh)
        # Other outputs of a model, such as a cache of keys, may be of parts.
        if expected.numel() == found.numel() and found.is_floating_point():
            difference = proof.difference(expected.flatten(), found.flatten())
            error = torch.maximum(error, difference.to(error.device))
    dist.all_reduce(error, dist.ReduceOp.MAX, mesh.get_group())
    if not float(error) <= proof.tolerance(next(iter(whole.values())).dtype):
        raise LayoutError(
            f"On parts of the sequence {type(model).__name__} computes something else: by "
            f"{float(error):.1e} of its largest value, in a forward that was tried.",
            why="something in its blocks, beside attention, works across tokens or counts their "
            "positions: rotary positions of x.shape[1], a convolution, a recurrence",
            do="compute positions before the first block and pass them on, or leave cp out",
        )


def _run_on_parts(model: nn.Module, inputs: Inputs) -> follow.Tensors:
    try:
        return follow.tensors_of(inputs.run(model))
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{type(model).__name__} does not run on parts of the sequence: "
            f"{trace.first_line(error)}",
            why=f"{trace.place(error)} counts with the tokens of the whole",
            do="let sizes follow from the tensor, or leave cp out",
        ) from error
