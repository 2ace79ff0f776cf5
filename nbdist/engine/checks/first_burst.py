"""Find the first operation of a backward whose gradient is not finite, and where it was made.

Of those whose gradient reaches a parameter so: a mask discards what was computed beside it.
A forward, its loss and their backward run again, with hooks that are there for them; main thread,
on a GPU also autograd's.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from nbdist.engine.checks.first_bad import is_finite
from nbdist.engine.compat import torch_anomaly
from nbdist.engine.compat.torch_sharded import plain_name
from nbdist.engine.kernel import location
from nbdist.engine.steps.forwards import Forward
from nbdist.engine.steps.kept_step import plain
from nbdist.engine.tap import counters
from nbdist.shared import origins


def first_burst(forward: Forward, model: nn.Module) -> dict[str, Any] | None:
    """Run a forward, its loss and backward again; return what is first, None where all is finite.

    That is the `operation`, as autograd calls it; the innermost `module` in whose forward it was
    made, None where none is known, and its `kind`; whether `is_loss`, made behind the forward; the
    user's `place`, "" where not known; whether the gradient that it got `is_given` so, as a sum of
    finite ones is, or a hook's; and whether ranks communicate in it, so that it `is_shared`.

    Gradients outside of the model are as before; those of the model are the caller's.
    """
    assert forward.loss is not None
    looking = _Looking()
    try:
        with torch.enable_grad(), torch_anomaly.tracebacks():
            with looking.at_modules(model):
                output = forward.run(model)
            with forward.autocasting():
                forward.loss.run(output, looking.watch)
    finally:
        looking.put_back()
    return looking.first()


class _Looking:
    """What the hooks have seen of one backward."""

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []  # in the order of the backward
        self._from: dict[Node, int] = {}  # which of these has spoiled what it gets
        self._modules: list[tuple[int, int, str, str]] = []  # first operation, one behind the last
        self._loss_begins = 0
        self._collectives: dict[str, int] = {}  # by group, as the running operation began
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @contextmanager
    def at_modules(self, model: nn.Module) -> Iterator[None]:
        """Note which operations each module makes within the block."""
        began: list[int] = []

        def begin(*_: Any) -> None:
            began.append(torch_anomaly.next_number())

        def end(name: str) -> Any:
            def note(module: nn.Module, *_: Any) -> None:
                made = began.pop(), torch_anomaly.next_number()
                self._modules.append((*made, name, plain_name(module)))

            return note

        hooks = []
        for name, module in plain(model).named_modules():
            hooks.append(module.register_forward_pre_hook(begin, prepend=True))
            hooks.append(module.register_forward_hook(end(name)))
        try:
            yield
        finally:
            self._loss_begins = torch_anomaly.next_number()
            for one in hooks:
                one.remove()

    def first(self) -> dict[str, Any] | None:
        """Return the first whose gradient has reached a leaf."""
        reached = [found for node, found in self._from.items() if _is_leaf(node)]
        return self._found[min(reached)] if reached else None

    def watch(self, loss: torch.Tensor) -> None:
        """Look at what the operations of its backward, which is about to run, give."""
        for node in _nodes(loss):
            if not _is_leaf(node):
                node.register_prehook(self._begin)
                node.register_hook(self._look_at(node))
                continue
            leaf = getattr(node, "variable")  # noqa: B009 - of this kind of node alone
            self._gradients.append((leaf, leaf.grad))
            leaf.grad = None

    def put_back(self) -> None:
        """Leave gradients as they were."""
        for leaf, gradient in self._gradients:
            leaf.grad = gradient

    def _begin(self, _: Any) -> None:
        self._collectives = counters.counts()

    def _look_at(self, node: Node) -> Any:
        number, frames = torch_anomaly.number_of(node), torch_anomaly.made_at(node)

        def look(given_back: Any, given: Any) -> None:
            onward = zip(node.next_functions, given_back, strict=False)
            bad = [to for (to, _), one in onward if to is not None and not _are_finite([one])]
            if bad and node not in self._from:
                is_given = not _are_finite(given)
                shared = {"is_shared": not is_given and counters.counts() != self._collectives}
                found = self._describe(number) | {"place": place_in(frames), "is_given": is_given}
                self._from[node] = len(self._found)
                self._found.append({"operation": node.name()} | found | shared)
            for to in bad:
                self._from.setdefault(to, self._from[node])

        return look

    def _describe(self, number: int) -> dict[str, Any]:
        within = [one for one in self._modules if one[0] <= number < one[1]]
        _, _, module, kind = max(within, default=(0, 0, None, ""), key=lambda one: one[0])
        return {"module": module, "kind": kind, "is_loss": number >= self._loss_begins}


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _nodes(loss: torch.Tensor) -> list[Node]:
    found: dict[Node, None] = {}
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = None
            left += [one for one, _ in node.next_functions]
    return list(found)


def _are_finite(gradients: Any) -> bool:
    return all(one is None or is_finite(one) for one in gradients)


def place_in(frames: list[str]) -> str:
    """Return the user's innermost line behind this module's own, in words; "" where none is.

    Args:
        frames: As `traceback.format_stack` gives them.
    """
    lines = [re.match(r'\s*File "(.+)", line (\d+)', frame) for frame in frames]
    places = [(one[1], int(one[2])) for one in lines if one is not None]
    ours = next((at for at, (file, _) in enumerate(places) if file == __file__), len(places))
    for file, line in reversed(places[ours:]):
        if (prompt := location.here.prompt_of(file)) or origins.is_cell(file):
            return location.here.describe_line(prompt, line)
        is_own = not file.startswith("<") and not origins.is_of(file, "nbdist")
        if is_own and not origins.is_library(file):
            return f"{os.path.basename(file)}, line {line}"
    return ""
