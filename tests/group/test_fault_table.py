"""Every strategy, a fault in every place: what is left of the training, against a committed table.

After a change, or with another torch, write the table's rows anew and read what has changed:

    NBDIST_WRITE_FAULT_TABLE=1 python -m pytest tests/group/test_fault_table.py -m ""
"""

import os
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product

import pytest

from tests import bare_thread
from tests.group import fault_table, faults, strategies
from tests.group.engines import Cluster, RankFailed, cluster

STEPS = 6
TORCH = version("torch").split("+")[0]

# Where and when which rank raises. In the first step torch sets itself up (DDP's buckets, FSDP's
# order, what pipelines send). In the second DDP lays its buckets anew, with a static graph in the
# third: rank 3 is a leaf of the broadcast that tells of them, and leaves the others with new ones.
PLACES = {
    "forward": (3, "forward", 1),
    "backward": (3, "backward", 1),
    "step 0, forward": (0, "forward", 1),
    "step 0, backward": (0, "backward", 1),
    "before step 1": (1, "before", 1),
    "before step 1, rank 3": (1, "before", 3),
    "before step 2": (2, "before", 1),
    "before step 2, rank 3": (2, "before", 3),
    "step 1, backward": (1, "backward", 1),
}

# Run by `make test`, beside those of `BARE_EVERY_TIME`; the rest of the matrix is slow.
EVERY_TIME = (
    'nbdist.parallelize(model, "ddp")',
    "DDP, static_graph",
    "DDP, ZeroRedundancyOptimizer",
    'nbdist.parallelize(model, "ddp", Compress("bf16", between=2))',
    'nbdist.parallelize(model, "dp=2 fsdp=2")',
    'nbdist.parallelize(model, "dp=2 tp=2")',
    "pipeline, 1F1B",
    "FullyShardedDataParallel",
)
# A fault in forward leaves less on its way than one in backward: of each kind of launch one.
FORWARD_TOO = (
    'nbdist.parallelize(model, "dp=2 fsdp=2")',
    'nbdist.parallelize(model, "dp=2 tp=2")',
)

# Also with every backward on a thread beside the main one. Each kind of launch within backward: by
# DDP's reducer, by hooks in Python, by operators of the graph, and by a schedule that calls it.
# `make test` runs the first and the last, where the fault leaves most on its way.
BARE_EVERY_TIME = (
    ('nbdist.parallelize(model, "ddp")', "backward"),
    ('nbdist.parallelize(model, "pp=2 dp=2")', "backward"),
)
ON_BARE_THREADS = (
    'nbdist.parallelize(model, "ddp")',
    "DDP, fp16_compress_hook",
    "DDP, activation checkpointing",
    'nbdist.parallelize(model, "zero1")',
    "fully_shard",
    'nbdist.parallelize(model, "dp=2 fsdp=2")',
    'nbdist.parallelize(model, "fsdp=2 tp=2")',
    'nbdist.parallelize(model, "pp=2 dp=2")',
    "FullyShardedDataParallel",
)

WRITES = bool(os.environ.get("NBDIST_WRITE_FAULT_TABLE"))
measured: fault_table.Table = {}


class Ranks:
    """Four ranks for many trainings, started anew when one has left them unusable.

    With `bare` every backward runs on a thread beside the main one, as on a GPU.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self._context = cluster(4, timeout_s=15)
        self.ranks: Cluster = self._context.__enter__()
        self.generation = 0
        self.unbroken: dict[str, list[str]] = {}
        self._bare = bare
        if bare:
            self.ranks.run(bare_thread.install)

    def stop(self) -> None:
        self._context.__exit__(None, None, None)

    def outcome_of(self, strategy: str, *places: str) -> str:
        """Train with faults, and say how the result compares with a training without one."""
        if strategy not in self.unbroken:
            self.ranks.run(strategies.build, strategy)
            self.ranks.run(strategies.train, STEPS)
            self.unbroken[strategy] = self.ranks.run(strategies.fingerprint)
        try:
            self.ranks.run(strategies.build, strategy)
            for place in places:
                self._train_to_fault(strategy, *PLACES[place])
            self.ranks.run(strategies.train, STEPS)
            prints = self.ranks.run(strategies.fingerprint)
        except RankFailed as error:
            print(f"{strategy}, {places}: {error}")
            kept = self.unbroken
            self.stop()
            self.__init__(bare=self._bare)  # type: ignore[misc]
            self.unbroken = kept
            return "fails"
        unbroken = self.unbroken[strategy]
        if prints == unbroken:
            return "bit-equal"
        return "differs" if _who_is_alike(prints) == _who_is_alike(unbroken) else "diverges"

    def _train_to_fault(self, strategy: str, step: int, place: str, breaker: int) -> None:
        ranks, peers = self.ranks, [rank for rank in range(4) if rank != breaker]
        has_micro_batches = strategy.startswith("pipeline") or '"pp=' in strategy
        passes = 2 if has_micro_batches and place != "before" else 0
        ranks.post(strategies.train, STEPS, step, place, passes, breaker)
        assert ranks.engines[breaker].result() == {"step": step, "error": "Boom"}
        for rank in peers:
            ranks.engines[rank].now(faults.abort)
        freed = [ranks.engines[rank].result() for rank in peers]
        assert freed == [{"step": step, "error": "released"}] * len(peers)
        self.generation += 1
        ranks.run(strategies.recover, self.generation)


def _who_is_alike(prints: list[str]) -> list[int]:
    return [prints.index(each) for each in prints]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    try:
        yield made
    finally:
        made.stop()
        if WRITES:
            table = fault_table.parse(fault_table.FILE.read_text("utf-8"))
            for key, row in measured.items():
                table[key] = table.get(key, {}) | row
            order = list(strategies.STRATEGIES)
            table = dict(sorted(table.items(), key=lambda item: (order.index(item[0][0]), item[0])))
            fault_table.FILE.write_text(fault_table.render(table, list(PLACES)), "utf-8")


@pytest.fixture(scope="module")
def bare_ranks() -> Iterator[Ranks]:
    made = Ranks(bare=True)
    yield made
    made.stop()


def cases() -> list[object]:
    made: list[object] = []
    for strategy in strategies.STRATEGIES:
        for place in PLACES:
            chosen = {"backward": EVERY_TIME, "forward": FORWARD_TOO}.get(place, ())
            always = strategy in chosen
            marks = () if always else (pytest.mark.slow,)
            made.append(pytest.param(strategy, place, marks=marks, id=f"{strategy}, {place}"))
    return made


@pytest.mark.parametrize(("strategy", "place"), cases())
def test_what_a_fault_leaves_of_a_training_is_what_the_table_says(
    ranks: Ranks, strategy: str, place: str
) -> None:
    outcome = ranks.outcome_of(strategy, place)

    if WRITES:
        measured.setdefault((strategy, TORCH), {})[place] = outcome
        return
    table = fault_table.parse(fault_table.FILE.read_text("utf-8"))
    if (strategy, TORCH) not in table:
        pytest.fail(f"fault_table.md has no row of torch {TORCH} for {strategy}: write it anew")
    assert outcome == table[strategy, TORCH][place]


def bare_cases() -> list[object]:
    return [
        pytest.param(*case, marks=() if case in BARE_EVERY_TIME else (pytest.mark.slow,))
        for case in product(ON_BARE_THREADS, ("forward", "backward"))
    ]


@pytest.mark.parametrize(("strategy", "place"), bare_cases())
def test_a_fault_beside_a_backward_on_another_thread_leaves_what_the_table_says(
    bare_ranks: Ranks, strategy: str, place: str
) -> None:
    table = fault_table.parse(fault_table.FILE.read_text("utf-8"))
    assert bare_ranks.outcome_of(strategy, place) == table[strategy, TORCH][place]


@pytest.mark.parametrize(
    "strategy",
    [
        "DDP",
        pytest.param("DDP, static_graph", marks=pytest.mark.slow),
        pytest.param("DDP, find_unused_parameters", marks=pytest.mark.slow),
        pytest.param('nbdist.parallelize(model, "ddp")', marks=pytest.mark.slow),
    ],
)
def test_faults_in_a_row_while_buckets_are_laid_anew_change_no_bit(
    ranks: Ranks, strategy: str
) -> None:
    in_a_row = ["step 0, backward", "before step 1", "step 1, backward", "before step 2, rank 3"]
    assert ranks.outcome_of(strategy, *in_a_row) == "bit-equal"
