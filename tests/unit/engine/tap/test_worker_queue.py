"""When workers took operations up, from when they were handed over and when they ended."""

from nbdist.engine.tap.intervals import begins


def test_a_free_worker_takes_an_operation_up_at_once() -> None:
    assert begins([(10, 20), (12, 30)], workers=2) == [10, 12]


def test_the_next_one_waits_for_the_worker_that_is_free_first() -> None:
    assert begins([(0, 50), (1, 20), (2, 60), (3, 70)], workers=2) == [0, 1, 20, 50]


def test_one_worker_does_one_behind_the_other() -> None:
    assert begins([(0, 10), (1, 30), (2, 31), (40, 50)], workers=1) == [0, 10, 30, 40]


def test_one_that_is_under_way_keeps_its_worker() -> None:
    assert begins([(0, None), (1, 10), (2, 20)], workers=2) == [0, 1, 10]


def test_those_taken_up_before_keep_their_workers_until_they_end() -> None:
    assert begins([(5, 40), (6, 50)], workers=2, busy=[None, 20]) == [20, 40]


def test_what_ended_while_all_workers_seem_busy_did_not_queue() -> None:
    assert begins([(0, None), (1, 10)], workers=1) == [0, 1]
    assert begins([(5, 9)], workers=1, busy=[20]) == [9]
