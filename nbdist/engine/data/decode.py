"""Decode the files of WebDataset's samples by their endings, where batches are made.

As `webdataset` decodes them by default, but for pickles, which stay bytes: they could run code.
"""

import functools
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

Decode = Callable[[bytes], Any]


def _text(content: bytes) -> str:
    return content.decode("utf-8")


def _npy(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _npz(content: bytes) -> dict[str, Any]:
    return dict(np.load(io.BytesIO(content), allow_pickle=False))


def _tensor(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def _image(content: bytes) -> Any:
    """Return a PIL image in RGB, or the bytes where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return content
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


_BY_ENDING: dict[str, Decode] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("pth", "pt"), _tensor),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff"), _image),
    **dict.fromkeys(("ppm", "pgm", "pbm"), _image),
    "npy": _npy,
    "npz": _npz,
}


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with what its files hold; files of other endings stay bytes."""
    return {name: _one(name, content) for name, content in sample.items()}


def _one(name: str, content: Any) -> Any:
    decode = _BY_ENDING.get(name.rpartition(".")[2])
    return content if decode is None or not isinstance(content, bytes) else decode(content)


def in_turn(first: Callable[[Any], Any], then: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return what does `first`, and then something else."""
    return first if then is None else functools.partial(_in_turn, first, then)


def _in_turn(first: Callable[[Any], Any], then: Callable[[Any], Any], sample: Any) -> Any:
    return then(first(sample))


def collate(samples: list[Any]) -> Any:
    """Return samples as one batch: tensors of what makes one, else lists."""
    if not isinstance(samples[0], dict):
        return default_collate(samples)
    return {name: _together([sample[name] for sample in samples]) for name in samples[0]}


def _together(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, int | float | np.ndarray | torch.Tensor):
        return values
    shapes = {getattr(one, "shape", ()) for one in values}
    if len(shapes) > 1 or any(type(one) is not type(first) for one in values):
        return values
    return default_collate(values)
