"""Generate text with a model as it is spread: transformers' own `generate`, on each rank.

    refused      what ranks cannot do together, in words
    transformers its `generate` calls the model; here that goes through the layout, or all stages
    loop         the same for a module without one
    then         modes and random numbers are as before; the step that runs has no times

What ranks must have in common is checked before they begin. Under axes beside dp they make as many
forwards as the one that makes most (`synced_gpus`).
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_modules, torch_sharded
from nbdist.engine.layout.generation import loop, refused
from nbdist.engine.layout.generation.stages import StagedCalls
from nbdist.engine.layout.generation.streamed_text import StreamedText, Tokenizer
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import precision
from nbdist.engine.layout.trainable import Trainable
from nbdist.engine.layout.weights import save_adapters
from nbdist.engine.steps import step_state
from nbdist.engine.steps.forwards import in_modes
from nbdist.engine.training import training
from nbdist.shared.errors import LayoutError
from nbdist.shared.text import name_ranks


def generate(
    layout: Trainable,
    inputs: Any,
    max_new_tokens: int,
    seed: int,
    tokenizer: Tokenizer | None,
    options: dict[str, Any],
) -> Any:
    """Return what `Layout.generate` returns; see there."""
    model, shape = layout.model, layout.shape
    called = _called(model)
    refused.refuse_layout(shape, layout.policies, called)
    refused.refuse_options(shape, options, getattr(called, "generation_config", None))
    refused.refuse_count(max_new_tokens)
    given = _as_keywords(inputs, called, layout.mesh.device_type)
    _refuse_unlike(shape, given, {"max_new_tokens": max_new_tokens, "seed": seed, **options})
    streamer = None
    if tokenizer is not None:
        streamer = StreamedText(tokenizer, is_shown=dist.get_rank() == 0)
    with _beside_training(model, seed), torch.no_grad():
        if _is_transformers(called):
            return _by_transformers(
                layout,
                called,
                given,
                tokenizer,
                streamer,
                {"max_new_tokens": max_new_tokens, **options},
            )
        call = StagedCalls.of_ids(layout) if layout.pipeline is not None else model
        return loop.run(
            lambda ids: _plain(call(ids)),
            _ids_alone(given, called),
            _choice(called, max_new_tokens, options),
            streamer=streamer,
            is_synced=_is_synced(shape),
        )


def _by_transformers(
    layout: Trainable,
    called: nn.Module,
    given: dict[str, Any],
    tokenizer: Tokenizer | None,
    streamer: StreamedText | None,
    options: dict[str, Any],
) -> Any:
    model, shape = layout.model, layout.shape
    if streamer is not None:
        options["streamer"] = streamer
    if options.get("stop_strings") is not None:
        options["tokenizer"] = tokenizer
    calls: Any = StagedCalls.of(layout, called) if layout.pipeline else _Calls(model, called)
    with ExitStack() as stack:
        if getattr(called.config, "is_encoder_decoder", False):
            stack.enter_context(_encoder_by_itself(layout))
        stack.enter_context(torch_modules.called_as(called, calls))
        generating: Any = model
        return generating.generate(
            **given, **options, synced_gpus=_is_synced(shape), disable_compile=True
        )


class _Calls:
    """Calls of a model of transformers, through the layout's: PEFT's `generate` goes past it."""

    def __init__(self, model: nn.Module, called: nn.Module) -> None:
        self._model = model
        self._called = called
        self._is_within = False

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._is_within:
            return torch_modules.call_itself(self._called, *args, **keywords)
        self._is_within = True
        try:
            return _plain(self._model(*args, **keywords))
        finally:
            self._is_within = False


def _plain(out: Any) -> Any:
    """Return an output whose logits are whole: `TensorParallel(loss=True)` leaves them cut."""
    logits = getattr(out, "logits", out)
    if not isinstance(logits, DTensor):
        return out
    if logits is out:
        return logits.full_tensor()
    out.logits = logits.full_tensor()
    return out


@contextmanager
def _beside_training(model: nn.Module, seed: int) -> Iterator[None]:
    """Evaluate, with random numbers that begin from `seed`; then all is as before."""
    random = step_state.here().random_numbers()
    evaluates = [False for _ in model.modules()]
    # Compiled code would be compiled anew for each length.
    with training.here.unseen(), in_modes(model, evaluates), torch_modules.as_written():
        torch.manual_seed(seed)
        try:
            yield
        finally:
            step_state.here().start_over(random)


@contextmanager
def _encoder_by_itself(layout: Trainable) -> Iterator[None]:
    """Have the encoder, which is called without its model, find weights and precision."""
    model, chosen = layout.model, layout.policies.precision
    is_sharded = isinstance(model, FSDPModule)
    with ExitStack() as stack:
        if is_sharded:
            stack.callback(torch_sharded.reshard, model)
            torch_sharded.gather_root(model)
        elif chosen.compute != "fp32":
            dtype = precision.DTYPES[chosen.compute]
            stack.enter_context(torch.autocast(layout.mesh.device_type, dtype))
        yield


def _called(model: nn.Module) -> nn.Module:
    """Return the module whose `generate` calls itself: of PEFT's the base."""
    if not save_adapters.is_peft(model):
        return model
    peft: Any = model
    if getattr(peft.active_peft_config, "is_prompt_learning", False):
        raise LayoutError(
            "layout.generate cannot run a model with learned prompts.",
            why="PEFT puts them before the prompt outside of the model that has the layout",
            do="use LoRA, DoRA or IA3",
        )
    base: nn.Module = peft.get_base_model()
    return base


def _is_transformers(model: Any) -> bool:
    """Return whether transformers generates with it.

    Raises:
        LayoutError: It is of transformers, and has no text to make.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    if not model.can_generate():
        raise LayoutError(
            f"{torch_sharded.plain_name(model)} makes no text: it has no head that predicts the "
            "next token.",
            do="use one of transformers' ...ForCausalLM or ...ForConditionalGeneration",
        )
    return True


def _as_keywords(inputs: Any, model: nn.Module, device_type: str) -> dict[str, Any]:
    """Return the model's inputs by name, on its device; one sequence is a batch of one."""
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        ids = refused.as_ids(inputs)
        given = {
            getattr(model, "main_input_name", "input_ids"): ids if ids.dim() > 1 else ids[None]
        }
    return {
        name: value.to(device_type) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }


def _ids_alone(given: Mapping[str, Any], model: nn.Module) -> Tensor:
    ids = given.get("input_ids")
    if set(given) != {"input_ids"} or not isinstance(ids, Tensor) or ids.dim() != 2:
        raise LayoutError(
            f"layout.generate got {', '.join(map(str, given)) or 'nothing'} for "
            f"{torch_sharded.plain_name(model)}.",
            why="a module without transformers' generate is called as model(ids), with prompts of "
            "one length",
            do="give the ids, (batch, sequence), without padding",
        )
    return ids


def _choice(model: nn.Module, max_new_tokens: int, options: Mapping[str, Any]) -> loop.Choice:
    known = {field.name for field in fields(loop.Choice)}
    if unknown := sorted(set(options) - known):
        raise LayoutError(
            f"layout.generate does not take {', '.join(unknown)} for "
            f"{torch_sharded.plain_name(model)}.",
            why="it is no model of transformers, whose generate has more options",
            do=f"there are {', '.join(sorted(known))}",
        )
    return loop.Choice(max_new_tokens, **options)


def _is_synced(shape: MeshShape) -> bool:
    """Return whether ranks need each other's forwards: replicas of a whole model do not."""
    return set(shape.axes) != {"dp"} and shape.world_size > 1


def _refuse_unlike(shape: MeshShape, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuse ranks that share samples and got other prompts or options. Collective among all.

    Nothing is sent where each rank has samples of its own.

    Raises:
        LayoutError: On all ranks; names those that differ.
    """
    rank = dist.get_rank()
    if shape.data_part(rank)[1] == shape.world_size:
        return
    own = {name: _digest(value) for name, value in {**given, **options}.items()}
    everyone: list[dict[str, str]] = [own] * shape.world_size
    dist.all_gather_object(everyone, own)
    parts = [shape.data_part(at)[0] for at in range(shape.world_size)]
    for at, theirs in enumerate(everyone):
        first = parts.index(parts[at])
        names = theirs.keys() | everyone[first].keys()
        differing = sorted(n for n in names if theirs.get(n) != everyone[first].get(n))
        if differing:
            raise LayoutError(
                f"{name_ranks([first, at]).capitalize()} got other values of "
                f"{', '.join(differing)} for layout.generate.",
                why=f'under "{shape.name}" they share samples: each computes a part of a forward',
                do="give them the same; nbdist.loader gives ranks that share samples the same "
                "batches",
            )


def _digest(value: Any) -> str:
    """Return what tells one value from another; of an object that is its class alone."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.blake2b(raw).hexdigest()}"
    is_plain = isinstance(value, int | float | str | list | tuple | None)
    return repr(value) if is_plain else type(value).__name__
