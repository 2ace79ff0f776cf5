"""What is said of ranks in a cell that is merely slow, on plain values."""

from typing import Any

import pytest

from nbdist.client.faults import describe
from nbdist.client.faults.rank_state import Inactive, RankState, Wait

WAIT = Wait("all_reduce", "0", 7, 8_400_000, 14.2, 9, (0, 1, 2, 3))
WAITS = RankState("waiting", WAIT, {"0": 7})
LOADS = RankState("computing", None, {"0": 6}, function="load_batch", line=3)


def test_the_quiet_note_names_who_computes_who_waits_and_the_way_out() -> None:
    note = describe.quiet_note(
        14.3, {0: LOADS, 1: WAITS, 2: WAITS, 3: WAITS}, [0, 1, 2, 3], gone={}, silent={}
    )
    assert note == (
        "No progress for 14 s: rank 0 computes in load_batch (line 3); ranks 1-3 wait for it "
        "in all_reduce #7 (8.4 MB, group 0), line 9. Interrupt the kernel (■) to stop; "
        "variables are kept."
    )


@pytest.mark.parametrize(
    ("said", "silent", "expected"),
    [
        ({0: RankState("loading data", line=4)}, {}, "rank 0 loads data (line 4)"),
        ({0: RankState("idle")}, {}, "rank 0 begins"),
        ({0: RankState("paused", line=4, step=7)}, {}, "rank 0 pauses at step 7"),
        ({}, {0: "stopped (SIGSTOP?)"}, "rank 0 does not answer: stopped (SIGSTOP?)"),
        ({}, {0: ""}, "rank 0 does not answer"),
        ({0: RankState("waiting", WAIT, {"0": 7})}, {}, f"rank 0 waits in {WAIT}"),
    ],
)
def test_every_state_of_a_rank_has_its_words(
    said: dict[int, RankState], silent: dict[int, str], expected: str
) -> None:
    assert describe.clauses(said, [0], {}, silent) == expected


def test_ranks_that_wait_for_different_ones_name_them() -> None:
    other = RankState("waiting", Wait("barrier", "1", 1, ranks=(2, 3)), {"0": 7, "1": 1})
    said = {0: LOADS, 1: WAITS, 2: other, 3: RankState("computing", None, {"0": 7}, line=5)}
    assert describe.clauses(said, [0, 1, 2, 3], {}, {}) == (
        "rank 0 computes in load_batch (line 3); rank 3 computes (line 5); "
        "rank 1 waits for rank 0 in all_reduce #7 (8.4 MB, group 0), line 9; "
        "rank 2 waits for rank 3 in barrier #1 (group 1)"
    )


def test_a_rank_is_described_in_a_few_words() -> None:
    said = {0: LOADS, 1: WAITS}
    assert describe.describe(0, said, {}) == "computing in load_batch (line 3)"
    assert describe.describe(1, said, {}) == (
        "waiting 14 s in all_reduce #7 (8.4 MB, group 0), line 9 for rank 0"
    )


def test_a_place_in_another_cell_is_named_with_it() -> None:
    where = {"file_line": "/tmp/cd34.py:16", "line": 16, "cell": 2, "function": "relu"}
    computes = {0: RankState.from_wire({"doing": "computing", "where": where})}
    assert describe.describe(0, computes, {}) == "computing in relu (cell 2, line 16)"
    wait = {"kind": "barrier", "group": "0", "seq": 3, "line": "/tmp/cd34.py:16"}
    waits = RankState.from_wire({"waiting": wait, "where": where})
    assert str(waits.wait) == "barrier #3 (group 0), cell 2, line 16"
    elsewhere = RankState.from_wire({"waiting": wait | {"line": "/tmp/ab12.py:3"}, "where": where})
    assert str(elsewhere.wait) == "barrier #3 (group 0), line 3"


def test_after_a_failure_the_ranks_that_still_compute_are_named_with_what_ends_them() -> None:
    culprits = {1: Inactive("failed", "ValueError, cell 7, line 3")}
    assert describe.after_failure(culprits, [2], {}) == (
        "rank 1 failed (ValueError, cell 7, line 3); rank 2 still computes and stops at its next "
        "collective or the cell's end."
    )


def test_after_a_failure_the_waits_are_named_of_which_bytes_still_flow() -> None:
    culprits = {1: Inactive("failed", "ValueError, cell 7, line 3")}
    wait = Wait("broadcast", seq=3, bytes=8_000_000, line=7)
    assert describe.after_failure(culprits, [], {0: wait, 2: wait}) == (
        "rank 1 failed (ValueError, cell 7, line 3); ranks 0, 2 still send or receive in "
        "broadcast #3 (8.0 MB, group 0), line 7."
    )


def test_what_an_interrupt_has_not_stopped_is_named_with_what_a_second_one_costs() -> None:
    text = describe.not_stopped({0: LOADS, 1: RankState("computing")}, [0, 1])
    assert text == (
        "Rank 0 is still busy in load_batch (line 3). Rank 1 is still inside one long call. "
        "Wait, or interrupt again to kill them: variables that no other rank holds are lost then."
    )


def test_a_rank_of_which_only_the_line_is_known_has_a_whole_sentence_too() -> None:
    text = describe.not_stopped(
        {0: RankState("computing", line=2), 1: RankState("computing", line=2)}, [0, 1]
    )
    assert text.startswith("Ranks 0-1 are still busy (line 2). Wait, or ")


def test_an_answer_of_a_rank_is_read_and_what_it_lacks_is_unknown() -> None:
    wait: dict[str, Any] = {"kind": "recv", "group": "0", "seq": 2, "bytes": 4, "seconds": 1.0}
    wait |= {"line": "/tmp/ipykernel_nbdist/ab.py:14", "is_certain": True, "peer": 1, "ranks": []}
    doing = RankState.from_wire({"waiting": wait, "doing": "waiting", "step": 3})
    assert doing.wait == Wait("recv", "0", 2, 4, 1.0, 14, None, 1)
    assert doing.counts is None
    assert doing.step == 3
