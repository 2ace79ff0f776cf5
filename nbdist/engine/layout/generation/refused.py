"""What `generate` does not do under a layout, said before any rank begins."""

from collections.abc import Mapping
from typing import Any

import torch

from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.policies import Policies
from nbdist.shared.errors import LayoutError

# Options of transformers, and why not.
_ALWAYS = {
    "assistant_model": "its forwards would be others' on each rank",
    "custom_generate": "its forwards are not known",
    "prompt_lookup_num_tokens": "how many forwards a rank makes would follow from its tokens",
    "synced_gpus": "the layout knows whether ranks need each other's forwards",
}
_WITH_OTHERS = {"prefill_chunk_size": "ranks would make other numbers of forwards"}
_WITH_STAGES = {
    "cache_implementation": "each stage keeps a cache of its own blocks, which grows",
    "inputs_embeds": "the first stage alone has the embedding",
    "output_attentions": "each rank has those of its own blocks",
    "output_hidden_states": "each rank has those of its own blocks",
    "past_key_values": "each stage keeps a cache of its own blocks",
}


def refuse_layout(shape: MeshShape, policies: Policies, model: Any) -> None:
    """Refuse a layout that cannot go token by token.

    Raises:
        LayoutError: It cuts sequences: it has cp, or sequence parallel. Or it has pp, and the model
            an encoder.
    """
    why = ""
    if shape.cp > 1:
        why = "ranks of cp have a part of each sequence, and the next token is one"
    elif shape.tp > 1 and policies.tensor.sequence:
        why = "TensorParallel(sequence=True) cuts a sequence, and the next token is one"
    elif shape.pp > 1 and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        why = "text begins with a call of the encoder alone, whose blocks are on several stages"
    if why:
        raise LayoutError(
            f'layout.generate cannot run this model under "{shape.name}".',
            why=why,
            do='nbdist.parallelize a new model with another layout, such as "zero3", on all ranks, '
            "and other.load_from(layout)",
        )


def refuse_options(shape: MeshShape, options: Mapping[str, Any], defaults: Any) -> None:
    """Refuse options that ranks cannot follow together.

    Args:
        shape: Sizes of the axes.
        options: As they were given.
        defaults: A configuration of transformers for those that were not; None without one.

    Raises:
        LayoutError: Names the first.
    """
    refused = dict(_ALWAYS)
    if set(shape.axes) != {"dp"}:
        refused |= _WITH_OTHERS
    if shape.pp > 1:
        refused |= _WITH_STAGES
    for name, why in refused.items():
        value = options.get(name, getattr(defaults, name, None))
        if value is not None and value is not False:
            raise LayoutError(
                f'layout.generate does not take {name} under "{shape.name}".',
                why=why,
                do="leave it out",
            )


def refuse_count(max_new_tokens: object) -> None:
    """Refuse what is no number of tokens.

    Raises:
        LayoutError: It is none.
    """
    is_count = isinstance(max_new_tokens, int) and not isinstance(max_new_tokens, bool)
    if not is_count or max_new_tokens < 1:  # type: ignore[operator]
        raise LayoutError(
            f"layout.generate got max_new_tokens={max_new_tokens!r}.",
            do="give a whole number of tokens, 1 or more",
        )


def as_ids(inputs: Any) -> torch.Tensor:
    """Return prompts as a tensor: ids (sequence) or (batch, sequence), or what a model takes else.

    Raises:
        LayoutError: They are text, ragged, or nothing.
    """
    given = [inputs] if isinstance(inputs, str) else inputs
    if isinstance(given, list | tuple) and any(isinstance(one, str) for one in given):
        raise LayoutError(
            "layout.generate got text, and takes ids.",
            do='layout.generate(tokenizer(text, return_tensors="pt"), ..., tokenizer=tokenizer)',
        )
    try:
        ids = torch.as_tensor(inputs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            "layout.generate got prompts that are no tensor.",
            why=f"{type(error).__name__}: {error}",
            do="give ids (sequence) or (batch, sequence); pad prompts of other lengths on the "
            'left: tokenizer(texts, padding=True, return_tensors="pt")',
        ) from error
    if not ids.numel() or not ids.dim():
        raise LayoutError(
            "layout.generate got no prompt: " + (f"{inputs!r}." if ids.numel() else "it is empty."),
            do="give at least one id, such as that of a text's beginning",
        )
    return ids
