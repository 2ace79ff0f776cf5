"""Ranks are killed while they save, restore and train: none resumes wrong, or loses a checkpoint.

Every step's samples, weights and optimizer states are compared with those of a training that
nothing has broken, bit for bit. The slow test writes what came of it, where that is asked for:

    NBDIST_WRITE_CRASH_TABLE=1 python -m pytest tests/group/test_checkpoint_crash.py -m slow
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from nbdist.engine.checkpoint.folder import CheckpointFolder
from nbdist.engine.checkpoint.manifest import order
from tests.group import checkpoint_crash_ranks as crash_ranks
from tests.group import faults
from tests.group.checkpoint_crash_ranks import steps_in
from tests.group.engines import Cluster, RankFailed, cluster
from tests.group.harness import HANG_S

FILE = Path(__file__).parent / "crash_table.md"
STEPS, MORE = 12, 4  # in which ranks die; and more, so that two saves follow the last one


@dataclass(frozen=True)
class Moment:
    """When ranks die.

    Attributes:
        rank: Who dies.
        what: "save", "restore" (at a use of a file), or "train" (at any time).
        place: Which of its uses of files, from 0 to 1; or how far into the training.
        all_die: Whether the other rank is killed as well, as soon as the first has ended.
    """

    rank: int
    what: str
    place: float
    all_die: bool

    def __str__(self) -> str:
        who = f"rank {self.rank} and the other" if self.all_die else f"rank {self.rank}"
        return f"{who} in {self.what} at {self.place:.3f}"


def moments(count: int, seed: int) -> list[Moment]:
    drawn = random.Random(seed)
    kinds = ["save", "save", "save", "train", "restore"]
    return [
        Moment(drawn.choice((0, 0, 1)), kinds[i % len(kinds)], drawn.random(), i % 2 == 0)
        for i in range(count)
    ]


FEW = [
    Moment(0, "save", 0.5, all_die=False),
    Moment(0, "restore", 0.5, all_die=True),
]


@dataclass(frozen=True)
class Unbroken:
    """The training that nothing breaks."""

    steps: dict[int, list[dict[str, Any]]]  # by rank, in order
    uses: list[int]  # of files in the folder until STEPS, by rank
    reads: list[int]  # of files in a restore, by rank
    seconds: float  # until STEPS


class World:
    """Two ranks, made again when they are dead."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._generation = 0
        self.ranks: Cluster = self._stack.enter_context(cluster(2))

    def stop(self) -> None:
        self._stack.close()

    def revive(self, dead: list[int]) -> None:
        """Have two living ranks again, as the notebook does."""
        if len(dead) == 2:
            self.stop()
            self._generation = 0
            self.ranks = self._stack.enter_context(cluster(2))
            return
        (rank,) = dead
        self._generation += 1
        self.ranks.post_join(self.ranks.replace(rank), self._generation)
        self.ranks.engines[rank].post(faults.heal_replacement)
        self.ranks.engines[1 - rank].post(faults.reform, self._generation)
        self.ranks.engines[1 - rank].result()
        self.ranks.engines[rank].result()
        self.ranks.engines[rank].result()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def unbroken(world: World, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    home = tmp_path_factory.mktemp("unbroken")
    began = time.monotonic()
    first = world.ranks.run(crash_ranks.train, str(home / "run"), str(home / "log"), STEPS)
    seconds = time.monotonic() - began
    reads = world.ranks.run(crash_ranks.restore, str(home / "run"), 0)
    alone = str(home / "whole")
    world.ranks.run(crash_ranks.train, alone, str(home / "log-whole"), STEPS + MORE)
    steps = {r: made_steps(steps_in(str(home / "log-whole"), r)) for r in (0, 1)}
    for rank, made in steps.items():
        assert [one["step"] for one in made] == list(range(1, STEPS + MORE + 1))
        assert made_steps(steps_in(str(home / "log"), rank)) == made[:STEPS]
    return Unbroken(steps, [one["uses"] for one in first], reads, seconds)


def made_steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "step" in line]


def die(world: World, moment: Moment, unbroken: Unbroken, run: str, log: str) -> list[int]:
    """Train until ranks die at the moment; return who is dead, when the others have ended."""
    ranks = world.ranks
    if moment.what == "restore":
        ranks.run(crash_ranks.train, run, log, STEPS)
        kill_at = 1 + int(moment.place * unbroken.reads[moment.rank])
        for engine in ranks.engines:
            engine.post(crash_ranks.restore, run, kill_at if engine.rank == moment.rank else 0)
    else:
        uses = 1 + int(moment.place * unbroken.uses[moment.rank])
        for engine in ranks.engines:
            is_last = moment.what == "save" and engine.rank == moment.rank
            engine.post(crash_ranks.train, run, log, STEPS, uses if is_last else 0)
    dying = ranks.engines[moment.rank]
    if moment.what == "train":
        time.sleep(moment.place * unbroken.seconds)  # whenever it is, it must be survived
    else:
        wait([dying.process.sentinel, dying.main], HANG_S)  # it may have fewer uses than counted
    dying.kill()
    other = ranks.engines[1 - moment.rank]
    if moment.all_die:
        other.kill()
        return [0, 1]
    other.now(crash_ranks.let_go, [moment.rank])
    with suppress(RankFailed):  # its collectives were cut, unless it was done with them
        other.result()
    assert other.process.is_alive()
    return [moment.rank]


def survives(world: World, moment: Moment, unbroken: Unbroken, home: Path) -> None:
    run, log = str(home / "run"), str(home / "log")
    dead = die(world, moment, unbroken, run, log)
    if len(dead) == 1:
        other = world.ranks.engines[1 - dead[0]]
        other.post(crash_ranks.newest_save)
        assert "being written" not in other.result()
    before = {rank: steps_in(log, rank) for rank in (0, 1)}

    # What counted still counts, and is what was written.
    place = CheckpointFolder(run)
    committed, damaged = place.survey()
    assert damaged == []
    for name, commit in committed.items():
        assert place.damage(name, commit, commit.files).found == ()
    latest = place.pointer("latest")
    counted = max((line.get("saved", 0) for lines in before.values() for line in lines), default=0)
    step = (order(latest) or (0, 0))[0] if latest else 0
    assert step >= counted
    assert latest is None or latest in committed

    # The training goes on from there as if nothing had been.
    world.revive(dead)
    again = world.ranks.run(crash_ranks.train, run, f"{log}-again", STEPS + MORE)
    expected = step or max((commit.step for commit in committed.values()), default=0)
    assert [one["restored"] for one in again] == [expected] * 2
    for rank in (0, 1):
        first = made_steps(before[rank])
        assert first == unbroken.steps[rank][: len(first)]
        after = made_steps(steps_in(f"{log}-again", rank))
        assert after == unbroken.steps[rank][expected:]

    # Nothing is left of what was interrupted.
    assert sorted(path.name for path in Path(run).iterdir()) == [
        "latest",
        *sorted(place.committed()),
    ]
    assert len(place.committed()) == 2
    assert not list(Path(run).rglob("*.tmp"))
    assert not list(Path(run).rglob("writing.json"))


@pytest.mark.parametrize("moment", FEW, ids=str)
def test_a_training_survives_deaths(
    world: World, unbroken: Unbroken, tmp_path: Path, moment: Moment
) -> None:
    survives(world, moment, unbroken, tmp_path)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[Moment, bool]]:
    """Which moments a training has survived; all of them are a table."""
    found: dict[Moment, bool] = {}
    yield found
    if os.environ.get("NBDIST_WRITE_CRASH_TABLE"):
        FILE.write_text(render(found), "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("moment", moments(50, seed=19), ids=str)
def test_a_training_survives_deaths_at_any_moment(
    world: World,
    unbroken: Unbroken,
    tmp_path: Path,
    moment: Moment,
    outcomes: dict[Moment, bool],
) -> None:
    outcomes[moment] = False
    survives(world, moment, unbroken, tmp_path)
    outcomes[moment] = True


def render(outcomes: dict[Moment, bool]) -> str:
    """Return the outcomes as Markdown: a row for who dies, a column for in what."""
    what = ["save", "restore", "train"]
    lines = [["killed", *(f"in {one}" for one in what)], ["---"] * 4]
    for who, ranks, all_die in WHO:
        cells = []
        for one in what:
            known = [
                survived
                for moment, survived in outcomes.items()
                if (moment.what, moment.all_die) == (one, all_die) and moment.rank in ranks
            ]
            cells.append(f"{sum(known)} of {len(known)}")
        lines.append([who, *cells])
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


WHO = [("rank 0", [0], False), ("rank 1", [1], False), ("both ranks", [0, 1], True)]
HEAD = """# What deaths leave of a training and its checkpoints

Two ranks train a model with dropout under zero3, save every second step, and are killed (SIGKILL)
at random moments: in a save or a restore at one of their uses of files, in training at any time.
Then the training is begun again and restored. It has survived where no checkpoint that counted is
lost or damaged, nothing is left of what was interrupted, and every step's samples, weights and
optimizer states are those of a training that nothing has broken, bit for bit. Cells tell how many
did.

The notebook's kernel is killed at ten more random moments, with the same result
(`tests/lifecycle/test_checkpoints.py`).

"""
