"""What the doctor says of the cluster that runs: pure, from its status."""

from pathlib import Path

from nbdist.client.session.status import Status
from nbdist.doctor.findings import Finding

_SILENT = "not answering"  # why may follow


def judge(status: Status, broken: str | None, events: Path) -> list[Finding]:
    """Return the findings about a running cluster.

    Args:
        status: Of its ranks.
        broken: What has happened to all of it, if something has.
        events: The file of its events.
    """
    dead = [line for line in status.ranks if line.state.startswith("dead")]
    silent = [line.rank for line in status.ranks if line.state.startswith(_SILENT)]
    found = []
    if broken:
        found.append(Finding("cluster", broken, True, "%dist restart"))
    for line in dead:
        mend = f"%dist restart -r {line.rank}"
        found.append(Finding("cluster", f"rank {line.rank} is {line.state}", True, mend))
    if silent:
        names = ",".join(map(str, silent))
        says = f"rank {names} does not answer: it is stopped, or its machine swaps"
        found.append(
            Finding("cluster", says, True, f"kill -CONT its pid, or %dist restart -r {names}")
        )
    if not found:
        found.append(Finding("cluster", f"{len(status.ranks)} ranks, all of them answer"))
    return [*found, Finding("events", f"{events}    (goes with a bug report)")]
