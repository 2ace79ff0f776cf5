"""A plain model as one program that needs none of its classes (torch.export).

A notebook's classes exist nowhere else: a server cannot unpickle them, and runs this instead.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nbdist.shared.errors import PublishError

_TOLERANCE = 1e-4  # of the largest value: the limit of the program's error


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A program of torch.export, its inputs and outputs: dtypes, and shapes with -1 for any."""

    exported: Any
    inputs: tuple[str, list[int]]
    outputs: tuple[str, list[int]]


class _OneTensor(nn.Module):
    """The model with one tensor for its output: of several, the logits or the first one."""

    def __init__(self, model: nn.Module, keyword: str | None) -> None:
        super().__init__()
        self.model = model
        self._keyword = keyword

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x) if self._keyword is None else self.model(**{self._keyword: x})
        found = _first_tensor(out)
        return found.float() if found.dtype == torch.bfloat16 else found  # numpy has none


def _first_tensor(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out
    logits = getattr(out, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    values = list(out.values()) if isinstance(out, dict) else tree_leaves(out)
    found = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if found is None:
        raise PublishError(
            f"The model returns a {type(out).__name__} without a tensor in it.",
            why="a served model answers with one tensor",
            do="publish a module whose forward returns one",
        )
    return found


def as_example(example: Any) -> tuple[torch.Tensor, str | None]:
    """Return the one tensor of an example, on the CPU, and by which keyword the model takes it.

    Raises:
        PublishError: There is another number of tensors than one.
    """
    keyword = None
    if isinstance(example, dict) and len(example) == 1:
        keyword, example = next(iter(example.items()))
    if isinstance(example, tuple | list) and len(example) == 1:
        example = example[0]
    if hasattr(example, "__array__") and not isinstance(example, torch.Tensor):
        example = torch.as_tensor(example)
    if not isinstance(example, torch.Tensor):
        raise PublishError(
            f"publish got a {type(example).__name__} as example.",
            why="MLflow serves models that take one tensor, with samples along its first dim",
            do="publish(model, name, example=x), x as in model(x); a model with several inputs is "
            "published as a module whose forward takes one",
        )
    if example.dim() == 0 or not len(example):
        raise PublishError(
            f"The example has the shape {tuple(example.shape)}, and no sample.",
            do="publish(model, name, example=x), x a batch as in model(x)",
        )
    return example.detach().cpu(), keyword


def export(model: nn.Module, example: Any) -> tuple[ExportedModel, torch.Tensor]:
    """Return the program, in evaluation mode, for any number of samples; and one sample for it.

    Args:
        model: Plain, on the CPU; put in evaluation mode.
        example: Its inputs.

    Raises:
        PublishError: The model does not run with the example, or cannot be exported, with
            torch's reason.
    """
    x, keyword = as_example(example)
    x = x[:2] if len(x) > 1 else torch.cat([x, x])  # export takes a size of 1 for a constant
    wrapped = _OneTensor(model, keyword).eval().requires_grad_(False)
    with torch.no_grad():
        try:
            expected = wrapped(x.clone())
        except PublishError:
            raise
        except Exception as error:
            raise PublishError(
                f"{type(model).__name__} does not run with the example: {_reason(error)}",
                why=f"the example is {x.dtype} of the shape {tuple(x.shape)}",
                do="publish(model, name, example=x), x as in model(x)",
            ) from error
        try:
            exported = _exported(wrapped, x)
            found = exported.module()(x.clone())
        except Exception as error:
            raise PublishError(
                f"{type(model).__name__} cannot be exported as one program: {_reason(error)}",
                why="torch.export follows tensors through forward, and cannot follow what Python "
                "decides by their numbers",
                do="write such choices with torch.where or torch.cond; torch.export.export(model, "
                "(x,)) shows the line",
            ) from error
    bound = _TOLERANCE * float(expected.abs().max() if expected.numel() else 0.0)
    if not torch.allclose(expected, found, rtol=0, atol=bound, equal_nan=True):
        raise PublishError(
            "The exported program computes something else than the model in evaluation mode.",
            why="something in forward is not a function of its input: random numbers, or state",
            do="publish a module whose forward depends only on its input",
        )
    return ExportedModel(exported, _facts(exported, "input"), _facts(exported, "output")), x[:1]


def _exported(wrapped: nn.Module, x: torch.Tensor) -> Any:
    """Return the program for any batch, and any length where the model takes any."""
    dim: Any = torch.export.Dim
    shapes = {0: dim.DYNAMIC, **dict.fromkeys(range(1, x.dim()), dim.AUTO)}
    try:
        return torch.export.export(wrapped, (copy.deepcopy(x),), dynamic_shapes=(shapes,))
    except Exception:
        # A dim that cannot vary by itself may not be tried at all, as in some positions.
        only = {0: dim.DYNAMIC}
        return torch.export.export(wrapped, (copy.deepcopy(x),), dynamic_shapes=(only,))


def _facts(exported: Any, end: str) -> tuple[str, list[int]]:
    signature = exported.graph_signature
    name = (signature.user_inputs if end == "input" else signature.user_outputs)[0]
    (node,) = [node for node in exported.graph.nodes if node.name == name]
    value = node.meta["val"]
    # A size that tracing has found to be one number is still a symbol, written as that number.
    shape = [int(str(size)) if str(size).isdigit() else -1 for size in value.shape]
    return str(value.dtype).removeprefix("torch."), shape


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) < 400 else f"{text[:400]}…"
