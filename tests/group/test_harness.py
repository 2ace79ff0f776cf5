"""A rank that dies, or that never answers, is told with its signal and the line it was at."""

import os
import re
import signal
import threading

import pytest
import torch.distributed as dist

from tests.group.engines import RankFailed, cluster
from tests.group.harness import run_ranks, try_ranks
from tests.group.last_words import crash_file, told


def _die_on_rank_1(signum: int) -> int:
    if os.environ["RANK"] == "1":
        os.write(2, b"a word of C++\n")
        os.kill(os.getpid(), signum)
    return 7


def _meet_and_die_on_rank_1(signum: int) -> int:
    dist.barrier()  # else rank 0 may be connecting still
    return _die_on_rank_1(signum)


def _lose_a_peer() -> None:
    dist.barrier()
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def _hang_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        threading.Event().wait()
    return 7


def _kept(error: str) -> str:
    """Return the text that is kept of a crash, and remove it: this one was meant."""
    file = crash_file(int(re.findall(r"process (\d+) was killed", error)[-1]))
    text = file.read_text("utf-8")
    file.unlink()
    return text


@pytest.mark.parametrize("name", ["SIGABRT", "SIGKILL"])
def test_a_rank_that_dies_is_told_with_its_signal_and_last_words(name: str) -> None:
    lives, dead = try_ranks(2, _meet_and_die_on_rank_1, int(signal.Signals[name]))
    assert (lives.value, lives.error) == (7, None)
    assert dead.error is not None
    assert f"was killed by {name}" in dead.error
    assert "a word of C++" in dead.error
    if name == "SIGABRT":  # nothing can be written at SIGKILL
        *_, end = dead.error.partition("Extension modules")
        assert "was killed by SIGABRT" in end
        assert "a word of C++" in end
        assert "frame #0: " in end  # of C++
        assert "in _die_on_rank_1" in end
        assert "Thread" in _kept(dead.error)


def test_of_all_errors_that_of_the_crash_comes_last() -> None:
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, _lose_a_peer)
    error = str(failed.value)
    assert "Connection" in error  # what rank 1 raises
    assert "in _lose_a_peer" in "".join(error.splitlines()[-6:])
    assert "kill + " in error.partition("Extension modules")[2]
    _kept(error)


def test_the_frames_are_of_the_thread_that_crashed_also_where_nothing_was_said_before() -> None:
    threads = [f"SIGSEGV(11), PID: 7, Thread {n}: \n frame #0: here_{n}\n\n" for n in (7, 8)]
    crash = "Fatal Python error: Segmentation fault\n\nCurrent thread 7:\n  File a in b\n"
    assert told("killed", "".join(threads) + crash).endswith(
        "killed\n\nframe #0: here_7\nFile a in b"
    )


def test_a_rank_that_exits_is_told_with_its_code() -> None:
    assert "exited with 3" in str(try_ranks(1, os._exit, 3)[0].error)


def test_a_rank_that_never_answers_is_told_with_the_line_it_is_at() -> None:
    lives, stuck = try_ranks(2, _hang_on_rank_1, timeout_s=5)
    assert (lives.value, lives.error) == (7, None)
    assert stuck.error is not None
    assert stuck.error.startswith("still running after 5 s, killed there:")
    assert "in _hang_on_rank_1" in stuck.error


def test_an_engine_that_dies_is_told_with_its_signal_and_last_words() -> None:
    with cluster(2) as ranks:
        ranks.engines[1].post(_die_on_rank_1, int(signal.SIGSEGV))
        with pytest.raises(RankFailed) as failed:
            ranks.engines[1].result()
        assert "rank 1: process " in str(failed.value)
        assert "was killed by SIGSEGV" in str(failed.value)
        assert "in _die_on_rank_1" in str(failed.value)
        _kept(str(failed.value))


def test_ranks_of_which_one_has_crashed_are_started_again_for_the_next_run() -> None:
    with cluster(2) as ranks:
        with pytest.raises(RankFailed) as error:
            ranks.run(_die_on_rank_1, int(signal.SIGABRT))
        _kept(str(error.value))
        assert ranks.run(os.getenv, "RANK") == ["0", "1"]
