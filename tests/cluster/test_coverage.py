"""Each sample once an epoch: sources x ranks x shuffle x workers x faults, in real clusters.

The loop itself writes down the ids of each step that was made; `nbdist.coverage` counts what ranks
noted. Both have to say that each sample came once. The whole table is slow; `make test` makes a
part of it. After a change of the loader, make it anew:

    NBDIST_WRITE_COVERAGE_TABLE=1 python -m pytest tests/cluster/test_coverage.py -m slow
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nbdist
from nbdist import RankError, Session
from tests.cluster import coverage_data
from tests.cluster.conftest import ROOT
from tests.cluster.coverage_data import SAMPLES, SOURCES

FILE = Path(__file__).parent / "coverage_table.md"
RANKS = (1, 2, 3, 4, 7)
SCALED = {1: 2, 2: 3, 3: 4, 4: 2, 7: 4}
FAULTS = {
    "no fault": "",
    "raise": "raise ValueError('on purpose')",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "scale": "",
}
EPOCHS, BATCH, BREAK_AT = 2, 8, 5


class Case(NamedTuple):
    """One training over a loader of each source."""

    ranks: int
    shuffle: bool
    workers: int
    fault: str


# In one step each loader gives a batch: a fault takes all of them back.
TRAIN = """
import os, signal
from pathlib import Path
from tests.cluster import coverage_data
FOLDER, states = {folder!r}, globals().get("states")
if "model" not in globals():
    model = torch.nn.Linear(1, 1)
    layout = nbdist.parallelize(model, "ddp")
    opt = torch.optim.Adam(model.parameters())
how = dict(global_batch={batch}, shuffle={shuffle}, num_workers={workers}, seed=3)
loaders = {{
    name: nbdist.loader(make(FOLDER), **how) for name, make in coverage_data.SOURCES.items()
}}
globals().update(loaders)
if states:
    for name, loader in loaders.items():
        loader.load_state_dict(states[name])
first, states = next(iter(loaders.values())), None
while first.epoch < {epochs} and not states:
    for batches in zip(*loaders.values(), strict=True):
        epoch = first.epoch
        is_midst = epoch == 1 and first.consumed > {batch} * {break_at}
        if is_midst and rank == world_size - 1 and not Path(FOLDER, "was").exists():
            Path(FOLDER, "was").touch()
            {fault}
        for batch in batches:
            x = torch.tensor(coverage_data.ids(batch), dtype=torch.float32)
            model(x[:, None] / 100).mean().backward()
        opt.step(); opt.zero_grad()
        step = int(next(iter(opt.state.values()))["step"])
        coverage_data.write(FOLDER, rank, step, epoch, dict(zip(loaders, batches)))
        if is_midst and {is_left}:
            states = {{name: loader.state_dict() for name, loader in loaders.items()}}
            break
"""


COVERED = """
[
    (one.loader, one.epoch, one.once, one.missing, one.repeated)
    for one in nbdist.coverage().epochs
    if one.loader in coverage_data.SOURCES
]
"""


def run_case(session: Session, case: Case, folder: Path) -> dict[str, str]:
    """Train through a fault; returns what each source came to: 100 %, or what is wrong."""
    if session.world_size != case.ranks:
        session.scale(case.ranks)
    folder.mkdir()
    session.run("for name in ('model', 'states'): globals().pop(name, None)")
    how = {"epochs": EPOCHS, "batch": BATCH, "break_at": BREAK_AT, "folder": str(folder)}
    how |= {"fault": FAULTS[case.fault] or "pass", "is_left": case.fault == "scale"}
    code = TRAIN.format(**{**case._asdict(), **how})
    # What a lone rank has trained dies with it: it goes on from checkpoints.
    alone = int((case.ranks, case.fault) == (1, "kill"))
    try:
        session.run(code, track=False, retry=alone, checkpoint=alone)
        assert alone or case.fault in ("no fault", "scale")
    except RankError:
        assert case.fault in ("raise", "kill")
        session.retry()
    if case.fault == "scale":
        session.scale(SCALED[case.ranks])
        session.run(code.replace("and True:", "and False:"), track=False)
    assert (folder / "was").exists()
    return compared(folder, session.run(COVERED, track=False).value_list)


def compared(folder: Path, covered: Sequence[Any]) -> dict[str, str]:
    """Compare what the loops wrote down, and what coverage counted, with each sample once."""
    assert all(told == covered[0] for told in covered)
    counted = {(name, epoch): tuple(numbers) for name, epoch, *numbers in covered[0]}
    written = {(name, epoch): times for name, epoch, times in coverage_data.seen(str(folder))}
    assert written.keys() == counted.keys()
    assert written.keys() == set(itertools.product(SOURCES, range(EPOCHS)))
    found: dict[str, str] = {}
    for (name, epoch), times in written.items():
        once = [i for i in range(SAMPLES) if times[i] == 1]
        missing = [i for i in range(SAMPLES) if not times[i]]
        repeated = [i for i, number in times.items() if number > 1]
        numbers = len(once), len(missing), len(repeated)
        if counted[name, epoch] != numbers:
            found[name] = f"epoch {epoch}: {numbers}, coverage {counted[name, epoch]}"
        elif numbers != (SAMPLES, 0, 0):
            found[name] = f"epoch {epoch}: {missing} missing, {repeated} repeated"
        else:
            found.setdefault(name, "100 %")
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case",
    [Case(2, True, 2, "kill"), Case(2, True, 0, "scale")],
    ids=lambda case: f"{case.fault}, {case.workers} workers",
)
def test_each_sample_comes_once_an_epoch_across_a_fault(
    session: Session, tmp_path: Path, case: Case
) -> None:
    found = run_case(session, case, tmp_path / "ids")
    session.scale(2)
    assert found == dict.fromkeys(SOURCES, "100 %")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_sample_comes_once_from_each_source_on_any_ranks_across_any_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cases = [Case(*each) for each in itertools.product(RANKS, (False, True), (0, 2), FAULTS)]
    found: dict[Case, dict[str, str]] = {}
    for ranks, of_ranks in itertools.groupby(cases, key=lambda case: case.ranks):
        session = nbdist.start(n=ranks, device="cpu")
        try:
            for case in of_ranks:
                found[case] = run_case(session, case, tmp_path / "-".join(map(str, case)))
        finally:
            session.stop()
    if os.environ.get("NBDIST_WRITE_COVERAGE_TABLE"):
        FILE.write_text(render(found), "utf-8")
    wrong = {case: each for case, each in found.items() if set(each.values()) != {"100 %"}}
    assert not wrong


def render(found: Mapping[Case, Mapping[str, str]]) -> str:
    """Return the table as Markdown: a row a source and number of ranks, a column a fault."""
    ways = list(itertools.product((False, True), (0, 2), FAULTS))
    heads = [
        f"{fault}, {'shuffled' if shuffle else 'in order'}, {workers} workers"
        for shuffle, workers, fault in ways
    ]
    lines = [["source", "ranks", *heads], ["---"] * (len(ways) + 2)]
    for source, ranks in itertools.product(SOURCES, RANKS):
        cells = [found[Case(ranks, *way)][source] for way in ways]
        lines.append([source, str(ranks), *cells])
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


_CHANGES = ", ".join(f"{a} to {b}" for a, b in SCALED.items())
HEAD = f"""# Each sample once an epoch

Each source of `nbdist.loader`, {EPOCHS} epochs of {SAMPLES} samples in global batches of {BATCH},
and a fault in the midst of the second: the last rank raises or is killed by SIGKILL (and the cell
is retried; a lone rank goes on from a checkpoint), or the number of ranks changes ({_CHANGES}).
The loop writes down the ids of each step that was made, and `nbdist.coverage()` counts what the
ranks noted: **100 %** is each sample once in each epoch, by both.

"""
