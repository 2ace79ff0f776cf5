"""Which processes are idle: those that use no processor, for long, and no others."""

import os
import subprocess
import sys

import psutil

from nbdist.client.cluster.patience import IdleProcesses, LongWait, sleeping_s
from nbdist.client.cluster.processes import RankProcess
from tests.lifecycle.kernels import wait_for


def test_a_rank_that_uses_no_processor_is_idle_after_a_while() -> None:
    ranks = IdleProcesses(30.0)
    assert ranks.attend({1: 4.0}, 0.0) == []
    assert ranks.attend({1: 4.0}, 30.0 - 0.1) == []
    assert ranks.attend({1: 4.1}, 30.0) == [1]  # its heartbeat is no work


def test_a_rank_that_computes_is_never_idle() -> None:
    ranks = IdleProcesses(30.0)
    assert not any(ranks.attend({1: now * 0.5}, now) for now in range(1000))


def test_a_rank_that_answers_or_is_stopped_meanwhile_begins_anew() -> None:
    ranks = IdleProcesses(30.0)
    ranks.attend({1: 4.0, 2: 1.0}, 0.0)
    ranks.attend({2: 1.0}, 20.0)
    assert ranks.attend({1: 4.0, 2: 1.0}, 30.0 + 1) == [2]


def test_a_long_wait_is_told_each_time_when_it_has_lasted_twice_as_long() -> None:
    said: list[str] = []
    wait = LongWait("torch's import", said.append, 100.0)
    for second in range(100):
        wait.attend(100.0 + second)
    assert said == [
        f"Waiting for torch's import: {seconds} s so far (interrupt to give up)."
        for seconds in (15, 30, 60)
    ]


def test_only_processes_that_sleep_on_this_machine_are_looked_at() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as sleeper:
        try:
            process = psutil.Process(sleeper.pid)
            wait_for(lambda: process.status() == psutil.STATUS_SLEEPING, "it to sleep")
            state = RankProcess(3, sleeper.pid, "here")
            busy = RankProcess(4, os.getpid(), "here")
            away = RankProcess(5, sleeper.pid, "away", is_here=False)
            assert set(sleeping_s([state, busy, away])) == {3}
            process.suspend()
            wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "it to stop")
            assert sleeping_s([state]) == {}
        finally:
            sleeper.kill()
    assert sleeping_s([state]) == {}
