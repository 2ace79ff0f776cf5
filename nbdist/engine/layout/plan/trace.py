"""Run a model's forward on fake tensors: shapes and order without memory, time or collectives.

What feeds what is seen by hooks, and what a rank's part of the weights would do to the shapes is
tried before anything is cut. The model is left as it is.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from nbdist.engine.compat import torch_fakes, torch_transformer
from nbdist.engine.layout.plan.adapted import layer_of, wrappers
from nbdist.engine.layout.plan.examples import ask_for, of_example
from nbdist.engine.layout.plan.feature_flow import FeatureFlow
from nbdist.engine.layout.plan.guesses import TOKENS, guesses
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.projection import dims_of
from nbdist.shared import origins
from nbdist.shared.errors import LayoutError


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call, in a forward, of a module that has its own parameters.

    Attributes:
        name: Its qualified name; of a layer with an adapter that of both together.
        module: The module; of a layer with an adapter the layer.
        fed: Its first argument: the same object for modules that one tensor feeds.
        sees: Names of the projections of whose features its first argument is made, each of the
            same features of theirs (`feature_flow`).
        feeds: The only projection that takes what this one makes, feature by feature; else empty.
        mixed: What mixes the features of what it makes, in words; else empty.
    """

    name: str
    module: Any
    fed: object
    sees: frozenset[str] = frozenset()
    feeds: str = ""
    mixed: str = ""


def find_inputs(
    model: nn.Module, example: Any, policy: str = "TensorParallel", tokens: int = TOKENS
) -> tuple[Inputs, list[ModuleCall]]:
    """Return inputs with which the model runs, and the calls of its forward.

    Args:
        model: Not changed.
        example: From `TensorParallel.example`; None tries `guesses`.
        policy: Which one can give an example, for the error.
        tokens: Of a guessed sequence.

    Raises:
        LayoutError: The model does not run with the example, or with any that was tried.
    """
    is_given = example is not None
    given = [of_example(model, example)] if is_given else list(guesses(model, tokens))
    first: Exception | None = None
    for inputs in given:
        try:
            return inputs, _trace(model, inputs)
        except Exception as error:
            first = first or error
    refuse_numbers(model, first)
    tried = "the example" if example is not None else "any input that was tried"
    plan = (
        '; or a plan: TensorParallel(plan={"blocks.*.up": "column", "blocks.*.down": "row"})'
        if policy == "TensorParallel"
        else ""
    )
    raise LayoutError(
        f"{type(model).__name__} does not run with {tried}, so what {policy} asks for cannot be "
        "planned.",
        why=f"{type(first).__name__}: {first_line(first)}"
        if first
        else "no layer shows which inputs it takes",
        do=ask_for(policy) + plan,
    ) from first


def refuse_numbers(model: nn.Module, error: Exception | None) -> None:
    """Refuse a forward that decides by the numbers in a tensor, which a trace does not have.

    Raises:
        LayoutError: `error` says that it does; the text names the line.
    """
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        raise LayoutError(
            f"{type(model).__name__} decides by the numbers in a tensor, so its forward cannot be "
            "looked at before it runs.",
            why=f"{place(error)} needs them, and tensors have only shapes while the model is "
            "planned",
            do='"zero3", "hsdp" and "ddp" look at no forward; or decide before the model is '
            "called, and pass it a plain value",
        ) from error


def run_in_parts(model: nn.Module, inputs: Inputs, parts: dict[str, torch.Size]) -> None:
    """Run the forward with parameters of other shapes: those that one rank will hold.

    Raises:
        LayoutError: Some line counts with sizes of the whole; the text names it.
    """
    try:
        run_on_fakes(model, inputs, parts)
    except Exception as error:
        raise LayoutError(
            f"{type(model).__name__} cannot run on a part of its heads or features: "
            f"{first_line(error)}",
            why=f"{place(error)} counts with the sizes of the whole model",
            do="let sizes follow from the tensor: view(b, t, -1, head_dim), not "
            "view(b, t, n_heads, head_dim); or leave the module out with a plan of your own",
        ) from error


def run_on_fakes(
    model: nn.Module,
    inputs: Inputs,
    parts: dict[str, torch.Size],
    flow: FeatureFlow | None = None,
) -> None:
    """Run the forward, without a trace in the model, with parameters of these shapes."""
    with untouched(model), numberless(), FakeTensorMode() as mode, torch.no_grad():
        state = _fake_state(model, mode)
        for name, shape in parts.items():
            state[name] = state[name].new_empty(shape)
        fakes = inputs.map(mode.from_tensor)
        with flow or nullcontext():
            made = torch.func.functional_call(model, state, fakes.args, fakes.keywords)
        if flow is not None:
            flow.end(made)


def _trace(model: nn.Module, inputs: Inputs) -> list[ModuleCall]:
    """Return the calls of modules with their own parameters, in order."""
    calls: list[ModuleCall] = []
    flow = FeatureFlow()
    hooks: list[Any] = []
    adapted = dict(wrappers(model))
    inside = {part for module in adapted.values() for part in module.modules()}
    for name, module in model.named_modules():
        has_own = module not in inside and any(p is not None for p in module._parameters.values())
        if has_own or name in adapted:
            watch = _Watch(name, layer_of(module), calls, flow)
            hooks.append(module.register_forward_pre_hook(watch.before, with_kwargs=True))
            hooks.append(module.register_forward_hook(watch.after))
    try:
        run_on_fakes(model, inputs, {}, flow)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        replace(call, feeds=flow.taker_of(call.name), mixed=flow.mixed.get(call.name, ""))
        for call in calls
    ]


class _Watch:
    """Notes the calls of one module."""

    def __init__(
        self, name: str, module: nn.Module, calls: list[ModuleCall], flow: FeatureFlow
    ) -> None:
        self._name, self._module = name, module
        self._calls, self._flow = calls, flow

    def before(self, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        fed = next(iter([*args, *keywords.values()]), None)
        features = self._flow.features_of(fed)
        sees = features.makers if features else frozenset[str]()
        self._calls.append(ModuleCall(self._name, self._module, fed, sees))
        if dims_of(self._module) is not None:
            self._flow.enter(self._name, self._module, fed)

    def after(self, _module: nn.Module, _args: object, made: Any) -> None:
        if dims_of(self._module) is not None:
            self._flow.leave(self._name, made)


def _fake_state(model: nn.Module, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: mode.from_tensor(tensor) for name, tensor in tensors}


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo the changes of a forward in its modules, such as a table that it makes once.

    A fake one would be found there by the next forward. What a module holds in a list or a dict of
    its own is not looked into.
    """
    tables = ("_parameters", "_buffers", "_modules")
    before = [
        (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in tables})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, held, entries in before:
            vars(module).clear()
            vars(module).update(held)
            for name, entry in entries.items():
                table = vars(module)[name]
                table.clear()
                table.update(entry)


@contextmanager
def numberless() -> Iterator[None]:
    """Have torch's own modules ask no numbers of tensors, and log no shape that does not fit.

    We report it ourselves.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was = log.disabled
    log.disabled = True
    try:
        with torch_transformer.without_numbers(), torch_fakes.grouped_products():
            yield
    finally:
        log.disabled = was


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [""])[0]


def place(error: BaseException) -> str:
    """Return the innermost line of the model's own code, for torch's own does not help the user."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not origins.is_of(f.filename, "torch", "nbdist")]
    return f"line {own[-1].lineno} of {own[-1].filename}, {own[-1].line}" if own else "its forward"
