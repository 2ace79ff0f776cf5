"""What ranks would call, put together: it ends, or who waits for whom is told."""

from typing import Any

from nbdist.study.dry import (
    Call,
    DryRun,
    Trace,
    before_cuts,
    cut_apart,
    judge,
    over_memory,
    unknown_ends,
)

WORLD = (0, 1, 2)


def reduce(line: int, count: int = 4, **more: Any) -> Call:
    return Call("all_reduce", f"line {line}", WORLD, "0", count, "float32", "SUM", **more)


def message(kind: str, line: int, peer: int, **more: Any) -> Call:
    return Call(kind, f"line {line}", WORLD, "0", 2, "float32", peer=peer, **more)


def turns(numbers: list[int], of: int, body: Call) -> list[Call]:
    marked = [
        one
        for number in numbers
        for one in (Call("turn", "line 3", loop=("line 3", 1), turn=number, of=of), body)
    ]
    return [*marked, Call("turn", "line 3", loop=("line 3", 1), turn=0, of=of)]


def texts(*calls: list[Call]) -> list[str]:
    return [one.text for one in judge({n: Trace(tuple(own)) for n, own in enumerate(calls)})]


def test_equal_calls_on_all_ranks_come_to_their_end() -> None:
    own = [reduce(2), reduce(3, 8)]
    assert texts(own, own, own) == []


def test_a_rank_alone_in_a_collective_is_told_with_its_line() -> None:
    assert texts([reduce(2)], [], []) == [
        "rank 0 alone calls all_reduce of 4 float32 at line 2; ranks 1-2 end the cell without it"
    ]


def test_calls_of_one_number_with_other_sizes_are_told_with_both() -> None:
    (text,) = texts([reduce(2)], [reduce(2)], [reduce(5, 8)])
    assert text == (
        "ranks 0-1 call all_reduce of 4 float32 at line 2; "
        "rank 2 calls all_reduce of 8 float32 at line 5"
    )


def test_sends_that_wait_for_each_other_go_no_further() -> None:
    (text,) = texts(
        [message("send", 2, 1), message("recv", 3, 1)],
        [message("send", 2, 0), message("recv", 3, 0)],
        [],
    )
    assert "rank 0 waits in send to rank 1" in text
    assert text.endswith("none can go on")


def test_sends_that_nobody_waits_for_let_both_sides_receive() -> None:
    one = [message("send", 2, 1, waits=False), message("recv", 3, 1)]
    other = [message("send", 2, 0, waits=False), message("recv", 3, 0)]
    assert texts(one, other, []) == []


def test_a_receive_from_any_rank_takes_what_comes_first() -> None:
    assert texts([message("recv", 2, -1)], [], [message("send", 4, 0)]) == []


def test_a_send_that_no_rank_receives_is_told_also_where_none_waits_for_it() -> None:
    (text,) = texts([message("send", 2, 1, waits=False)], [], [])
    assert text.endswith("rank 1 ends the cell without the recv that it waits for")


def test_loops_of_unequal_length_are_told_by_their_batches() -> None:
    short = turns([1, 2, 1250], 1250, reduce(4))
    (found,) = judge(
        {
            0: Trace(tuple(turns([1, 2, 1251], 1251, reduce(4)))),
            1: Trace(tuple(short)),
            2: Trace(tuple(short)),
        }
    )
    assert found.kind == "uneven"
    assert found.text.startswith(
        "ranks 1-2 stop at batch 1,250 of the loop at line 3, rank 0 at 1,251; rank 0 alone calls"
    )


def test_unequal_loops_without_collectives_are_no_mistake() -> None:
    empty = Call("turn", "line 3", loop=("line 3", 1), turn=1, of=1)
    assert texts([empty, reduce(5)], [reduce(5)], [reduce(5)]) == []


def test_calls_of_batches_that_were_left_out_count() -> None:
    assert Trace(tuple(turns([1, 2, 1250], 1250, reduce(4)))).collectives == 1250


def in_turns(*bodies: list[Call], of: int) -> Trace:
    """Return what a rank does that makes these in the first turns and the last."""
    marked: list[Call] = []
    for number, body in zip([*range(1, len(bodies)), of], bodies, strict=True):
        marked += [Call("turn", "line 3", loop=("line 3", 1), turn=number, of=of), *body]
    return Trace((*marked, Call("turn", "line 3", loop=("line 3", 1), turn=0, of=of)))


def test_a_loop_is_run_whole_where_ranks_take_turns() -> None:
    one = [reduce(4)]
    apart = {
        0: in_turns(one, [], [], of=9),
        1: in_turns([], one, [], of=9),
        2: in_turns([], [], [], of=9),
    }
    assert cut_apart(apart) == {"line 3"}
    assert judge({rank: before_cuts(own, {"line 3"}) for rank, own in apart.items()}) == []


def test_a_loop_is_cut_where_all_ranks_make_as_many_calls_in_a_turn() -> None:
    own = in_turns([], [], [reduce(4)], of=9)
    longer = in_turns([], [], [reduce(4)], of=12)
    assert cut_apart({0: own, 1: own, 2: longer}) == set()


def test_a_loop_is_run_whole_where_messages_are_sent_in_it_and_received_elsewhere() -> None:
    send, receive = message("send", 4, 0), message("recv", 9, -1)
    sending = in_turns([send], [send], [send], of=9)
    assert cut_apart({0: Trace((receive,) * 9), 1: sending}) == {"line 3"}
    assert cut_apart({0: in_turns(*[[message("recv", 4, 1)]] * 3, of=9), 1: sending}) == set()


def test_a_loop_that_is_not_cut_says_all() -> None:
    traces = {0: in_turns([reduce(4)], [], of=2), 1: in_turns([], [reduce(4)], of=2)}
    assert cut_apart(traces) == set()


def test_what_is_wrong_before_turns_are_left_out_is_told() -> None:
    alone = in_turns([reduce(4)], [], [], of=900)
    traces = {0: alone, 1: in_turns([], [], [], of=900), 2: Trace((reduce(9, 8),))}
    told = judge({rank: before_cuts(one, {"line 3"}) for rank, one in traces.items()})
    assert [one.kind for one in told] == ["mismatch"]


def test_a_call_of_one_rank_that_meets_a_later_one_is_told_with_its_own_line() -> None:
    all_do = [reduce(7), reduce(7), Call("barrier", "line 8", WORLD, "0")]
    (found,) = judge({0: Trace((reduce(5), *all_do)), 1: Trace((*all_do,)), 2: Trace((*all_do,))})
    assert found.places[0] == "line 5"
    assert found.text.startswith(
        "rank 0 calls all_reduce of 4 float32 at line 5, and others do not;"
    )


def test_a_root_at_a_line_of_its_own_is_not_taken_for_a_mistake() -> None:
    roots, peers = Call("scatter", "line 2", WORLD, "0"), Call("scatter", "line 4", WORLD, "0")
    alone = reduce(9)
    assert texts([roots, reduce(6), alone], [peers, reduce(6)], [peers, reduce(6)]) == [
        "rank 0 alone calls all_reduce of 4 float32 at line 9; ranks 1-2 end the cell without it"
    ]


def test_nothing_is_said_of_ranks_that_wait_for_one_whose_end_is_not_known() -> None:
    traces = {
        0: Trace((reduce(2),)),
        1: Trace((reduce(2),)),
        2: Trace((), "unknown", "line 2", "a number is asked for"),
    }
    assert judge(traces) == []
    assert unknown_ends(traces) == ["Not known of rank 2 from line 2 on: a number is asked for."]


def test_an_error_is_told_instead_of_the_waits_that_follow_from_it() -> None:
    traces = {n: Trace((reduce(2),)) for n in (0, 1)}
    traces[2] = Trace((), "error", "line 1", "ValueError: no")
    assert [one.text for one in judge(traces)] == ["rank 2 raises ValueError: no at line 1"]


def test_memory_is_told_where_it_ends() -> None:
    traces = {0: Trace(peak=90_000_000_000, over="line 7"), 1: Trace(peak=5)}
    (found,) = over_memory(traces, 80_000_000_000)
    assert found.places == ("line 7",)
    assert found.text.startswith("out of memory at 2 ranks: 90 GB a rank where it has 80 GB")
    assert over_memory(traces, 0) == []


def test_a_sound_cell_is_told_in_one_sentence_and_that_it_is_predicted() -> None:
    said = str(DryRun(3, collectives=dict.fromkeys(WORLD, 12), peak=3_100_000_000))
    assert said.splitlines() == [
        "3 ranks run it to its end; each makes 12 collectives; tensors take at most 3.1 GB a rank.",
        "Predicted for 3 ranks, on tensors with shapes and no numbers.",
    ]
