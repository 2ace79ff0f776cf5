"""The `cp` axis: blocks work on a part of the sequence, attention on all of it.

    embedding  ─▶ cut ─▶ block ─▶ block ─▶ ... ─▶ gather ─▶ norm, head, loss
    on all of it         on the part, but attention         on all of it, equal on each rank

Every rank of cp gets the same samples, and so the loop does not change. A plan is found on fake
tensors, proven by a small forward, and only then applied.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.axes.cp import attention, exchange, follow
from nbdist.engine.layout.axes.tp import proof
from nbdist.engine.layout.plan import random_numbers, trace
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.layout.policies.policies import ContextParallel
from nbdist.shared.errors import LayoutError

_GUESSED = 16  # tokens, at least, of a guessed sequence
_FEWEST = 2  # tokens a rank: of one row of attention some models no longer say that it is causal


@dataclass(frozen=True, slots=True)
class Context:
    """The plan of cp for one model.

    Attributes:
        method: "ulysses" or "gather".
        calls: Calls of attention in a forward.
        token_bytes: Bytes that a rank sends over cp for one token of a batch, forward and backward.
        hidden: By block, the place of the hidden states among its arguments.
        follows: Which dims follow the sequence.
    """

    method: str
    calls: int
    token_bytes: float
    hidden: dict[str, tuple[str, int]]
    follows: follow.Follows

    def __str__(self) -> str:
        """Return a description."""
        return f"cp: {self.calls} calls of attention in {len(self.hidden)} blocks, {self.method}"


def find(
    model: nn.Module,
    policy: ContextParallel,
    mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
    parts: dict[str, torch.Size],
) -> Context:
    """Return the plan of cp for a model, proven by a small forward. Collective; changes nothing.

    Args:
        model: On its device, with the same weights on every rank.
        policy: The policy of cp.
        mesh: The axis `cp`.
        blocks: The model's repeated blocks, by name, in order.
        parts: Shapes of one rank's parts under tp; empty without tp.

    Raises:
        LayoutError: The model has no list of blocks, or no attention that cp knows, or computes
            something else on parts of a sequence.
    """
    cp = mesh.size()
    _check_blocks(model, blocks)
    inputs = _inputs(model, policy, cp)
    first, second = _runs(model, blocks, inputs, parts, cp)
    if first.order != list(blocks):
        raise LayoutError(
            f"{type(model).__name__} calls its blocks in another order than they stand in, or not "
            f"once each: {', '.join(first.order[:8])}.",
            why="the sequence is cut before the first and put together after the last",
            do="leave cp out",
        )
    if not first.attended:
        attention.check_kind(model)
        raise attention.none_found(model)
    for call in first.attended:
        attention.check_lengths(call.query, call.key, first.length)
        if policy.method == "ulysses":
            attention.check_heads(call.query, call.key, cp)
    follows = follow.follows(first, second)
    hidden = {name: _hidden(name, first, follows) for name in blocks}
    context = Context(
        policy.method,
        len(first.attended),
        _token_bytes(first, hidden[first.order[0]][0], policy, mesh),
        hidden,
        follows,
    )
    _prove(model, context, policy, mesh, blocks, inputs)
    return context


def apply(
    context: Context,
    policy: ContextParallel,
    mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
    parts: int = 1,
    begin: Collection[str] = (),
) -> None:
    """Have blocks work on a part of the sequence, in place. No collective.

    Args:
        context: From `find`.
        policy: The policy of cp.
        mesh: The axis `cp`.
        blocks: As for `find`, or those of them that this rank of a pipeline has.
        parts: The number of further parts of hidden states between blocks: tp's sequence parallel.
        begin: Names of blocks with which a stage of a pipeline begins: it receives hidden states in
            parts over cp, and over nothing else.
    """
    names = list(context.hidden)
    for name, block in blocks.items():
        place, dim = context.hidden[name]
        _OnPart(
            block,
            mesh,
            policy,
            hidden=(place, dim),
            given=context.follows.given[name],
            made=context.follows.made if name == names[-1] and not policy.loss else None,
            parts=None if name == names[0] else 1 if name in begin else parts,
        )


class _OnPart(Around):
    """The forward of a block, on this rank's part of the sequence.

    The innermost wrapper of a forward, so that a checkpoint which computes it again, on
    autograd's thread, does all of it again.
    """

    def __init__(
        self,
        block: nn.Module,
        mesh: DeviceMesh,
        policy: ContextParallel,
        *,
        hidden: tuple[str, int],
        given: dict[str, tuple[int, ...]],
        made: dict[str, tuple[int, ...]] | None,
        parts: int | None,
    ) -> None:
        """Wrap the present forward of `block`.

        Args:
            block: Its forward may be another one's already, as tp's.
            mesh: The axis `cp`.
            policy: The policy of cp.
            hidden: The place of the hidden states, and their dim of the sequence.
            given: The dims of its arguments that follow the sequence.
            made: Those of its outputs, if they are gathered; None leaves them in parts.
            parts: The number of parts of hidden states on this rank; None when they are whole.
        """
        super().__init__(block)
        self._mesh = mesh
        self._policy = policy
        self._hidden = hidden
        self._given = given
        self._made = made
        self._parts = parts

    @torch_hooks.left_alone_where_wrong
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        length = self._length((args, keywords))
        args, keywords = self._cut((args, keywords), length)
        with (
            random_numbers.independent(self._mesh, is_on=self._module.training),
            attention.WholeSequence(self._mesh, self._policy, length),
        ):
            made = self.inner(*args, **keywords)
        return made if self._made is None else self._joined(made, length)

    def _length(self, given: Any) -> int:
        """Return the tokens of this rank's part."""
        place, dim = self._hidden
        hidden = follow.tensors_of(given).get(place)
        if hidden is None:
            raise LayoutError(
                f"A block of the model is called in another way than it was tried: {place} is no "
                "tensor.",
                do="give ContextParallel(example=...) a batch as you train with",
            )
        length = hidden.shape[dim]
        if self._parts is None:
            return check_length(length, self._mesh.size())
        return length * self._parts

    def _cut(self, given: Any, length: int) -> Any:
        """Cut whole arguments along the sequence: hidden states, tables of positions."""
        whole = length * self._mesh.size()

        def cut(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dims = self._given.get(pytree.keystr(path), range(value.dim()))
            found = [dim for dim in dims if value.shape[dim] == whole]
            # A mask has two of them: attention takes its part.
            return exchange.cut(value, found[0], self._mesh) if len(found) == 1 else value

        return pytree.tree_map_with_path(cut, given)

    def _joined(self, made: Any, length: int) -> Any:
        def join(path: Any, value: Any) -> Any:
            dims = (self._made or {}).get(pytree.keystr(path), ())
            is_part = len(dims) == 1 and value.shape[dims[0]] == length
            return exchange.gather(value, dims[0], self._mesh) if is_part else value

        return pytree.tree_map_with_path(join, made)


def check_length(whole: int, cp: int) -> int:
    """Return the tokens of one rank's part of a sequence.

    Raises:
        LayoutError: The ranks' parts would not be equal, or too short.
    """
    part, rest = divmod(whole, cp)
    if rest or part < _FEWEST:
        raise LayoutError(
            f"A sequence of {whole} tokens cannot be cut into {cp} equal parts of at least "
            f"{_FEWEST}.",
            why=f"cp={cp} gives each rank as many tokens",
            do=f"pad it to {max(-(-whole // cp), _FEWEST) * cp}",
        )
    return part


def _check_blocks(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1:
        found = ", ".join(sorted(lists)) or "none"
        raise LayoutError(
            f"cp needs one list of equal blocks, and found {found} in {type(model).__name__}.",
            why="the sequence is cut before the first and put together after the last",
            do='leave cp out; "zero3" takes any model',
        )


def _inputs(model: nn.Module, policy: ContextParallel, cp: int) -> Inputs:
    """Return inputs whose sequences can be cut."""
    tokens = cp * max(_FEWEST, _GUESSED // cp)
    inputs, _ = trace.find_inputs(model, policy.example, "ContextParallel", tokens)
    if policy.example is None:
        # So that sizes of a batch and of its sequences are not taken for those of one sequence.
        inputs = inputs.map(lambda x: torch.cat([x, x.flip(0, 1)]))
    follow.check_sequences(inputs)
    length = follow.length_of(inputs)
    if length // cp < _FEWEST:
        check_length(length, cp)
    return follow.shortened(inputs, length - length % cp)


def _runs(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    inputs: Inputs,
    parts: dict[str, torch.Size],
    cp: int,
) -> tuple[follow.Run, follow.Run | None]:
    """Return a forward with the inputs, and one with shorter sequences where the model can that."""
    try:
        first = follow.run(model, blocks, inputs, parts)
    except Exception as error:
        raise LayoutError(
            f"{type(model).__name__} does not run with sequences of {follow.length_of(inputs)} "
            f"tokens: {str(error).strip().splitlines()[0]}",
            do=f"give ContextParallel(example=batch), {trace.BATCH}, whose sequences cp divides",
        ) from error
    try:
        shorter = follow.shortened(inputs, first.length - 1)
        return first, follow.run(model, blocks, shorter, parts)
    except Exception:
        return first, None  # its table of positions is added as a whole, perhaps


def _hidden(name: str, run: follow.Run, follows: follow.Follows) -> tuple[str, int]:
    """Return the place of a block's hidden states, and their dim of tokens."""
    for place, tensor in run.given[name].items():
        dims = follows.given[name].get(place, ())
        if tensor.is_floating_point() and tensor.dim() > 1 and dims:
            return place, 1 if 1 in dims else dims[0]
    raise LayoutError(
        f"{name} is given no hidden states that follow the sequence.",
        why=f"it was called with {[tuple(t.shape) for t in run.given[name].values()]}, where the "
        f"sequence had {run.length} tokens",
        do="leave cp out",
    )


def _token_bytes(run: follow.Run, place: str, policy: ContextParallel, mesh: DeviceMesh) -> float:
    hidden = run.given[run.order[0]][place]
    tokens = hidden.shape[0] * hidden.shape[1]

    def width(*tensors: Tensor) -> float:
        return sum(t.numel() * t.element_size() for t in tensors) / tokens

    return exchange.context_bytes(
        policy.method,
        width(hidden),
        [
            (
                width(call.query),
                width(call.key, call.value),
                width(call.query) / call.query.shape[-1] * call.value.shape[-1],
            )
            for call in run.attended
        ],
        cp=mesh.size(),
        backend="gloo" if mesh.device_type == "cpu" else "nccl",
        loss=policy.loss,
    )


def _prove(
    model: nn.Module,
    context: Context,
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
        apply(context, policy, mesh, blocks)
        parts = follow.tensors_of(inputs.run(model))
    length = follow.length_of(inputs)
    error = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for place, found in parts.items():
        expected = whole[place]
        if policy.loss and expected.dim() > 1 and expected.shape[1] == length:
            expected = exchange.own_part(expected, 1, mesh)
        # Other outputs of a model, such as a cache of keys, may be of parts.
        if expected.shape == found.shape and found.is_floating_point():
            error = torch.maximum(error, proof.difference(expected, found).to(error.device))
    dist.all_reduce(error, dist.ReduceOp.MAX, mesh.get_group())
    if not float(error) <= proof.tolerance(next(iter(whole.values())).dtype):
        raise LayoutError(
            f"On parts of the sequence {type(model).__name__} computes something else: by "
            f"{float(error):.1e} of its largest value, in a forward that was tried.",
            why="something in its blocks, beside attention, works across tokens or counts their "
            "positions: rotary positions of x.shape[1], a convolution, a recurrence",
            do="compute positions before the first block and pass them on, or leave cp out",
        )
