"""What of a model that is cut over ranks travels to a replacement rank.

A part travels from a rank that holds the same one: along the dims of a mesh over which parameters
are replicated (dp beside fsdp or tp). Where the new rank's own part lies in a peer's memory
(`expect`), its objects travel without their contents, which are put in afterwards. All else died
with its rank, and whatever holds it is given up.

Main thread only.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat import torch_pipeline, torch_shards
from nbdist.engine.recovery.clone import torch_rebuild, torch_rebuild_fsdp, torch_rebuild_zero
from nbdist.engine.recovery.clone.pickler import LostState

_CUT = "it is cut into shards, and those of this rank died with it"
_STAGED = "it is cut into stages, and those of this rank died with it"
_OF_A_STAGE = "it belongs to a stage of a pipeline, and that of this rank died with it"
_CUT_STATES = "each rank holds a part of its states, and this rank's died with it"


class Expected:
    """By new rank, the tensors and modules whose contents it gets from a peer's memory."""

    def __init__(self) -> None:
        self._expected: dict[int, tuple[set[int], list[Any]]] = {}

    def expect(self, replacement: int, objects: Iterable[Any]) -> None:
        """Have these objects travel to a new rank without the contents of what is cut."""
        ids, held = self._expected.setdefault(replacement, (set(), []))
        for one in objects:
            ids.add(id(one))
            held.append(one)  # an `id` is its own as long as the object lives

    def expect_nothing(self) -> None:
        """Forget what `expect` was told: the recovery is over."""
        self._expected.clear()

    def is_expected(self, replacement: int, value: object) -> bool:
        """Return whether a new rank gets the contents of `value` from a peer."""
        return replacement in self._expected and id(value) in self._expected[replacement][0]

    def comes_whole(self, module: nn.Module, source: int, replacement: int) -> bool:
        """Return whether a new rank gets its own part of a module, from its source or from a peer.

        Args:
            module: On this rank.
            source: The rank that the new one is cloned from.
            replacement: A rank that held a part of it.
        """
        if self.is_expected(replacement, module):
            return True
        if torch_rebuild.is_staged(module):
            return source in torch_pipeline.here.copies_of(module, replacement)
        cut = [p for p in module.parameters() if torch_shards.is_cut(p)]
        return source in torch_shards.common_copies(cut, replacement)


class Shards:
    """The recipe for what is cut; one for each dump.

    Args:
        source: This rank.
        replacement: The rank that the dump is for.
    """

    def __init__(self, source: int, replacement: int) -> None:
        self._source = source
        self._replacement = replacement

    def reduce(self, value: Any) -> tuple[Any, ...] | None:
        """Return a reduction, or None for what is not cut.

        Raises:
            LostState: Its part died with the rank.
        """
        if isinstance(value, torch.Tensor):
            if torch_shards.is_cut(value):
                return self._reduce_cut(value)
            if torch_rebuild.is_of_a_stage(value) and not self._is_of_same_stage(value):
                raise LostState(_OF_A_STAGE)
            return None
        if isinstance(value, nn.Module):
            self._check_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            if torch_rebuild.is_sharded_optimizer(value):
                if not here.is_expected(self._replacement, value):
                    raise LostState(_CUT_STATES)
                return torch_rebuild_zero.reduce(value)
        elif type(value) is torch_shards.spec_type():
            return torch_shards.reduce_spec(value)
        return torch_rebuild_fsdp.reduce(value)

    def _reduce_cut(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        is_same = self._replacement in torch_shards.copies(tensor, self._source)
        if not is_same and not here.is_expected(self._replacement, tensor):
            raise LostState(_CUT)
        function, args = torch_shards.reduce_part(tensor, with_contents=is_same)
        state = torch_rebuild.attributes_of(tensor)
        return function, args, state, None, None, torch_rebuild.fill_tensor

    def _check_module(self, module: nn.Module) -> None:
        if torch_rebuild.is_fsdp1(module):
            raise LostState(_CUT)
        if torch_rebuild.is_staged(module) and not here.comes_whole(
            module, self._source, self._replacement
        ):
            raise LostState(_STAGED)

    def _is_of_same_stage(self, tensor: torch.Tensor) -> bool:
        return all(
            here.comes_whole(model, self._source, self._replacement)
            for model in torch_pipeline.here.laid_models()
            if any(tensor is parameter for parameter in model.parameters())
        )


here = Expected()
