from pathlib import Path

from nbdist.client.cells.status import RankLine, Status
from nbdist.client.notebook.current import judge

EVENTS = Path("/here/.nbdist/logs/now/events.jsonl")


def line(rank: int, state: str, *, is_dead: bool = False, is_silent: bool = False) -> RankLine:
    place = (rank, "localhost", "cpu", 100 + rank)
    return RankLine(*place, state, is_dead=is_dead, is_silent=is_silent)


def test_a_cluster_whose_ranks_answer_is_well_and_its_log_is_named() -> None:
    cluster, events = judge(Status("2 ranks", (line(0, "idle"), line(1, "running"))), None, EVENTS)
    assert (cluster.says, cluster.is_wrong) == ("2 ranks, all of them respond", False)
    assert str(EVENTS) in events.says


def test_dead_ranks_silent_ones_and_a_broken_cluster_are_told_with_the_mend() -> None:
    silent_line = line(1, "not answering: stopped (SIGSTOP?)", is_silent=True)
    status = Status("", (line(0, "dead: killed by SIGKILL", is_dead=True), silent_line))
    broken, dead, silent, _ = judge(status, "The store has ended.", EVENTS)
    assert (broken.says, broken.fix) == ("The store has ended.", "%dist restart")
    assert dead.says == "rank 0 is dead: killed by SIGKILL"
    assert dead.fix == "%dist restart -r 0"
    assert "rank 1 does not respond" in silent.says


def test_the_words_of_a_rank_do_not_make_it_dead() -> None:
    cluster, _ = judge(Status("", (line(0, "dead tired: not answering"),)), None, EVENTS)
    assert not cluster.is_wrong
