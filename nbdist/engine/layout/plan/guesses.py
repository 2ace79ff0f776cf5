"""Inputs that a model may run with, found without asking its user."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from nbdist.engine.layout.plan.inputs import Inputs

TOKENS, _FEW_TOKENS = 16, 4  # of a guessed sequence
_PIXELS = (32, 64, 224)  # of the side of a guessed image
_FIRST_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def guesses(model: nn.Module, tokens: int = TOKENS) -> Iterator[Inputs]:
    """Yield inputs that a model may run with, the likeliest first.

    They are those that its first layers let expect, and then what it tells by itself.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    yield from _by_layers(model, tokens, device)
    yield from _told(model, device)
    yield from _of_two(model, tokens, device)


def _by_layers(model: nn.Module, tokens: int, device: torch.device) -> Iterator[Inputs]:
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if tables:
        # A table that is added as a whole, such as one of positions, wants as many tokens.
        lengths = dict.fromkeys([tokens, *(m.num_embeddings for m in tables), _FEW_TOKENS])
        entries = min(m.num_embeddings for m in tables)
        for length in lengths:
            ids = torch.arange(length, device=device) * 7 % entries
            yield Inputs((ids.unsqueeze(0),), {})
        return
    first = next((m for m in model.modules() if isinstance(m, _FIRST_LAYERS)), None)
    for shape in _shapes_for(first, tokens):
        assert first is not None
        wave = torch.linspace(-1, 1, _size(shape), device=device).sin()
        yield Inputs((wave.view(shape).to(first.weight.dtype),), {})


def _told(model: nn.Module, device: torch.device) -> Iterator[Inputs]:
    """Yield what a model of transformers or timm says that it takes."""
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, Mapping):
        given = {name: one for name, one in dummies.items() if isinstance(one, torch.Tensor)}
        yield Inputs((), {name: one.to(device) for name, one in given.items()})
    settings = getattr(model, "default_cfg", None)
    size = settings.get("input_size") if isinstance(settings, Mapping) else None
    if size is not None:
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        wave = torch.linspace(-1, 1, 2 * _size(tuple(size)), device=device).sin()
        yield Inputs((wave.view(2, *size).to(dtype),), {})


def _of_two(model: nn.Module, tokens: int, device: torch.device) -> Iterator[Inputs]:
    """Yield what an encoder-decoder of transformers may take: sounds or images, and words."""
    main = getattr(model, "main_input_name", None)
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False) or main is None:
        return
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    ids = torch.arange(tokens, device=device).unsqueeze(0) * 7 % min(tables, default=1)
    first = next((m for m in model.modules() if isinstance(m, _FIRST_LAYERS[1:])), None)
    shapes = _shapes_for(first, tokens)
    if isinstance(first, nn.Conv1d):
        # As long as a table of positions wants it, behind convolutions that make it shorter.
        strides = [int(m.stride[0]) for m in model.modules() if isinstance(m, nn.Conv1d)]
        shapes = [(1, first.in_channels, count * math.prod(strides)) for count in tables]
    for shape in shapes:
        assert first is not None
        wave = torch.linspace(-1, 1, _size(shape), device=device).sin()
        words = ids.expand(shape[0], -1)
        yield Inputs(
            (), {main: wave.view(shape).to(first.weight.dtype), "decoder_input_ids": words}
        )


def _shapes_for(first: nn.Module | None, tokens: int) -> list[tuple[int, ...]]:
    """Return shapes of features that a model with this first layer may take."""
    if isinstance(first, nn.Linear):
        return [(2, first.in_features), (1, tokens, first.in_features)]
    if first is None:
        return []
    channels, dims = int(first.in_channels), len(first.kernel_size)  # type: ignore[arg-type]
    return [(2, channels, *[pixels] * dims) for pixels in _PIXELS]


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
