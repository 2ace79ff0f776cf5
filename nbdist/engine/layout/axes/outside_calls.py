"""Parts of an FSDP unit that the model calls from outside it.

diffusers' DiT ends with `self.transformer_blocks[0].norm1.emb(...)`: a part of a block, after the
block has given its gathered parameters back. torch would compute with a shard, and raise "mixed
torch.Tensor and DTensor". Such a block stays gathered until its backward. One of which a part is
called before the block itself cannot be helped: in backward the block's gradients are averaged
before that part's are there.

Detected in the first forward that trains, then the hooks are removed. Compiled models are not
checked: there the hooks stay and are traced to nothing, for a change of hooks would recompile.
Main thread.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nbdist.shared.errors import LayoutError

_log = logging.getLogger(__name__)


class _Watch:
    """One model's first forward: which of its units run, have run, and must stay gathered."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._in_forward = False
        self._is_compiled = False  # in a part: nothing of it is seen then
        self._running: list[nn.Module] = []
        self._done: set[nn.Module] = set()
        self._kept: set[nn.Module] = set()
        add = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
            model.register_forward_hook(self._has_seen),
        ]
        for path, unit in units.items():
            add.append(unit.register_forward_pre_hook(self._enter, prepend=True))
            add.append(unit.register_forward_hook(self._leave, always_call=True))
            for inner, part in unit.named_modules(prefix=path):
                if part is not unit and next(part.parameters(), None) is not None:
                    add.append(part.register_forward_pre_hook(self._call_of(unit, path, inner)))
        self._hooks = add

    def _begin(self, *_: Any) -> None:
        if not self._is_traced():
            self._in_forward = True
            self._done.clear()

    def _end(self, *_: Any) -> None:
        if self._is_traced():
            return
        self._in_forward = False
        self._running.clear()

    def _has_seen(self, *_: Any) -> None:
        """Remove the hooks after a forward without an error.

        After one torch goes through its own table of hooks, and a hook that is removed then would
        hide the error behind "OrderedDict mutated during iteration".
        """
        if torch.is_grad_enabled() and not self._is_traced() and not self._is_compiled:
            for hook in self._hooks:
                hook.remove()

    def _enter(self, unit: nn.Module, _: Any) -> None:
        if not self._is_traced():
            self._running.append(unit)

    def _leave(self, unit: nn.Module, *_: Any) -> None:
        if self._is_traced():
            return
        if unit in self._running:
            self._running.remove(unit)
        self._done.add(unit)

    def _is_traced(self) -> bool:
        if torch.compiler.is_compiling():
            self._is_compiled = True
            return True
        return False

    def _call_of(self, unit: nn.Module, path: str, inner: str) -> Any:
        def called(_part: nn.Module, _args: Any) -> None:
            if self._is_traced() or self._is_compiled or not self._in_forward:
                return
            if unit not in self._running and unit not in self._kept:
                self._keep(unit, path, inner)

        return called

    def _keep(self, unit: nn.Module, path: str, inner: str) -> None:
        """Keep a unit gathered from here to its backward, in this step and all others."""
        if unit not in self._done:
            raise LayoutError(
                f"{inner} is called before {path}, of which it is a part, and fsdp gathers the "
                f"parameters of {path} for its own forward.",
                why=f"in backward the gradients of {path} are averaged before those of {inner} "
                "are there",
                do='parallelize(model, "zero1"), or have the model call the part inside of its '
                "block",
            )
        assert isinstance(unit, FSDPModule)
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
        self._kept.add(unit)
        _log.info("%s stays gathered until its backward: %s is called after it", path, inner)


def watch(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Detect in the first forward the parts of units that are called from outside.

    Args:
        model: The root, sharded.
        units: Its sharded blocks, by their names in the model.
    """
    _Watch(model, units)
