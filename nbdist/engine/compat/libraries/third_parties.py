"""Where Accelerate, the Trainer and DeepSpeed take a model, adapted when a cell imports them.

Accelerate's `prepare` wraps every model in DDP. For a model "that already owns placement and
gradient reduction" transformers' Trainer calls `prepare_model(..., evaluation_mode=True)`, which
brings autocast and compilation alone; we do the same for models that have a layout. Tried with
accelerate 1.15, transformers 5.23, trl 1.13, deepspeed 0.19.8.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbdist.engine.compat.libraries import on_import
from nbdist.engine.compat.torch_wrappers import Ask
from nbdist.shared.errors import LayoutError

IsSpread = Callable[[nn.Module], bool]  # may raise
AskLoader = Callable[[Optimizer], None]  # may raise
AskSaving = Callable[[nn.Module], None]  # may raise

_STATES = ("PartialState", "GradientState", "AcceleratorState")
_USE_FSDP = "ACCELERATE_USE_FSDP"


def check() -> list[str]:
    """Return what Accelerate, where it is imported, lacks of what we use; else nothing."""
    module = sys.modules.get("accelerate.accelerator")
    if module is None:
        return []
    broken = [
        f"accelerate.state.{name} shares no attributes by `_shared_state` any more"
        for name in _STATES
        if not hasattr(getattr(sys.modules["accelerate.state"], name, None), "_shared_state")
    ]
    wanted = {"__init__": "fsdp_plugin", "prepare_model": "evaluation_mode"}
    return broken + [
        f"Accelerator.{name} takes no {word} any more"
        for name, word in wanted.items()
        if word not in inspect.signature(getattr(module.Accelerator, name)).parameters
    ]


def adapt(is_spread: IsSpread, ask_loader: AskLoader, ask_saving: AskSaving, ask: Ask) -> None:
    """Adapt Accelerate, transformers and DeepSpeed, now or when they are imported.

    Args:
        is_spread: Called with each model that Accelerate prepares; True leaves it as it is. Also
            with the one that a Trainer is made for, of transformers or TRL, for what it raises.
        ask_loader: Called with each optimizer for which Accelerate shares out a DataLoader.
        ask_saving: Called before a Trainer that writes checkpoints trains a model.
        ask: Called before DeepSpeed takes a model.
    """

    def adapt_accelerate(module: Any) -> None:
        _adapt_model(module.Accelerator, is_spread)
        _adapt_loader(module.Accelerator, ask_loader)
        _refuse_plugin(module.Accelerator)

    on_import.here.adapt("accelerate.accelerator", adapt_accelerate)
    on_import.here.adapt(
        "transformers.trainer", lambda it: _adapt_trainer(it.Trainer, is_spread, ask_saving)
    )
    on_import.here.adapt("deepspeed.runtime.engine", lambda it: _adapt_deepspeed(it, ask))


def shared_states() -> dict[str, Any]:
    """Return Accelerate's states that are in use, by name: each stands for all of its class.

    The one of the processes is held by no object, and made where it is asked.
    """
    module = sys.modules.get("accelerate.state")
    found = {}
    for name in () if module is None else _STATES:
        kind = getattr(module, name)
        if kind._shared_state:
            found[name] = object.__new__(kind)
            found[name].__dict__ = kind._shared_state
    return found


def _adapt_model(accelerator: Any, is_spread: IsSpread) -> None:
    native = accelerator.prepare_model

    @functools.wraps(native)
    def prepare_model(
        self: Any,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        # One that Accelerate has wrapped itself is given again in evaluations.
        if not getattr(model, "_is_accelerate_prepared", False) and is_spread(model):
            device_placement, evaluation_mode = False, True
        return native(
            self, model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )

    accelerator.prepare_model = prepare_model


def _adapt_loader(accelerator: Any, ask: AskLoader) -> None:
    native = accelerator.prepare

    @functools.wraps(native)
    def prepare(self: Any, *given: Any, **keywords: Any) -> Any:
        is_sharing_out = any(
            isinstance(it, DataLoader) and not getattr(it, "_is_accelerate_prepared", False)
            for it in given
        )
        for optimizer in given if is_sharing_out else ():
            if isinstance(optimizer, Optimizer):
                ask(optimizer)
        return native(self, *given, **keywords)

    accelerator.prepare = prepare


def _refuse_plugin(accelerator: Any) -> None:
    native = accelerator.__init__
    signature = inspect.signature(native)

    @functools.wraps(native)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        given = signature.bind(self, *args, **keywords).arguments
        # TrainingArguments say it by the environment, where it must not stay for others.
        asked = given.get("fsdp_plugin") is not None or _is_set(_USE_FSDP)
        if asked and (given.get("cpu") or _is_set("ACCELERATE_USE_CPU")):
            os.environ.pop(_USE_FSDP, None)
            raise LayoutError(
                "Accelerate ignores its FSDP plugin on the CPU and would train with DDP.",
                do='nbdist.parallelize(model, "zero3"), and Accelerator() without the plugin: it '
                "takes the model as it is",
            )
        native(self, *args, **keywords)

    accelerator.__init__ = __init__


def _adapt_trainer(trainer: Any, is_spread: IsSpread, ask: AskSaving) -> None:
    native = trainer.train

    # Before any constructor: those of TRL take a model's forward apart before they come to this
    # one's, and what Accelerate would refuse fails there in words of their own.
    def __new__(cls: type, model: Any = None, *_: Any, **__: Any) -> Any:
        if isinstance(model, nn.Module):
            is_spread(model)
        return object.__new__(cls)

    trainer.__new__ = staticmethod(__new__)

    @functools.wraps(native)
    def train(self: Any, *args: Any, **keywords: Any) -> Any:
        if self.args.save_strategy != "no":
            ask(self.model)
        return native(self, *args, **keywords)

    trainer.train = train


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() == "true"


def _adapt_deepspeed(module: Any, ask: Ask) -> None:
    engine = module.DeepSpeedEngine
    native = engine.__init__
    signature = inspect.signature(native)

    @functools.wraps(native)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        ask("DeepSpeed", signature.bind(self, *args, **keywords).arguments["model"])
        native(self, *args, **keywords)

    engine.__init__ = __init__
