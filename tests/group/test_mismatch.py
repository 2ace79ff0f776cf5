"""Collectives that cannot meet are refused before anything is sent; those that can never are."""

import re
from multiprocessing.connection import wait

import pytest

from tests.group import faults, mismatches
from tests.group.engines import Cluster, cluster


def free_all(ranks: Cluster, acting: int | None = None) -> list[dict[str, object]]:
    """Wait until a rank has raised, let all go as the rescue does, return how each ended.

    Only the first `acting` ranks do anything; others are done at once.
    """
    pipes = [engine.main for engine in ranks.engines[:acting]]
    assert wait(pipes, 30), "no rank raised"
    ranks.now(faults.abort)
    return ranks.results()


def assert_refused(ended: list[dict[str, object]]) -> str:
    """Check that at least one rank was told and no other one failed otherwise; return a text.

    The others were freed, or had nobody to wait for: the root of a broadcast.
    """
    told = [str(e["text"]) for e in ended if e["error"] == "MismatchError"]
    assert told, ended
    assert all(e["error"] in ("MismatchError", None) or e.get("released") for e in ended), ended
    return told[0]


def meet_badly_often(n: int, *kinds: str) -> str:
    """Let the ranks meet badly in each of these ways, one after the other; return the last text."""
    with cluster(n) as ranks:
        ranks.run(mismatches.watch)
        pids = [engine.process.pid for engine in ranks.engines]
        for turn, kind in enumerate(kinds, 1):
            ranks.post(mismatches.meet_badly, kind, turn)
            text = assert_refused(free_all(ranks))
            assert "rank 1 calls" in text, kind
            ranks.run(faults.reform, turn)
            assert ranks.run(faults.sum_of_ranks) == [n * (n - 1) / 2] * n
        assert [engine.process.pid for engine in ranks.engines] == pids
        assert all(engine.process.is_alive() for engine in ranks.engines)
        return text


def test_a_mismatch_is_an_exception_and_costs_no_process() -> None:
    meet_badly_often(2, *mismatches.KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mismatches.KINDS)
def test_a_mismatch_is_an_exception_every_time(kind: str) -> None:
    meet_badly_often(3, *[kind] * 20)


def test_parts_that_differ_are_an_exception_in_every_way_to_exchange_them() -> None:
    meet_badly_often(3, *mismatches.PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mismatches.PARTS)
def test_parts_that_differ_are_an_exception_every_time(kind: str) -> None:
    meet_badly_often(4, *[kind] * 20)


def test_the_text_names_both_sides_and_their_sizes() -> None:
    text = meet_badly_often(3, "size")
    assert text.startswith(
        "Collective #1 of the default group (ranks 0-2) differs between ranks.\nWhy: "
    )
    assert re.search(r"ranks? 0?.*calls? all_reduce of 1,000 float32 \(4.0 kB\)", text)
    assert "rank 1 calls all_reduce of 1,001 float32 (4.0 kB)" in text


def test_the_text_of_splits_names_who_sends_and_who_receives() -> None:
    text = meet_badly_often(3, "too few")
    assert text.startswith(
        "Collective #1 of the default group (ranks 0-2) differs between ranks.\nWhy: "
        "rank 1 calls all_to_all and sends rank 0 1 float32 (4 B)"
    )
    assert "; rank 0 calls all_to_all and receives 2 float32 (8 B) from rank 1" in text


@pytest.mark.parametrize("check", ["shared", "store"])
def test_parts_that_were_told_before_are_never_refused(check: str) -> None:
    with cluster(3, check=check) as ranks:
        ranks.run(mismatches.watch)
        assert ranks.run(mismatches.exchange_parts, 10) == ["all came"] * 3


def test_a_tap_that_only_counts_compares_too() -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch, "counts")
        ranks.post(mismatches.meet_badly, "type", 1)
        assert "500 float64 (4.0 kB)" in assert_refused(free_all(ranks))


def test_faults_leave_no_descriptors_of_old_memory() -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch)
        ranks.run(faults.sum_of_ranks)
        before = [usage["fds"] for usage in ranks.run(faults.usage)]
        for generation in range(1, 6):
            ranks.run(faults.sum_of_ranks)
            ranks.run(faults.reform, generation)
        assert [usage["fds"] for usage in ranks.run(faults.usage)] == before


@pytest.mark.parametrize("place", mismatches.PLACES)
def test_a_mismatch_inside_a_wrapped_model_is_refused(place: str) -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch)
        ranks.post(mismatches.meet_badly_in, place)
        assert_refused(free_all(ranks))
        ranks.run(faults.reform, 1)
        assert ranks.run(mismatches.mix, 2)
        ranks.run(faults.reform, 2)
        assert ranks.run(faults.sum_of_ranks) == [1.0, 1.0]


@pytest.mark.parametrize("place", ["gradients of other parameters", "other parameters"])
def test_gradients_or_weights_of_different_parameters_are_not_put_together(place: str) -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch)
        ranks.post(mismatches.meet_badly_in, place)
        text = assert_refused(free_all(ranks))
    assert re.search(r"for expert\.[01]\.weight, expert\.[01]\.bias", text)
    assert "for other parameters" in text
    assert "run the same parts of the model, and multiply by 0" in text


def test_a_rank_in_evaluation_is_told_that_the_others_train() -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch)
        ranks.post(mismatches.meet_badly_in, "a mode")
        text = assert_refused(free_all(ranks))
    assert re.search(r"rank 0 calls broadcast .* for buffers after a forward in training", text)
    assert "rank 1 calls all_reduce" in text
    assert "in one mode, model.train() or model.eval()" in text


def test_collectives_that_meet_are_never_refused() -> None:
    with cluster(3) as ranks:
        counts = ranks.run(mismatches.mix, 40)
        assert min(counts) > 1000
        ranks.run(faults.reform, 1)
        ranks.run(mismatches.mix, 5)


@pytest.mark.slow
def test_ten_thousand_collectives_that_meet_are_never_refused() -> None:
    with cluster(4) as ranks:
        assert min(ranks.run(mismatches.mix, 300)) > 10_000


def test_what_the_backend_refuses_on_all_ranks_is_no_mismatch_afterwards() -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch)
        for _ in range(20):
            assert ranks.run(mismatches.refused_arguments) == ["fine"] * 2


def test_messages_are_counted_by_peer_and_not_among_the_collectives() -> None:
    with cluster(3) as ranks:
        ranks.run(mismatches.watch)
        (c0, s0, r0), (c1, s1, r1), (c2, s2, r2) = ranks.run(mismatches.messages)
        assert c0 == c1 == c2 == {"0": 1}
        assert (s0, r0) == ({"0/1": 2}, {})
        assert (s1, r1) == ({"0/2": 2}, {"0/0": 2})
        assert (s2, r2) == ({}, {"0/1": 2})


def test_a_forked_worker_announces_nothing() -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch)
        assert ranks.run(mismatches.make_worker_write) == [[[0], [1]]] * 2
        assert ranks.run(mismatches.messages)[0][0] == {"0": 2}


def test_a_rank_that_was_replaced_is_compared_too_and_nothing_is_left_behind() -> None:
    with cluster(2) as ranks:
        ranks.run(mismatches.watch)
        ranks.run(faults.sum_of_ranks)
        ranks.engines[1].kill()
        ranks.engines[0].now(faults.abort)
        ranks.post_join(ranks.replace(1), 1)
        ranks.engines[0].post(faults.reform_in, 1, 30.0)
        ranks.results()
        ranks.run(mismatches.watch)
        assert ranks.run(faults.sum_of_ranks) == [1.0, 1.0]
        ranks.post(mismatches.meet_badly, "size", 1)
        assert_refused(free_all(ranks))
        assert ranks.run(mismatches.shared_files) == [[], []]


# Messages


def send_badly_often(*kinds: str, check: str = "shared", n: int = 2) -> None:
    """Let the first two ranks send badly in each of these ways, one after the other."""
    with cluster(n, check=check) as ranks:
        ranks.run(mismatches.watch)
        for turn, kind in enumerate(kinds, 1):
            ranks.post(mismatches.send_badly, kind, turn)
            text = assert_refused(free_all(ranks, acting=2))
            between = "from rank 0 to rank 1 of the default group differs between its two ends"
            assert between in text, kind
            ranks.run(faults.reform, turn)
            assert ranks.run(mismatches.exchange, 2) == ["all came"] * n
        assert all(engine.process.is_alive() for engine in ranks.engines)


def test_a_message_whose_ends_differ_is_an_exception_and_costs_no_process() -> None:
    send_badly_often(*mismatches.MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mismatches.MESSAGES)
def test_a_message_whose_ends_differ_is_an_exception_every_time(kind: str) -> None:
    send_badly_often(*[kind] * 20, n=3)


@pytest.mark.parametrize("way", ["counts", "group"])
@pytest.mark.parametrize("check", ["shared", "store"])
def test_ranks_that_have_not_all_used_a_group_meet_after_it_began_anew(
    way: str, check: str
) -> None:
    with cluster(3, check=check) as ranks:
        ranks.run(mismatches.watch)
        ranks.run(mismatches.send_to_last)
        ranks.run(mismatches.begin_anew, way)
        ranks.post(mismatches.send_badly, "smaller", 1)
        assert_refused(free_all(ranks, acting=2))


def test_messages_that_meet_are_never_refused() -> None:
    with cluster(3) as ranks:
        ranks.run(mismatches.watch, "counts")
        assert ranks.run(mismatches.exchange, 30) == ["all came"] * 3


def test_through_the_store_a_message_whose_ends_differ_is_an_exception() -> None:
    send_badly_often("larger", "asynchronous", check="store")


# Through the store


@pytest.mark.parametrize("kind", ["size", "kind", "order", "asynchronous", "too many"])
def test_through_the_store_every_rank_is_told_of_a_mismatch(kind: str) -> None:
    with cluster(3, check="store") as ranks:
        ranks.run(mismatches.watch)
        ended = ranks.run(mismatches.meet_badly, kind, 1)
        assert len({str(e["text"]) for e in ended}) == 1
        assert "rank 1 calls" in ended[0]["text"]
        assert ranks.run(faults.sum_of_ranks) == [3.0] * 3


def test_through_the_store_a_rank_that_waits_says_in_what_and_is_freed() -> None:
    with cluster(2, check="store") as ranks:
        ranks.run(mismatches.watch)
        ranks.engines[0].post(mismatches.wait_alone)
        while (said := ranks.engines[0].now(mismatches.state))["waiting"] is None:
            pass
        assert said["doing"] == "waiting"
        assert (said["waiting"]["kind"], said["waiting"]["seq"]) == ("all_reduce", 1)
        ranks.now(faults.abort)
        assert ranks.engines[0].result()["released"]
        ranks.run(faults.reform, 1)
        assert ranks.run(faults.sum_of_ranks) == [1.0] * 2


def test_through_the_store_all_that_can_meet_does_and_nothing_grows() -> None:
    with cluster(3, check="store") as ranks:
        ranks.run(mismatches.mix, 3)
        # The first rank to count is before all that peers announce next.
        before = min(ranks.run(mismatches.count_keys, 2))
        assert min(ranks.run(mismatches.count_keys, 50)) == before
