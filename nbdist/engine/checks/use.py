"""Observe how the cell uses one model: its samples, and whether and how gradients are averaged.

Each rank reports; the notebook compares, and decides what is wrong
(`nbdist/client/metrics/checks/rules`). Main thread.
"""

import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from nbdist.engine.checks import first_weights, model_facts
from nbdist.engine.checks.fingerprints import as_float, fingerprints
from nbdist.engine.checks.modes import Modes
from nbdist.engine.checks.schedules import Schedules
from nbdist.engine.checks.still_weights import StillWeights
from nbdist.engine.checks.unowned import Complete, Unowned
from nbdist.engine.checks.used_gradient import UsedGradient
from nbdist.engine.compat import torch_hooks, torch_live, torch_modules, torch_sharded
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.layout.layout import Layout
from nbdist.engine.steps import guard, step_state

_log = logging.getLogger("nbdist.checks")

_FAR_ABOVE = 1000.0  # times a norm that does not count the scale: the scale begins with 65,536

Spread = Layout | DistributedDataParallel


class Use:
    """One optimizer and its model, from the optimizer's first step in a cell on."""

    def __init__(self, optimizer: Optimizer, complete: Complete | None = None) -> None:
        """Look for the model."""
        self._optimizer = weakref.ref(optimizer)
        self._still, self._schedules = StillWeights(optimizer), Schedules()
        self._unowned = Unowned(complete or Complete())
        spread = model_facts.spread_by(optimizer)
        self._spread = None if spread is None else weakref.ref(spread)
        model = spread.model if isinstance(spread, Layout) else spread
        self._shared_by: tuple[int, ...] | None = None  # the ranks, where torch alone cuts it
        self._is_half = isinstance(spread, Layout) and spread.policies.precision.needs_scaler
        if model is None and (shared := torch_sharded.shared_by(_parameters(optimizer))):
            model, self._shared_by = shared.module, shared.ranks
            self._is_half = shared.compute == torch.float16
        self._fed: dict[str, float] = {}
        self._hooks: list[Any] = []
        self._step_hook = _weakly(weakref.WeakMethod(self._after_step))
        self._forward_hook = _weakly(weakref.WeakMethod(self._before_forward))
        self._sum_hook = _weakly(weakref.WeakMethod(self._before_sum))
        self._summed = 0
        self._sent: list[float] = []  # bytes, by each backward of the step
        self._has_come = False  # a gradient of the sample, since the optimizer stepped
        self._model = None if model is None else weakref.ref(model)
        self._sample: weakref.ref[Tensor] | None = None  # a trained parameter
        self._counted = step_state.here().steps.get(optimizer)  # outlives the optimizer
        self._steps_before = 0 if self._counted is None else self._counted.begun
        self.has_layout, self.number = False, 0  # of its layout in the cell
        self.averages_by_hand = False  # over all ranks, in the newest step that was observed
        self.is_looking = False  # in the step that runs
        self._has_fed = False
        self._modes: Modes | None = None
        self._used = UsedGradient()
        self._stepped: list[Tensor | None] | None = None  # its gradients, when it had stepped
        self._trainable = 0  # of its parameters, then
        self._began = _writes(optimizer)
        self._has_trained = False  # in the cell
        self._has_clipped = False  # gradients of the step, while a scale was in them
        self.is_unscaled = False  # a GradScaler's: these gradients have been divided by its scale

    def end(self) -> None:
        """Remove all hooks."""
        self._take_out()

    @property
    def steps(self) -> int:
        """The optimizer's steps in the cell, with the one that ends."""
        if self._counted is None and (optimizer := self._optimizer()) is not None:
            self._counted = step_state.here().steps.get(optimizer)
        return 0 if self._counted is None else self._counted.begun - self._steps_before

    def _put_in(self) -> None:
        """Install the hooks: they cost a step 20 us, and most steps are not observed."""
        optimizer = self._optimizer()
        model = None if self._model is None else self._model()
        # Chosen each time: a parameter may be frozen by now, and takes no hook. Parameters that
        # FSDP2 has sharded never call theirs.
        parameters = () if model is None or isinstance(model, FSDPModule) else model.parameters()
        sample = next((p for p in parameters if p.requires_grad), None)
        self._sample = None if sample is None else weakref.ref(sample)
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_post_hook(self._step_hook))
        if model is not None:
            hook = model.register_forward_pre_hook(self._forward_hook, with_kwargs=True)
            self._hooks.append(hook)
        if sample is not None:
            self._hooks.append(sample.register_hook(self._sum_hook))

    def _take_out(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def layout(self) -> Layout | None:
        """The layout of the model, if it has one and is alive."""
        spread = None if self._spread is None else self._spread()
        return spread if isinstance(spread, Layout) else None

    def at_first(self) -> dict[str, float]:
        """Return what is known before the first step: the initial weights."""
        if self._shared_by is None:
            return self._weights() if self._alone() else {}
        optimizer = self._optimizer()
        weights = None if optimizer is None else first_weights.weights_of(_parameters(optimizer))
        return self._place_by_hand() | ({} if weights is None else {"weights": weights})

    def look(self, *, is_on: bool) -> None:
        """Observe, or do not observe, the step that begins."""
        self._take_out()
        self.is_looking, self._has_fed, self._summed, self._has_come = is_on, False, 0, False
        self._fed, self._stepped, self.is_unscaled = {}, None, False
        self._has_clipped = False
        self._sent = []
        optimizer = self._optimizer() if is_on else None
        groups = [] if optimizer is None else optimizer.param_groups
        self._used.watch(p for group in groups for p in group["params"])
        if is_on:
            self._put_in()

    def backward_begins(self) -> None:
        """A backward of an observed step begins: note whether old gradients are there still."""
        self._used.backward_begins()

    def clipped(self, parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        """Note that gradients of an observed step were clipped which a scaler has yet to unscale.

        Whoever knows that takes the scale times a norm. Waits for a GPU.
        """
        optimizer = self._optimizer()
        first = next((p for p in parameters if p.grad is not None), None)
        if optimizer is None or first is None:
            return
        if not any(p is first for p in _parameters(optimizer)):
            return
        scales = [
            scaler.get_scale()
            for scaler in torch_live.here.live(torch.amp.GradScaler)
            if torch_modules.has_scaled(scaler) and not torch_modules.is_unscaled(scaler, optimizer)
        ]
        has_scale = bool(scales) and max_norm * _FAR_ABOVE < min(scales)
        self._has_clipped |= has_scale and float(torch_hooks.local_part(norm)) > max_norm

    def backward_ends(self, sent_bytes: float) -> None:
        """A backward of an observed step has ended, in which this rank has put in so many bytes."""
        self._sent.append(sent_bytes)

    def at_step_end(self, reduced: Mapping[int, int]) -> dict[str, float]:
        """Return the observations of the step that has ended.

        Args:
            reduced: Addresses of tensors that the loop itself has all-reduced in it, each with the
                number of ranks that have.
        """
        self.averages_by_hand = False
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        values = dict(self._fed)
        values["sums"] = self._summed
        values["lr"] = float(optimizer.param_groups[0]["lr"])
        if len(self._sent) > 1:
            values["sent_again"] = sorted(self._sent)[-2]  # by the backward with the second most
        values |= self._still.report(optimizer, self._stepped or ())
        values |= self._schedules.report(optimizer)
        if self._stepped is not None:
            grads = [gradient for gradient in self._stepped if gradient is not None]
            # Most steps are not observed: one of them that had gradients has written weights.
            self._has_trained |= bool(grads) or _writes(optimizer) != self._began
            values |= {"parameters": self._trainable, "gradients": len(grads)}
            values["trained"] = self._has_trained
            plain = (g for g in grads if not isinstance(g, DTensor))
            by_hand = [reduced[at] for g in plain if (at := g.data_ptr()) in reduced]
            values["by_hand"] = len(by_hand)
            self.averages_by_hand = bool(by_hand) and min(by_hand) == dist.get_world_size()
            values["unzeroed"] = self._used.is_in_next
            values |= self._unowned.report(optimizer, self._stepped)
            values["clipped_scaled"] = self._has_clipped and self.is_unscaled
            self._stepped = None
        spread = None if self._spread is None else self._spread()
        if self._shared_by is not None:
            return values | self._place_by_hand()
        if spread is None:
            return values | (self._weights() if self._alone() else {})
        return values | _place(spread) | _state(spread)

    def _place_by_hand(self) -> dict[str, float]:
        """Return which part of a batch this rank has, of the ranks that share its shards."""
        ranks = self._shared_by or ()
        part = ranks.index(dist.get_rank())
        return {"part": float(part), "parts": float(len(ranks)), "shared_by": float(min(ranks))}

    def replica(self) -> list[tuple[str, Tensor]]:
        """Return the parameters, with their names, of a model whose loop averages gradients itself.

        Nothing where it does not, or where another wrapper answers for them.
        """
        optimizer = self._optimizer()
        if optimizer is None or not self.averages_by_hand or not self._alone():
            return []
        model = model_facts.model_of(optimizer)
        names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        return [
            (names.get(id(p), f"parameter {place}"), p)
            for place, p in enumerate(_parameters(optimizer))
            if p.numel()
        ]

    def _alone(self) -> bool:
        """Whether these are plain weights that no known wrapper spreads."""
        optimizer = self._optimizer()
        return optimizer is not None and self._spread is None and model_facts.is_plain(optimizer)

    def _weights(self) -> dict[str, float]:
        optimizer = self._optimizer()
        assert optimizer is not None
        tensors = [p for p in _parameters(optimizer) if p.numel()]
        return {"weights": as_float(int(fingerprints(tensors).sum()))} if tensors else {}

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.is_grad_enabled():
            return
        # Of several forwards the one that trains most: a loss may be judged in a step, too.
        if known := self._fed.get("in_eval", torch.inf):
            if self._modes is None:
                self._modes = Modes(module)
            found = self._modes.now()
            if found["in_eval"] < known:
                self._fed |= found
        if self._has_fed or not module.training:
            return
        self._has_fed = True
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.numel()]
        if given:
            self._fed["input"] = as_float(int(fingerprints(given).sum()))
        self._fed["half"] = float(self._computes_in_half(given[0].device.type if given else "cpu"))
        if self._modes is not None and self._modes.drops():
            states = [torch.get_rng_state()]
            if given and given[0].is_cuda:
                states.append(torch.cuda.get_rng_state(given[0].device))
            self._fed["random"] = as_float(int(fingerprints(states).sum()))

    def _computes_in_half(self, device_type: str) -> bool:
        """Whether a forward that begins computes in float16, by a policy or by autocast."""
        by_autocast = torch.is_autocast_enabled(device_type)
        is_half = by_autocast and torch.get_autocast_dtype(device_type) == torch.float16
        return self._is_half or is_half

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the gradients of the step, which may be gone when the cell's step ends."""
        self._has_come = False
        if guard.here.leaves_out(optimizer):
            return  # what it has are not the gradients that the loop has made
        parameters = _parameters(optimizer)
        self._stepped = [p.grad for p in parameters]
        self._trainable = sum(p.requires_grad for p in parameters)
        scalers = [s for s in torch_live.here.live(torch.amp.GradScaler) if s.is_enabled()]
        by_itself = getattr(optimizer, "found_inf", None) is not None  # a fused one divides alone
        self.is_unscaled = by_itself or any(
            torch_modules.is_unscaled(scaler, optimizer) for scaler in scalers
        )

    def _before_sum(self, _gradient: Tensor) -> None:
        """A parameter gets a gradient: note whether it is added to one that is not used yet.

        A gradient that a step has used does not count: in a GAN another
        model's backward comes through.
        """
        sample = None if self._sample is None else self._sample()
        if sample is not None and sample.grad is not None and self._has_come:
            self._summed += bool(sample.grad.any())
        self._has_come = True


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _writes(optimizer: Optimizer) -> int:
    """Return a count that grows as it trains: writes to its parameters, and states that they got.

    Without a gradient it does neither. Fused ones write without a new version.
    """
    return sum(p._version for p in _parameters(optimizer)) + len(optimizer.state)


def _weakly(method: "weakref.WeakMethod[Any]") -> Any:
    """Return a hook that does not keep its owner alive, and costs little between observed steps.

    `torch.compile` must neither compile it, again for each observed step, nor
    break a graph for it: inside of a graph it does nothing. A hook that fails is logged, and no
    longer observes this step, and training continues.
    """

    def hook(*args: Any) -> None:
        if torch.compiler.is_compiling() or graphs.is_capturing:
            return
        bound = method()
        if bound is not None and bound.__self__.is_looking:
            _uncompiled_look()(bound, args)

    return hook


def _look(bound: Any, args: tuple[Any, ...]) -> None:
    try:
        bound(*args)
    except Exception:
        _log.exception("A check of a step failed")
        bound.__self__.is_looking = False


@functools.cache
def _uncompiled_look() -> Any:
    return torch.compiler.disable(_look)  # made once, and late: it imports Dynamo


def _place(spread: Spread) -> dict[str, float]:
    """Return which part of every batch this rank has, of how many, and its stream of dropout."""
    rank = dist.get_rank()
    if isinstance(spread, Layout):
        part, parts = spread.shape.data_part(rank)
        place = {"part": float(part), "parts": float(parts)}
        same = spread.shape.same_samples
        return place | ({"stream": float(rank // same)} if same > 1 else {})
    group = spread.process_group
    place = {"part": float(dist.get_rank(group)), "parts": float(dist.get_world_size(group))}
    ranks = dist.get_process_group_ranks(group)
    # Ranks of other groups may train another model.
    return place | ({"shared_by": float(min(ranks))} if len(ranks) < dist.get_world_size() else {})


def _state(spread: Spread) -> dict[str, float]:
    """Return the bytes of gradients that are averaged, and of batch norm that is not synchronized.

    A layout sends rank 0's statistics after each forward, DDP before each unless disabled.
    """
    values = {}
    model = spread.model if isinstance(spread, Layout) else spread
    if not isinstance(spread, Layout) or set(spread.shape.axes) == {"dp"}:
        sizes = (p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        values["averaged_bytes"] = float(sum(sizes))
    if isinstance(spread, DistributedDataParallel) and not spread.broadcast_buffers:
        norms = [m for m in spread.modules() if isinstance(m, _BatchNorm)]
        found = [m.running_mean for m in norms if m.running_mean is not None]
        if found:
            values["statistics"] = as_float(int(fingerprints(found).sum()))
    return values
