"""A module of experts: what it is called with, and its forward where each rank has some of them.

Its own forward computes them, on rows for which one expert each is chosen: its activations and its
kernels stay as they are written.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.axes.ep import exchange
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.training import expert_load
from nbdist.shared.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Experts:
    """A module of experts in the plan of ep.

    Attributes:
        name: Its qualified name.
        count: How many experts it has.
        sized: Its attributes that say so, where its forward asks them.
        chosen: Experts of a token.
        token_bytes: Of rows, for a token of a batch, were all of them sent, forward and backward.
    """

    name: str
    count: int
    sized: tuple[str, ...]
    chosen: int
    token_bytes: float


@dataclass
class Called:
    """A call of such a module.

    Attributes:
        hidden: (T, H).
        index: (T, K).
        weight: (T, K).
    """

    hidden: Tensor
    index: Tensor
    weight: Tensor
    _places: tuple[int, int, int]
    _leaves: list[Any] = field(repr=False)
    _spec: Any = field(repr=False)

    @classmethod
    def of(cls, args: tuple[Any, ...], keywords: dict[str, Any]) -> "Called | None":
        """Return a call with tokens (T, H), whole numbers (T, K) and weights (T, K), and no more.

        None for any other.
        """
        leaves, spec = tree_flatten((args, keywords))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        floats = [place for place in places if leaves[place].is_floating_point()]
        whole = [place for place in places if place not in floats]
        if len(floats) != 2 or len(whole) != 1 or leaves[whole[0]].dtype != torch.int64:
            return None
        index = leaves[whole[0]]
        # The first of two of one shape is taken for the tokens: that it is, the proof shows.
        weight = max((p for p in floats if leaves[p].shape == index.shape), default=None)
        if index.dim() != 2 or weight is None:
            return None
        hidden = next(place for place in floats if place != weight)
        if leaves[hidden].dim() != 2 or len(leaves[hidden]) != len(index):
            return None
        places_of = (hidden, whole[0], weight)
        return cls(leaves[hidden], index, leaves[weight], places_of, leaves, spec)

    def run(
        self, forward: Callable[..., Tensor], hidden: Tensor, index: Tensor, weight: Tensor
    ) -> Tensor:
        """Return what a forward makes of other tensors in the places of these."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, (hidden, index, weight), strict=True):
            leaves[place] = tensor
        args, keywords = tree_unflatten(leaves, self._spec)
        return forward(*args, **keywords)


@contextmanager
def with_count(module: nn.Module, sized: tuple[str, ...], count: int) -> Iterator[None]:
    """Have a module say within the block that it has so many experts."""
    before = {name: vars(module)[name] for name in sized}
    vars(module).update(dict.fromkeys(sized, count))
    try:
        yield
    finally:
        vars(module).update(before)


class OnOwners(Around):
    """The forward of a module of experts, of which this rank has some. Main thread, or autograd's.

    Attributes:
        of: How many experts there are.
        counts: Tokens of each of this rank's experts in the newest forward; empty before the first.
        step_bytes: What one forward and backward exchange beside rows, with a rank's own part.
    """

    def __init__(self, module: nn.Module, experts: Experts, mesh: DeviceMesh) -> None:
        """Wrap the present forward of `module`; `mesh` is the axis `ep`."""
        super().__init__(module)
        self._experts = experts
        self._mesh = mesh
        self.counts: list[int] = []
        self.of = experts.count
        self.step_bytes = exchange.count_bytes(experts.count, mesh.size())

    @torch_hooks.left_alone
    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        """Send tokens to the ranks of their experts, and return the sum of the results.

        Raises:
            LayoutError: The call is another one than the module was tried with.
        """
        called = Called.of(args, keywords)
        if called is None:
            raise LayoutError(
                f"{self._experts.name} is called in another way than it was tried.",
                why="ep sends tokens (T, H) by experts (T, K), with weights (T, K)",
                do="give ExpertParallel(example=...) a batch as you train with",
            )

        def compute(hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            own = self._experts.count // self._mesh.size()
            with with_count(self._module, self._experts.sized, own):
                return called.run(self.inner, hidden, index, weight)

        made, load = exchange.on_owners(
            compute, called.hidden, called.index, called.weight, self._experts.count, self._mesh
        )
        self.counts = load.counts
        if self._module.training and not torch_hooks.is_in_backward():  # else it runs again
            first = self._mesh.get_local_rank() * len(load.counts)
            expert_load.here.note(self._experts.name, first, load.counts, load.even)
        return made
