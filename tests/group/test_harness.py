"""A rank that dies, or that never answers, is told with its signal and the line it was at."""

import os
import signal
import threading

import pytest
import torch.distributed as dist

from tests.group.engines import RankFailed, cluster
from tests.group.harness import try_ranks


def _die_on_rank_1(signum: int) -> int:
    if os.environ["RANK"] == "1":
        os.write(2, b"a word of C++\n")
        os.kill(os.getpid(), signum)
    return 7


def _meet_and_die_on_rank_1(signum: int) -> int:
    dist.barrier()  # else rank 0 may be connecting still
    return _die_on_rank_1(signum)


def _hang_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        threading.Event().wait()
    return 7


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
        assert "in _die_on_rank_1" in end


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
