"""The components of a rank, in order: they observe, keep and save what its cells train.

As a cell begins they are called from the first to the last, and from the last to the first as it
ends: later ones have ended when one is called, like nested contexts.
"""

from collections.abc import Iterable, Sequence

from nbdist.engine.averaging import async_sgd
from nbdist.engine.checkpoint import automatic, save, steady
from nbdist.engine.checks import kept_evidence
from nbdist.engine.checks.checks import RankChecks
from nbdist.engine.checks.numerics import Numerics
from nbdist.engine.checks.shared_batches import SharedBatches
from nbdist.engine.compat.groups.torch_dist import Functions
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.data.order import weighting
from nbdist.engine.data.position import position, resume
from nbdist.engine.group import group_record, meeting
from nbdist.engine.group.links.link_stats import LinkStats
from nbdist.engine.kernel import chaos
from nbdist.engine.kernel.cleanup import TorchModes
from nbdist.engine.layout import parallelize
from nbdist.engine.rank.script import Script
from nbdist.engine.rank.virtual_device import VirtualDevice
from nbdist.engine.recovery import small_values
from nbdist.engine.recovery.snapshots import peers, snapshot
from nbdist.engine.steps import guard, halt, step_state
from nbdist.engine.tap.tap import Tap
from nbdist.engine.training import torch_profile, training
from nbdist.engine.training.devices import DeviceStats
from nbdist.shared.wire import CellStart


def of_rank(
    functions: Functions,
    script: Script,
    continuation: Component,
    links: LinkStats,
    devices: DeviceStats,
    checks: RankChecks,
    numerics: Numerics,
    virtual: VirtualDevice,
) -> tuple[Component, ...]:
    """Return the components of a notebook's rank, which has joined its group."""
    return (
        small_values.here,
        group_record.here,
        steady.here,
        save.here,
        automatic.here,
        parallelize.here,
        async_sgd.here,
        peers.here,
        snapshot.here,
        position.here,
        weighting.here,
        resume.here,
        continuation,
        step_state.here(),
        links,
        devices,
        checks,
        SharedBatches(),
        Tap(),
        training.here,
        kept_evidence.here,  # its sentence is after that of the next
        guard.here,  # after those that count steps
        numerics,
        halt.here,  # likewise
        TorchModes(),
        torch_profile.here,
        chaos.here,
        meeting.here,
        virtual,  # before it nothing computes, and the cell is all within it
        functions,
        script,  # last: it restores torch's functions, and not replacements of them
    )


def of_script(virtual: VirtualDevice) -> tuple[Component, ...]:
    """Return the components of a script that torchrun has started: it is one cell."""
    return (
        steady.here,
        save.here,
        async_sgd.here,
        position.here,
        weighting.here,
        resume.here,
        step_state.here(),
        training.here,
        guard.here,
        virtual,
    )


def begin(components: Sequence[Component], start: CellStart) -> None:
    """Call `cell_began` of the components, in order."""
    for component in components:
        component.cell_began(start)


def end(components: Sequence[Component], cell: EndedCell) -> Iterable[str]:
    """Call `cell_ended` of the components, in reverse; yield their sentences."""
    for component in reversed(components):
        yield from component.cell_ended(cell)
