"""Whether this machine kept up with the virtual devices of a cell, and the links they stand for."""

from collections.abc import Iterable, Mapping

from nbdist.client.metrics.analysis.values import CollectiveRow
from nbdist.shared.collectives import rounds, sent_bytes, waits_for_all
from nbdist.shared.text import figure
from nbdist.shared.virtual import VirtualMachine
from nbdist.study.debt import share_kept

LEAST = 0.9  # of the virtual time, below which a picture is said to be wrong
LEAST_S = 1e-3  # of a collective on a link without a latency of its own: shorter are this machine's
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
    took_s, asked_s, waits = _on_links(VirtualMachine.read(machine), table)
    if took_s > MOST_BEHIND * asked_s:
        lines.append(
            f"Collectives took {figure(took_s / asked_s)} times what the emulated links ask for: "
            f"this machine's own latency of {figure(1e3 * (took_s - asked_s) / waits)} ms a round "
            "comes on top."
        )
    return lines


def _on_links(
    machine: VirtualMachine, table: Iterable[CollectiveRow]
) -> tuple[float, float, float]:
    """Return the seconds of the collectives, those that the links ask for, and their rounds.

    Messages are left out: theirs ends when the other rank takes them.
    """
    took_s = asked_s = waits = 0.0
    for row in table:
        n = len(row.ranks)
        latencies = rounds(row.kind, n, "gloo")
        on_link_s = sent_bytes(row.kind, row.bytes, n, "gloo") / machine.bytes_here
        on_link_s += latencies * machine.latency_here
        is_told = on_link_s > 0 if machine.latency_s else on_link_s >= LEAST_S
        if row.transfer_ms is not None and waits_for_all(row.kind) and is_told:
            took_s += row.count * row.transfer_ms / 1e3
            asked_s += row.count * on_link_s
            waits += row.count * latencies
    return took_s, asked_s, waits
