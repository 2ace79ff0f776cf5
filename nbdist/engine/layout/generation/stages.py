"""Calls of a model whose blocks are on other ranks: through all stages, each with its own cache.

A stage's forward counts with the cache of the first layer, wherever that is. So layers of other
stages hold as many tokens as this one's, of one number each: lengths and masks are those of one
process.
"""

# B batch, T sequence

from typing import Any, cast

import torch
from torch import Tensor, nn

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.axes.pp.all_stages import AllStages
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.trainable import Trainable
from nbdist.shared.errors import LayoutError


class StagedCalls:
    """The calls of one text. Main thread, on all ranks of the pipeline together."""

    def __init__(self, layout: Trainable, called: nn.Module, name: str | None) -> None:
        pipeline = layout.pipeline
        assert pipeline is not None, "asked by who calls"
        self._called = called
        self._name = name
        is_sharded = layout.shape.fsdp > 1
        self._stages = AllStages(pipeline.runner, name, is_sharded=is_sharded)

    @classmethod
    def of(cls, layout: Trainable, called: nn.Module) -> "StagedCalls":
        """Return those of a model of transformers, in the place of `called`'s own."""
        return cls(layout, called, "input_ids")

    @classmethod
    def of_ids(cls, layout: Trainable) -> "StagedCalls":
        """Return those of a plain module, `model(ids)`."""
        return cls(layout, layout.model, None)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return the model's output as far as a text needs it: the last token's logits."""
        if self._stages.is_within:
            return torch_modules.call_itself(self._called, *args, **keywords)
        if self._name is None:
            return self._stages.run(Inputs(args, {}), args[0])
        from transformers.modeling_outputs import CausalLMOutputWithPast

        ids, cache = keywords[self._name], keywords.get("past_key_values")
        before = 0 if cache is None else _length(cache)
        logits = self._stages.run(Inputs((), keywords), ids)
        if cache is not None:
            _fill(cache, before + ids.shape[1], logits)
        return CausalLMOutputWithPast(logits=cast(torch.FloatTensor, logits), past_key_values=cache)


def _length(cache: Any) -> int:
    """Return the tokens that a cache has.

    Raises:
        LayoutError: Its layers do not count tokens.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or not all(hasattr(layer, "get_seq_length") for layer in layers):
        raise LayoutError(
            f"layout.generate under pp does not know a {type(cache).__name__} of such layers.",
            why="each stage keeps a cache of its own blocks, and attention's alone is understood",
            do="use_cache=False, which computes each token from the whole text",
        )
    return max((layer.get_seq_length() for layer in layers), default=0)


def _fill(cache: Any, length: int, logits: Tensor) -> None:
    """Have layers that no block of this rank has filled hold `length` tokens, (B, 1, T, 1)."""
    for number, layer in enumerate(cache.layers):
        missing = length - layer.get_seq_length()
        if missing:
            nothing = logits.new_zeros(len(logits), 1, missing, 1)
            cache.update(nothing, nothing, number)
