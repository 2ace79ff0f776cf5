"""Whether this machine kept up with the virtual devices of a cell, and the links they stand for."""

from collections.abc import Iterable, Mapping

from nbdist.client.metrics.analysis.values import CollectiveRow
from nbdist.shared.collectives import sent_bytes, waits_for_all
from nbdist.shared.text import figure
from nbdist.shared.virtual import VirtualMachine
from nbdist.study.debt import share_kept

LEAST = 0.9  # of the virtual time, below which a picture is said to be wrong
LEAST_S = 1e-3  # of a collective on the link: shorter ones are latency
MOST_BEHIND = 1.25  # what collectives may take, in times of the links' rate


def kept_up(
    machine: str, told: Mapping[int, Mapping[str, float]], table: Iterable[CollectiveRow]
) -> list[str]:
    """Return what to say at a cell's end; nothing where it computed nothing on virtual devices.

    Args:
        machine: As `VirtualMachine` writes itself; empty without one.
        told: Rank to `virtual_s` and `late_s`.
        table: The cell's recent collectives.
    """
    if not machine or not told:
        return []
    share, rank = min((share_kept(of["virtual_s"], of["late_s"]), r) for r, of in told.items())
    lines = [f"Emulated: {machine}, not this machine."]
    if share < LEAST:
        lines[0] = (
            f"Emulated: {machine}. This machine kept up with {share:.0%} of the virtual time "
            f"(rank {rank}): times are too long. Choose a slower device, or fewer ranks."
        ).replace("%", " %")
    if (times := _behind(VirtualMachine.read(machine), table)) > MOST_BEHIND:
        lines.append(
            f"Collectives took {figure(times)} times what the emulated links' rate asks for: "
            "latency is not emulated, it is this machine's."
        )
    return lines


def _behind(machine: VirtualMachine, table: Iterable[CollectiveRow]) -> float:
    """Return the time of the collectives in times of what their bytes take on the link; 0: none.

    Messages are left out: theirs ends when the other rank takes them.
    """
    took_s = asked_s = 0.0
    for row in table:
        nbytes = sent_bytes(row.kind, row.bytes, len(row.ranks), "gloo")
        on_link_s = nbytes / machine.bytes_here
        if row.transfer_ms is not None and waits_for_all(row.kind) and on_link_s >= LEAST_S:
            took_s += row.count * row.transfer_ms / 1e3
            asked_s += row.count * on_link_s
    return took_s / asked_s if asked_s else 0.0
