"""Fetch what the ranks recorded, and make the one trace of it.

Main thread, when the cell has settled. One rank's trace is in memory at a time. Nothing here raises
for what ranks or disk do: the cell's own outcome comes first.
"""

import gzip
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.metrics.profile import words
from nbdist.client.metrics.profile.chosen import ChosenSteps
from nbdist.client.metrics.profile.collectives import Told, lanes
from nbdist.client.metrics.profile.traces import Event, RankTrace, merged
from nbdist.shared.errors import NBDistError
from nbdist.shared.text import name_ranks

log = logging.getLogger(__name__)

MOST_BYTES = 512 * 2**20  # of one rank's trace as text; 400 000 slices, about 2 GB while read
MOST_SLICES = 1_000_000  # of the common trace, which browsers open
_FETCH_TIMEOUT_S = 60.0
_ZIP_LEVEL = 3
_OUR_FOLDERS = 4  # above that of a cell's ranks: .nbdist/profiles/<start>/cell-N


@dataclass(frozen=True, slots=True)
class Profiled:
    """What stays of a cell's profile.

    `said` tells what was recorded; `trace` is a file, None where there was nothing to write.
    """

    said: str
    trace: Path | None = None
    left_out: int = 0

    @property
    def artifacts(self) -> dict[str, Path]:
        """What goes into the cell's run, by its name there."""
        return {} if self.trace is None else {"profile/trace.json.gz": self.trace}


@dataclass(slots=True)
class _Found:
    """What is there of each rank."""

    files: dict[int, Path] = field(default_factory=dict)
    facts: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    too_large: dict[int, Path] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)


def folder_of(logs: Path, prompt: int, attempt: int = 1) -> Path:
    """Return where the traces of a cell lie.

    Args:
        logs: The folder of its cluster's logs.
        prompt: The cell's number in the notebook, as in errors: 12 of `In [12]`.
        attempt: Counts what one cell of the notebook recorded: sweeps and retries run it again.
    """
    cell = f"cell-{prompt}" if attempt == 1 else f"cell-{prompt}-{attempt}"
    return logs.parent.parent / "profiles" / logs.name / cell


def gather(
    cluster: Cluster,
    folder: Path,
    chosen: ChosenSteps,
    steps_made: Mapping[int, int],
    calls_by_rank: Told,
    offset_ns: Callable[[int, int], int | None],
) -> Profiled:
    """Return what the ranks of a settled cell recorded, merged.

    Args:
        cluster: Asked for traces that do not lie on this machine.
        folder: From `folder_of`.
        chosen: The steps that were asked for.
        steps_made: Of each rank of the cell.
        calls_by_rank: What ranks reported of their collectives.
        offset_ns: Of rank and moment: what to add for the common clock; None when not known.
    """
    try:
        found = _find(cluster, folder, list(steps_made))
        said = _said(found, chosen, steps_made)
        if not found.files:
            return Profiled(said)
        known = {r: offset_ns(r, int(found.facts[r]["began_ns"])) for r in found.files}
        if lost := [rank for rank, offset in known.items() if offset is None]:
            said += (
                f" The clocks of {name_ranks(lost)} are unknown: their events may be misaligned."
            )
        offsets = {rank: offset or 0 for rank, offset in known.items()}
        path, left_out = _write(cluster, folder, found, offsets, calls_by_rank)
        return Profiled(said, path, left_out)
    except Exception as error:
        log.exception("The profile could not be merged")
        return Profiled(f"The profile could not be merged: {type(error).__name__}: {error}.")


def _said(found: _Found, chosen: ChosenSteps, steps_made: Mapping[int, int]) -> str:
    """Return what was recorded, and what of it is too large."""
    recorded = {r: (facts["steps"], facts["end"]) for r, facts in found.facts.items()}
    made = max(steps_made.values(), default=0)
    said = words.what_was_recorded(chosen, recorded, found.missing, made)
    if found.too_large:
        places = ", ".join(str(file) for file in found.too_large.values())
        said += f" Too large to be merged: {places}."
    return said


def _find(cluster: Cluster, folder: Path, ranks: list[int]) -> _Found:
    found = _Found()
    for rank in ranks:
        file = folder / "ranks" / f"rank-{rank}.json.gz"
        try:
            if not file.exists():
                fetch(cluster, rank, file)
            found.facts[rank] = _facts(file)
            (found.files if _size(file) <= MOST_BYTES else found.too_large)[rank] = file
        except (NBDistError, OSError, ValueError, EOFError) as error:
            found.missing[rank] = str(error).splitlines()[0].rstrip(".") if str(error) else ""
    return found


def fetch(cluster: Cluster, rank: int, file: Path) -> None:
    """Bring a rank's trace into `file`, piece by piece: the rank may run on another machine.

    Raises:
        NBDistError: It has none, or does not answer.
        OSError: The disk does not take it.
    """
    deadline = time.monotonic() + _FETCH_TIMEOUT_S
    make_folder(file.parent)
    with _draft(file) as draft:
        offset, size = 0, 1
        while offset < size:
            future = cluster.requests.ask(rank, "profile.read", buffers=[], offset=offset)
            answer = future.result(max(0.1, deadline - time.monotonic()))
            header, pieces = answer if isinstance(answer, tuple) else (answer, [])
            if not pieces:
                raise NBDistError(header["why"])
            size = header["size"]
            offset += draft.write(pieces[0])


def make_folder(folder: Path) -> None:
    """Make `folder` and what is missing above it, for its owner alone."""
    for part in (*reversed(folder.parents[:_OUR_FOLDERS]), folder):
        part.mkdir(mode=0o700, exist_ok=True)


def _size(file: Path) -> int:
    """Return how many bytes a gzip file unpacks to (RFC 1952: its last four tell, below 4 GiB)."""
    with file.open("rb") as stream:
        stream.seek(-4, os.SEEK_END)
        return int.from_bytes(stream.read(), "little")


def _facts(file: Path) -> Mapping[str, Any]:
    """Return what a rank says of its recording; torch writes that in front of the events."""
    with gzip.open(file) as stream:
        head = stream.read(2**20).decode(errors="replace")
    facts, _ = json.JSONDecoder().raw_decode(head, head.index('"nbdist": ') + len('"nbdist": '))
    assert isinstance(facts, dict)
    return facts


def _traces(cluster: Cluster, found: _Found, offsets_ns: Mapping[int, int]) -> Iterator[RankTrace]:
    for rank, file in found.files.items():
        with gzip.open(file) as stream:
            content = json.loads(stream.read())
        state = cluster.ranks.get(rank)
        title = "gone" if state is None else f"{state.host}, {state.device}"
        yield RankTrace(rank, title, content, offsets_ns[rank])


def _write(
    cluster: Cluster,
    folder: Path,
    found: _Found,
    offsets_ns: Mapping[int, int],
    calls_by_rank: Told,
) -> tuple[Path, int]:
    """Write the common trace; return its place, and how many slices were left out."""
    path = folder / "trace.json.gz"
    origin_ns = min(int(found.facts[rank]["began_ns"]) + offsets_ns[rank] for rank in found.files)
    left_out = 0
    with _draft(path) as draft, gzip.open(draft, "wb", _ZIP_LEVEL) as stream:
        stream.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, trace in enumerate(_traces(cluster, found, offsets_ns)):
            events, less = merged(trace, origin_ns, MOST_SLICES // len(found.files))
            _write_events(stream, events, is_first=number == 0)
            left_out += less
        of_these = {rank: calls for rank, calls in calls_by_rank.items() if rank in found.files}
        _write_events(stream, lanes(of_these, origin_ns, offsets_ns.__getitem__), is_first=False)
        stream.write(b"\n]}\n")
    return path, left_out


def _write_events(stream: Any, events: list[Event], *, is_first: bool) -> None:
    if not events:
        return
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    stream.write((lines if is_first else f",\n{lines}").encode())


@contextmanager
def _draft(path: Path) -> Iterator[IO[bytes]]:
    """Write a file (0600) that appears under its name when it is whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            yield file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
