"""Calls of PEFT and transformers that a layout cannot follow, refused in words where they are made.

A model of transformers takes adapters itself, and saves what it holds.

`set_adapter`, `enable_adapter_layers` and `disable_adapter` it follows, and so it does merging
where a rank has all layers.
"""

from functools import partial
from typing import Any, NoReturn

from torch import nn

from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.weights import save_adapters
from nbdist.shared.errors import LayoutError

_MERGED = "layout.save_pretrained(folder, merged=True) on all ranks, which writes the merged model"
_NEW = (
    "the new adapter's weights would be whole on every rank, and their gradients not averaged",
    "add all adapters (add_adapter, load_adapter), then parallelize",
)
_SAVED = (
    "it knows of this rank's parts alone",
    "layout.save_pretrained(folder) on all ranks, which writes the same files, whole",
)
_UNLOADED = ("it takes apart layers of which a rank has a part", _MERGED)
_STAGES = ("a rank has the layers of its stages only", _MERGED)


def refuse(model: nn.Module, shape: MeshShape, layout: str) -> None:
    """Have such calls of a spread model refused; models without them are left as they are.

    Args:
        model: Spread.
        shape: Sizes of the axes.
        layout: Its name, for the errors.
    """
    refused: dict[str, tuple[str, str]] = {}
    if save_adapters.takes_adapters(model) and shape.is_cut:
        refused |= {"add_adapter": _NEW, "load_adapter": _NEW}
    if callable(getattr(model, "save_pretrained", None)) and shape.is_cut:
        refused |= {"save_pretrained": _SAVED}
    if save_adapters.is_peft(model) and max(shape.tp, shape.pp, shape.ep) > 1:
        refused |= {"merge_and_unload": _UNLOADED, "unload": _UNLOADED}
    if save_adapters.is_peft(model) and shape.pp > 1:
        refused |= {"merge_adapter": _STAGES}
    for call, (why, do) in refused.items():
        model.__dict__[call] = partial(_raise, call, layout, why, do)


def _raise(call: str, layout: str, why: str, do: str, *_: Any, **__: Any) -> NoReturn:
    raise LayoutError(
        f'model.{call} cannot follow the layout "{layout}" of this model.', why=why, do=do
    )
