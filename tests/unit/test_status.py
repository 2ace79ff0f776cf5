"""The table of `%dist status`."""

from nbdist.client.status import RankLine, Status, _line

ANSWER = {
    "waiting": None,
    "step": 7,
    "cuda_bytes": 0,
    "rss_bytes": 3 * 2**20,
    "last": "all_reduce",
}
PLACE = (0, "localhost", "cpu", 123)


def test_the_table_has_a_line_for_each_rank_in_aligned_columns() -> None:
    dead = RankLine(1, "localhost", "cpu", 4567, "dead: killed by SIGKILL")
    status = Status("2 ranks on cpu, gloo", (_line(PLACE, ANSWER, running=False), dead))
    first, head, *lines = str(status).splitlines()
    assert first == "2 ranks on cpu, gloo"
    assert head.split("  ")[0] == "rank"
    assert head.index("state") == lines[0].index("idle") == lines[1].index("dead")
    assert "3 MiB" in lines[0]
    assert repr(status) == str(status)


def test_a_rank_that_waits_says_in_what_and_how_long() -> None:
    waiting = {**ANSWER, "waiting": {"kind": "barrier", "seconds": 12.4}}
    assert _line(PLACE, waiting, running=True).state == "waiting in barrier for 12 s"
    assert _line(PLACE, ANSWER, running=True).state == "running"


def test_without_ranks_there_is_one_sentence() -> None:
    assert str(Status.stopped("nothing was started.")) == (
        "No engines are running: nothing was started."
    )
