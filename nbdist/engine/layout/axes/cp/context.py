"""The `cp` axis: blocks work on a part of the sequence, attention on all of it.

    embedding  ─▶ cut ─▶ block ─▶ block ─▶ ... ─▶ gather ─▶ norm, head, loss
    on all of it         on the part, but attention         on all of it, equal on each rank

Of several lists of blocks, an encoder's and a decoder's, each does so with a sequence of its own;
a decoder's blocks cut the encoder's outputs, too. Every rank of cp gets the same samples, and so
the loop does not change.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.axes.cp import attention, exchange, follow, relative
from nbdist.engine.layout.plan import random_numbers
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.layout.policies.policies import ContextParallel
from nbdist.shared.errors import LayoutError

FEWEST = 2  # tokens a rank: of one row of attention some models no longer say that it is causal


@dataclass(frozen=True, slots=True)
class Context:
    """The plan of cp for one model.

    Attributes:
        method: "ulysses" or "gather".
        calls: Calls of attention in a forward.
        token_bytes: Bytes that a rank sends over cp for one token of a batch, forward and backward.
            Of several sequences for one of the first, if their lengths are as here.
        lengths: Tokens of each list's sequence, as it was tried.
        hidden: By block, the place of the hidden states among its arguments.
        follows: Which dims follow a sequence.
    """

    method: str
    calls: int
    token_bytes: float
    lengths: tuple[int, ...]
    hidden: dict[str, tuple[str, int]]
    follows: follow.Follows

    def __str__(self) -> str:
        """Return a description."""
        said = f"cp: {self.calls} calls of attention in {len(self.hidden)} blocks, {self.method}"
        if len(self.lengths) == 1:
            return said
        return f"{said}, bytes as for sequences of {' and '.join(map(str, self.lengths))} tokens"


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
    lists = by_list(context.hidden)
    firsts, lasts = ([names[end] for names in lists] for end in (0, -1))
    if policy.loss:
        lasts.pop()
    for name, block in blocks.items():
        relative.give_whole(block, mesh.size())
        _OnPart(
            block,
            mesh,
            policy,
            hidden=context.hidden[name],
            given=context.follows.given[name],
            others=context.follows.others[name],
            made=context.follows.made[name] if name in lasts else None,
            parts=None if name in firsts else 1 if name in begin else parts,
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
        given: follow.Dims,
        others: follow.Dims,
        made: follow.Dims | None,
        parts: int | None,
    ) -> None:
        """Wrap the present forward of `block`.

        Args:
            block: Its forward may be another one's already, as tp's.
            mesh: The axis `cp`.
            policy: The policy of cp.
            hidden: The place of the hidden states, and their dim of the sequence.
            given: The dims of its arguments that follow the sequence.
            others: Those that follow another one.
            made: Those of its outputs, if they are gathered; None leaves them in parts.
            parts: The number of parts of hidden states on this rank; None when they are whole.
        """
        super().__init__(block)
        self._mesh = mesh
        self._policy = policy
        self._hidden = hidden
        self._given = given
        self._others = others
        self._made = made
        self._parts = parts

    @torch_hooks.left_alone_where_wrong
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        length = self._length((args, keywords))
        others = self._other_lengths((args, keywords))
        args, keywords = self._cut((args, keywords), length, others)
        with (
            random_numbers.independent(self._mesh, is_on=self._module.training),
            attention.WholeSequence(self._mesh, self._policy, length, others),
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

    def _other_lengths(self, given: Any) -> set[int]:
        """Return the tokens of this rank's part of other sequences."""
        tensors = follow.tensors_of(given)
        found = {tensors[at].shape[dim] for at, (dim,) in self._others.items() if at in tensors}
        return {check_length(whole, self._mesh.size()) for whole in found if whole > 1}

    def _cut(self, given: Any, length: int, others: set[int]) -> Any:
        """Cut whole arguments along a sequence: hidden states, tables of positions."""
        own = length * self._mesh.size()
        wholes = {own, *(other * self._mesh.size() for other in others)}

        def cut(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            place = pytree.keystr(path)
            sizes = {own} if place in self._given and place not in self._others else wholes
            known = self._others.get(place) or self._given.get(place)
            dims = range(value.dim()) if known is None else known
            found = [dim for dim in dims if value.shape[dim] in sizes]
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
    if rest or part < FEWEST:
        raise LayoutError(
            f"A sequence of {whole} tokens cannot be cut into {cp} equal parts of at least "
            f"{FEWEST}.",
            why=f"cp={cp} gives each rank as many tokens",
            do=f"pad it to {max(-(-whole // cp), FEWEST) * cp}",
        )
    return part


def by_list(names: Iterable[str]) -> list[list[str]]:
    """Return the names of blocks, by list."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(follow.list_of(name), []).append(name)
    return list(found.values())
