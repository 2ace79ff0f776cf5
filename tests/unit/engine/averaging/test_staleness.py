import random

from nbdist.engine.averaging.staleness import Staleness, Update, is_feasible, may_apply


def test_an_update_is_as_stale_as_versions_came_between() -> None:
    assert Update(worker=1, read=4, written=5).staleness == 0
    assert Update(worker=1, read=4, written=9).staleness == 4


def test_who_would_make_anothers_update_too_stale_has_to_wait() -> None:
    assert may_apply(0, 5, {0: 5, 1: 4}, bound=2)
    assert not may_apply(0, 6, {0: 6, 1: 4}, bound=2)
    assert may_apply(1, 6, {0: 6, 1: 4}, bound=2)
    assert may_apply(0, 600, {0: 600, 1: 4}, bound=None)


def test_reads_that_are_out_need_one_version_each() -> None:
    assert is_feasible(3, [2, 2, 2], bound=3)
    assert not is_feasible(4, [2, 2, 2], bound=3)


def test_any_order_of_workers_keeps_the_bound_and_somebody_may_always_go_on() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        n = chance.randint(1, 6)
        bound = n - 1 + chance.randint(0, 3)
        version, reads, waiting = 0, dict.fromkeys(range(n), 0), set[int]()
        for _ in range(300):
            if len(waiting) < n:
                waiting.add(chance.choice([w for w in range(n) if w not in waiting]))
            ready = [w for w in waiting if may_apply(w, version, reads, bound)]
            assert ready or len(waiting) < n  # else all would wait for each other
            if ready:
                worker = chance.choice(ready)
                assert version - reads[worker] <= bound
                version += 1
                waiting.discard(worker)
                reads[worker] = version


def test_staleness_reads_as_a_sentence() -> None:
    assert str(Staleness(20, 19, 2)) == "mean 0.95, max 2 over 20 updates"
    assert str(Staleness(2, 0, 0, 0, 3)) == "mean 0.00, max 0 over 2 updates, 3 dropped"
    assert Staleness().mean == 0
