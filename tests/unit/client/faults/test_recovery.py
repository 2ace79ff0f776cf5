"""What a repair tells, and when it gives up."""

import pytest

from nbdist.client.faults.fewer_ranks import MOST_ROUNDS
from nbdist.client.faults.recovery import repair, restart
from nbdist.client.faults.repair_report import Repaired, describe
from nbdist.client.faults.stderr_tail import LastOutput
from nbdist.shared.errors import StartError
from tests.unit.fakes import CLONED, PLAIN, FakeCluster


def mended(fake: FakeCluster) -> Repaired:
    return repair(fake, reported=fake.dead())


def test_a_dead_rank_is_replaced_and_what_was_cloned_is_said() -> None:
    fake = FakeCluster([1])
    done = mended(fake)
    assert fake.replaced == [[1]]
    assert done.replaced == (1,)
    assert done.is_whole
    assert done.lines == (
        (
            "Rank 1 was replaced by a new process (pid 201): 2 names cloned from rank 0; its "
            "random state was derived from (seed 0, rank 1, step 41)."
        ),
        "Not cloned to rank 1, create again if needed: file (an open file).",
        "The process group was re-created.",
    )


def test_without_a_death_nothing_is_replaced() -> None:
    fake = FakeCluster([])
    assert mended(fake).lines == ("The process group was re-created.",)
    assert fake.replaced == []


def test_a_death_in_the_midst_begins_it_again_with_that_rank_too() -> None:
    fake = FakeCluster([1], ["kill 2"])
    done = repair(fake, reported=[1], last_words=lambda rank: LastOutput((f"{rank} fell", "so")))
    assert done.replaced == (1, 2)
    # The cell tells how rank 1 ended.
    assert done.lines[0] == (
        "Rank 2 died during the recovery: killed by SIGKILL. Its last output: 2 fell / so."
    )
    assert not any("Rank 1 died" in line for line in done.lines)
    assert fake.replaced == [[1], [1, 2]]
    assert fake.broken is None


def test_a_rank_that_dies_again_and_again_breaks_the_cluster_with_its_reason() -> None:
    fake = FakeCluster([1], ["kill 1", "kill 1", ""])
    done = mended(fake)
    assert len(fake.replaced) == 2
    assert not done.is_whole
    assert fake.broken is not None
    assert fake.broken.startswith("Rank 1 could not be replaced: trouble: kill 1.")
    assert fake.broken.endswith(": kill 1. Variables of living ranks can still be pulled.")
    assert done.irreplaceable == (1,)
    assert done.lines[-1] == fake.broken
    assert done.lines[0] == "Rank 1 died during the recovery: killed by SIGKILL."


def test_a_recovery_that_fails_each_time_is_given_up() -> None:
    fake = FakeCluster([], ["odd"] * 9)
    assert mended(fake).irreplaceable == ()
    assert 9 - len(fake.plan) == MOST_ROUNDS
    assert "The process group could not be re-created: trouble: odd." in (fake.broken or "")


def test_a_rank_that_can_make_no_cuda_call_is_replaced_where_others_live() -> None:
    fake = FakeCluster([], ["cuda 1"])
    done = repair(fake)
    assert fake.replaced == [[1]]
    assert done.replaced == (1,)
    assert done.lines[0] == "Rank 1 could make no CUDA call any more."
    assert fake.broken is None


def test_alone_a_rank_that_can_make_no_cuda_call_keeps_what_it_holds() -> None:
    fake = FakeCluster([], ["cuda 0"] * 9, n=1)
    repair(fake)
    assert fake.replaced == []
    assert fake.broken is not None
    assert "device-side assert triggered" in fake.broken
    assert "CUDA_LAUNCH_BLOCKING" not in fake.broken


def test_a_restart_that_fails_raises_and_the_next_makes_all_anew() -> None:
    fake = FakeCluster([], ["kill 1", "kill 1"])
    with pytest.raises(StartError, match=r"(?s)Rank 1 could not be replaced.*%dist restart"):
        restart(fake, [1])
    restart(fake, [1])
    assert fake.broken is None
    assert fake.replaced[-1] == [0, 1, 2]


def test_ranks_that_nobody_could_clone_are_told_in_one_line() -> None:
    done = describe(dict.fromkeys(range(2), PLAIN), {0: 7, 1: 8})
    assert not done.is_whole
    assert done.lines[0] == (
        "Ranks 0-1 were replaced by new processes (pids 7, 8); their variables are lost."
    )


def test_what_is_lost_makes_a_repair_no_longer_whole() -> None:
    lost = PLAIN | {"cloned": CLONED | {"lost": ["model", "opt"]}}
    done = describe({0: PLAIN, 1: lost, 2: lost}, {1: 8, 2: 9})
    assert not done.is_whole
    assert done.lines.count(
        "The shards of model, opt that ranks 1-2 held are lost: "
        "build them again; nbdist.restore() then brings back what a checkpoint has of them."
    )


def test_each_replacements_random_state_is_told_with_its_own_rank_alone() -> None:
    answer = PLAIN | {"cloned": CLONED}
    lines = describe({0: PLAIN, 1: answer, 2: answer}, {1: 8, 2: 9}).lines
    assert [line.count("(seed 0, rank 2, step 41)") for line in lines if "seed" in line] == [0, 1]


def test_names_that_differ_between_ranks_are_told_once_for_all_replacements() -> None:
    differ = CLONED | {"differ": ["ckpt", "is_main"]}
    answers = {rank: PLAIN | {"cloned": differ} for rank in (1, 2)}
    lines = describe({0: PLAIN, **answers}, {1: 8, 2: 9}).lines
    assert lines.count(
        "These differ between ranks, and ranks 1-2 have rank 0's: ckpt, is_main. "
        "Create them again there: %%distributed -r 1,2."
    )
    many = CLONED | {"differ": [f"n{i}" for i in range(14)]}
    lines = describe({0: PLAIN, 1: PLAIN | {"cloned": many}}, {1: 8}).lines
    assert any("rank 1 has rank 0's: n0," in line and "n11 and 2 more." in line for line in lines)


def test_what_a_replacement_trains_on_with_and_is_not_its_own_is_said() -> None:
    inexact = CLONED | {"inexact": ["Rank 1 went on with errors of rank 0."]}
    done = describe({0: PLAIN, 1: PLAIN | {"cloned": inexact}}, {1: 8})
    assert done.is_whole
    assert "Rank 1 went on with errors of rank 0." in done.lines


def test_what_several_ranks_say_alike_is_said_once() -> None:
    answer = PLAIN | {"agreed": ["ranks agree on step 41"], "stale": ["group 1 (ranks 0-1)"]}
    lines = describe({0: answer, 1: answer | {"reforms_left": 3}}, {}).lines
    assert lines[1:3] == (
        "ranks agree on step 41",
        "Not re-created, create them again: group 1 (ranks 0-1).",
    )
    assert "re-created 3 more times" in lines[3]
