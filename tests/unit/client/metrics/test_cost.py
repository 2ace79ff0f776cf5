"""What watching costs, as people read it."""

import os
import subprocess
import sys
import threading
import time

from nbdist.client.metrics import usage
from nbdist.client.metrics.cost import Cost, RankCost, cost_of


def test_without_training_there_is_nothing_to_tell() -> None:
    assert str(Cost()).startswith("No cost is known yet: no cell has trained since the ranks")
    assert cost_of([], {"board": 1.0}, 5) == Cost()


def test_the_table_names_every_part_where_it_is_and_its_share_of_a_step() -> None:
    ranks = [RankCost(100, 1000.0, 0.25, {"tap": us, "hooks": 10.0}) for us in (20.0, 40.0)]
    cost = cost_of(ranks, {"board": 0.002, "unknown": 9.0}, 50)
    assert cost.us("rank") == 40.0
    assert cost.us("notebook") == 40.0
    lines = str(cost).splitlines()
    assert lines[0].startswith("Watching costs each rank 40.0 µs a step, 4 % of 1.00 ms, and the")
    assert "25 % of the steps are measured" in lines[1]
    assert [line.split()[:2] for line in lines[3:]] == [
        ["tap", "rank"],
        ["hooks", "rank"],
        ["board", "notebook"],
    ]


def test_of_a_training_whose_steps_are_all_measured_no_sampling_is_told() -> None:
    cost = cost_of([RankCost(9, 1e5, 1.0, {"tap": 1.0})], {}, 0)
    assert "measured" not in str(cost)


def test_what_a_thread_has_computed_is_known_after_its_end() -> None:
    @usage.counts
    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    before = usage.in_threads().get("analysis", 0.0)
    thread = threading.Thread(target=work, name="nbdist-analysis")
    thread.start()
    thread.join()
    assert usage.in_threads()["analysis"] - before >= 0.05


WORKS = """
import sys, time  # of nbdist
while time.process_time() < 0.1: pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""


def _worker() -> "tuple[subprocess.Popen[str], float]":
    """Return a process of ours, and what it has computed by now at least."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, float(process.stdout.readline())


def test_totals_never_fall_when_a_process_dies_and_another_takes_its_place() -> None:
    def total() -> float:
        return usage.in_processes({os.getpid()}).get("controller", 0.0)

    before = total()
    totals = []
    for _ in range(2):
        process, spent = _worker()
        try:
            totals.append(total())
        finally:
            process.kill()
            process.communicate()
        totals.append(total())
    assert before + spent - 0.05 < totals[0] <= totals[1] < totals[2] <= totals[3]
    assert totals[3] - before >= 0.15  # both, as the clock ticks


def test_a_rank_that_begins_to_count_anew_makes_no_cost_negative() -> None:
    cost = cost_of([RankCost(9, 1e3, 1.0, {"tap": 1.0})], {"board": 0.1}, -3)
    assert cost.us("notebook") == 0
    assert "too short to tell what the notebook did" in str(cost)
