"""Activation checkpointing: blocks keep only their inputs, and run again in backward.

torch's checkpoint without reentrant autograd, around the block's own forward: hooks of fsdp and tp
are outside and are not called again, `state_dict` keys stay, and dropout draws the same numbers.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; `selective` keeps
the same as torchtitan.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint
from nbdist.shared.errors import LayoutError

# Operators whose results `selective` keeps. Not every torch has each of them.
_KEPT = {
    "aten": (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "_c10d_functional": (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "wait_tensor",
    ),
}
# A cache of keys and values would be written a second time: transformers leaves it out too.
_CACHES = {
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
    "use_cache": False,
}


def chosen(policy: ActivationCheckpoint, blocks: dict[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of the blocks that compute again: every k-th, beginning with the first."""
    return tuple(blocks)[:: policy.every]


def check(
    policy: ActivationCheckpoint,
    model: nn.Module,
    blocks: dict[str, nn.Module],
    halving: str | None,
) -> None:
    """Refuse a model without blocks, and what a pipeline's schedule cannot do.

    Args:
        policy: The policy.
        model: Only for the error.
        blocks: By name.
        halving: The schedule of the pipeline, where it makes backwards in two halves.

    Raises:
        LayoutError: There is no block, or `selective` would have to compute it twice again.
    """
    if policy.selective and halving is not None:
        raise LayoutError(
            f'ActivationCheckpoint(selective=True) does not go with Pipeline("{halving}").',
            why="it makes each backward in two halves, and torch lets what selective has kept be "
            "read by one",
            do='ActivationCheckpoint() without selective, or Pipeline("1f1b") or "interleaved"',
        )
    if not blocks:
        raise LayoutError(
            f"ActivationCheckpoint finds no blocks in this {type(model).__name__}.",
            why="a block is one of several equal modules in a ModuleList, Sequential or ModuleDict",
            do="call torch.utils.checkpoint in the model's forward, or leave ActivationCheckpoint "
            "out",
        )


def apply(
    policy: ActivationCheckpoint, blocks: dict[str, nn.Module], *, can_compile: bool
) -> dict[str, "Checkpointed"]:
    """Let the chosen blocks compute again, in place.

    Args:
        policy: Which ones, and how.
        blocks: By name.
        can_compile: False has `torch.compile` leave these blocks as they are: inside its own
            checkpoint it can neither exchange parameters, as tp does, nor draw numbers, as cp, nor
            end a forward early, as pp.
    """
    return {
        name: Checkpointed(blocks[name], policy, can_compile=can_compile)
        for name in chosen(policy, blocks)
    }


class Checkpointed(Around):
    """A block's forward, of which only the inputs are kept.

    Main thread, and autograd's where it runs again.

    Attributes:
        input_bytes: Bytes of the inputs that the last forward kept; 0 before the first.
    """

    def __init__(
        self, block: nn.Module, policy: ActivationCheckpoint, *, can_compile: bool
    ) -> None:
        super().__init__(block)
        self._can_compile = can_compile
        self._is_selective = policy.selective
        self._has_buffers = next(block.buffers(), None) is not None
        self.input_bytes = 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the block, and forget."""
        if torch.compiler.is_compiling() and not self._can_compile:
            return _uncompiled(self, args, keywords)
        if not torch.is_grad_enabled():
            return self.inner(*args, **keywords)
        args, keywords = self._without_caches(args, keywords)
        if torch.compiler.is_compiling():
            # The compiler has its own checkpoint, in which a block's buffers change once. Of
            # contexts it accepts only a partial: it has not traced a plain function yet.
            kept: Any = {"context_fn": functools.partial(_selective)} if self._is_selective else {}
            return checkpoint(self.inner, *args, use_reentrant=False, **kept, **keywords)
        self.input_bytes = sum(
            x.numel() * x.element_size()
            for x in (*args, *keywords.values())
            if isinstance(x, torch.Tensor)
        )
        return checkpoint(
            self.inner, *args, use_reentrant=False, context_fn=self._contexts, **keywords
        )

    def _without_caches(
        self, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        keywords = {name: _without_cache(name, value) for name, value in keywords.items()}
        if all(arg is None or isinstance(arg, torch.Tensor) for arg in args):  # as nearly all are
            return args, keywords
        names = list(inspect.signature(self.__wrapped__).parameters)[: len(args)]
        return tuple(_without_cache(*one) for one in zip_longest(names, args)), keywords

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, again = _selective() if self._is_selective else (nullcontext(), nullcontext())
        return forward, _Recomputation(
            tuple(self._module.buffers()) if self._has_buffers else (), again
        )


def _without_cache(name: str | None, value: Any) -> Any:
    return _CACHES.get(name or "", value) if value is not None else None


def _call(block: Checkpointed, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return block(*args, **keywords)


_uncompiled = torch_hooks.left_alone(_call)


class _Recomputation(AbstractContextManager[None]):
    """Wraps a block that computes again; may be entered again.

    Schedules that make backwards in halves compute a block twice. Running statistics follow a batch
    once, however often the block sees it.
    """

    def __init__(self, buffers: tuple[torch.Tensor, ...], inner: AbstractContextManager[Any]):
        self._buffers, self._inner = buffers, inner
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> None:
        # Outside the modes that see each operator.
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for buffer, value in zip(self._buffers, self._kept, strict=True):
            # `.data` has its own version counter: nothing that backward uses has changed.
            buffer.data.copy_(value)
        self._kept = []


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(_context: object, operator: object, *_args: object, **_keywords: object) -> Any:
    is_kept = operator in _kept_operators()
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _kept_operators() -> frozenset[Callable[..., Any]]:
    found = set()
    for namespace, names in _KEPT.items():
        library = getattr(torch.ops, namespace)
        found |= {getattr(library, name).default for name in names if hasattr(library, name)}
    return frozenset(found)
