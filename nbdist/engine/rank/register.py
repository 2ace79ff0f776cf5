"""Connect the packages of a rank, in one list: no module registers itself on import.

Main thread, when the rank has joined its group.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from nbdist.engine.checkpoint import automatic
from nbdist.engine.checks import first_weights, kept_evidence, model_facts, restarted_loops
from nbdist.engine.checks.checks import RankChecks
from nbdist.engine.checks.numerics import Numerics
from nbdist.engine.compat import torch_live
from nbdist.engine.component import Component
from nbdist.engine.data import services
from nbdist.engine.data.position import resume
from nbdist.engine.group.links import link_stats
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.layout import layout, parallelize, publish, wrapped
from nbdist.engine.layout.axes import (
    fsdp,
    uncalled,
    unseen,
    unused,
    whole_matrices,
    zero1,
)
from nbdist.engine.layout.axes.pp import stage_times
from nbdist.engine.rank import at_halt, components, control, virtual_device
from nbdist.engine.recovery import recovery
from nbdist.engine.steps import guard, halt, keep, step_state
from nbdist.engine.tap import tap
from nbdist.engine.training import training
from nbdist.engine.training.devices import DeviceStats, Gpu
from nbdist.shared import wire

if TYPE_CHECKING:
    from nbdist.engine.rank.rank import Rank


class Continuation(Component):
    """Reports whether the cell continues the training of an earlier attempt, as a fact of the cell.

    Args:
        recorder: Takes the fact.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loops = restarted_loops.RestartedLoops()

    def cell_began(self, start: wire.CellStart) -> None:
        """Report it before the cell logs anything, as far as it is known."""
        self._loops = restarted_loops.RestartedLoops()
        self._report()

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Report it at an optimizer's first step, and which loop starts over."""
        self._report()
        if wire.TRAINED_BEFORE not in self._recorder.facts:
            steps = step_state.here().steps.get(optimizer)
            self._recorder.fact(**{wire.TRAINED_BEFORE: str(steps.whole if steps else 0)})
        is_restored = automatic.here.continues()
        if is_restored or resume.here.continues_trained():
            self._loops.report(optimizer, is_restored=is_restored)

    def _report(self) -> None:
        if resume.here.continues() or automatic.here.continues():
            self._recorder.fact(**{wire.CONTINUES: "yes"})


class Registration:
    """Whether the parts that need no rank are connected."""

    def __init__(self) -> None:
        self._is_done = False

    def register(self) -> None:
        """Connect them. Once a process; again it does nothing."""
        if self._is_done:
            return
        self._is_done = True
        # First, and so before steps are counted: a refused step has not begun. Before all that one
        # whose stand-ins no other is to see.
        whole_matrices.install()
        uncalled.install()
        unused.install()
        unseen.install()
        fsdp.install()
        zero1.install()
        services.here.layout_shard = layout.data_shard
        services.here.pace = training.here.pace
        resume.here.install()
        automatic.here.install()


def connect(rank: "Rank", device: torch.device) -> None:
    """Connect the recorder, the tap and the device's sampler of this rank; after each `join`."""
    options, recorder = rank.options, rank.recorder
    here.register()
    tap.install(options.tap)
    training.here.install(recorder)
    training.here.set_enabled(options.hooks, grad_norm=options.grad_norm)
    recovery.install()
    keep.here.look_in(lambda: rank.kernel.shell.user_ns)
    halt.here.step = training.here.current_step if options.hooks else lambda: None
    halt.here.unseen = training.here.unseen
    guard.here.step = training.here.step_of_call if options.hooks else lambda: None
    guard.here.log = training.here.log_at
    guard.here.evidence.find_model = model_facts.model_of
    guard.here.evidence.loss = training.here.newest_loss
    guard.here.evidence.save = kept_evidence.here.save
    halt.here.actions = at_halt.actions(rank)
    parallelize.here.report = recorder.fact
    publish.here.place = publish.PublishTarget(
        Path(rank.logs).parent.parent / "models",
        lambda facts: _report_published(rank, facts),
        lambda: rank.tracks,
    )
    services.here.indexes = Path(rank.logs).parent.parent / "indexes"
    wrapped.look_on()
    first_weights.look_on()
    training.here.at_new_optimizer("trained", lambda one: model_facts.report(recorder, one))
    stage_times.here.report = recorder.add
    continuation = Continuation(recorder)
    training.here.at_new_optimizer("continuation", continuation.optimizer_begins)
    services.here.tell_loop = lambda facts: recorder.add(
        "loader", training.here.current_step(), facts
    )
    services.here.rest_s = training.here.rest_s
    checks = RankChecks(recorder.add)
    training.here.at_new_optimizer("checks", checks.optimizer_begins)
    torch_live.here.listen("checks", checks.made)
    training.here.at_due_step(checks.step_ended)
    links = link_stats.LinkStats(
        training.here.current_step, lambda step, values: recorder.add("links", step, values)
    )
    control.gpu = Gpu(device) if device.type == "cuda" else None
    devices = DeviceStats(
        lambda values: recorder.add("device", training.here.current_step(), values),
        lambda unknown: recorder.fact(gpu_unknown=unknown),
        control.gpu,
    )
    recorder.before_publishing(links.sample, devices.sample)
    assert rank.torchs is not None, "it has joined its group"
    virtual = virtual_device.VirtualDevice(
        options.machine,
        training.here.current_step,
        lambda values: recorder.add(wire.EMULATED, wire.CELL_END, values),
    )
    if options.machine is not None:
        recorder.fact(**{wire.EMULATED: str(options.machine)})
    rank.components = components.of_rank(
        rank.torchs, rank.script, continuation, links, devices, checks, Numerics(recorder), virtual
    )


def _report_published(rank: "Rank", facts: dict[str, Any]) -> None:
    """Report a model to the notebook; with a record, so that the cell has a run to put it in."""
    rank.published.append(facts)
    rank.recorder.fact(**{wire.PUBLISHED: json.dumps(rank.published)})
    values = {"model_mb": facts["size_bytes"] / 1e6}
    rank.recorder.add("log", training.here.current_step(), values)


here = Registration()
