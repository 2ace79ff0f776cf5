"""What a cell leaves when several ranks spoke."""

import time

from hypothesis import given
from hypothesis import strategies as st

from nbdist.client.output.merge import Item, OutputLine, Shown, align, arrange, render, text_of
from nbdist.client.output.slots import Display


def lines(*texts: str) -> list[Item]:
    return [OutputLine(text) for text in texts]


def value(text: str) -> Item:
    return Shown(Display({"text/plain": text}), value=True)


def figure(pixels: str) -> Item:
    return Shown(Display({"image/png": pixels, "text/plain": "<Figure>"}))


def text(said: dict[int, list[Item]], **options: object) -> str:
    (only,) = render(said, **options)  # type: ignore[arg-type]
    assert set(only.data) == {"text/plain"}
    return str(only.data["text/plain"])


def test_what_all_ranks_said_alike_appears_once_around_what_differs() -> None:
    said = {rank: lines("hello", f"I am {rank}", "bye") for rank in range(3)}
    assert text(said).split("\n") == [
        "ranks 0-2 │ hello",
        "rank 0    │ I am 0",
        "rank 1    │ I am 1",
        "rank 2    │ I am 2",
        "ranks 0-2 │ bye",
    ]


def test_a_single_rank_is_labelled_too() -> None:
    assert text({2: lines("a", "b")}) == "rank 2 │ a\n       │ b"


def test_a_rank_that_failed_is_what_one_sees_first() -> None:
    said = {0: lines("start", "fine"), 1: lines("start", "nan!"), 2: lines("start", "fine")}
    assert text(said, failed={1}).split("\n") == [
        "ranks 0-2  │ start",
        "rank 1     │ nan!",
        "ranks 0, 2 │ fine",
    ]


def test_a_blank_line_in_common_does_not_tear_two_texts_apart() -> None:
    said = {0: lines("a", "", "b"), 1: lines("c", "", "d")}
    assert text(said).split("\n") == [
        "rank 0 │ a",
        "       │",
        "       │ b",
        "rank 1 │ c",
        "       │",
        "       │ d",
    ]


def test_equal_values_collapse_and_different_ones_do_not() -> None:
    assert text({0: [value("42")], 1: [value("42")]}) == "ranks 0-1 │ Out: 42"
    assert text({0: [value("0")], 1: [value("1")]}) == "rank 0 │ Out: 0\nrank 1 │ Out: 1"


def test_a_value_is_not_mistaken_for_the_same_text_printed() -> None:
    assert text({0: lines("42"), 1: [value("42")]}) == "rank 0 │ 42\nrank 1 │ Out: 42"


def test_a_value_of_several_lines_keeps_its_columns() -> None:
    assert text({0: [value("[[1]\n [2]]")]}) == "rank 0 │ Out: [[1]\n       │       [2]]"


def test_figures_that_differ_are_shown_for_the_lowest_rank_and_named_for_the_others() -> None:
    said = {rank: [*lines("before"), figure(f"pixels {rank}"), *lines("after")] for rank in (0, 1)}
    before, shown, after = render(said, show="last[{rank}].show()")
    assert before.data["text/plain"] == "ranks 0-1 │ before\nrank 0    │ figure:"
    assert shown.data["image/png"] == "pixels 0"
    assert str(after.data["text/plain"]).split("\n") == [
        "rank 1    │ also displayed a figure; to see it: last[1].show()",
        "ranks 0-1 │ after",
    ]


def test_figures_that_are_equal_are_shown_once_without_a_note() -> None:
    label, shown = render({0: [figure("x")], 1: [figure("x")]})
    assert label.data["text/plain"] == "ranks 0-1 │ figure:"
    assert shown.data["image/png"] == "x"


def test_a_colour_left_on_does_not_run_into_the_next_label() -> None:
    assert text({0: lines("\x1b[31mred", "plain")}).split("\n")[0].endswith("red\x1b[0m")


def test_nothing_said_leaves_nothing() -> None:
    assert render({0: [], 1: []}) == []


def test_a_long_text_is_cut_in_the_middle_and_says_where_the_whole_is() -> None:
    said = {0: lines(*(f"line {i}" for i in range(5000)))}
    shown = text(said, whole="cell-3-rank-0.txt").split("\n")
    assert len(shown) == 200
    assert shown[0].endswith("line 0")
    assert shown[-1].endswith("line 4999")
    assert [s for s in shown if "4,801 lines not shown; the whole is kept: cell-3-rank-0.txt" in s]


def test_a_rank_that_floods_does_not_push_out_the_others() -> None:
    said = {0: lines(*(f"flood {i}" for i in range(5000))), 1: lines("one", "two")}
    shown = text(said)
    assert "rank 1 │ one" in shown
    assert "       │ two" in shown


def test_many_blocks_and_long_lines_stay_bounded() -> None:
    said = {
        rank: lines(*(f"{'same' if i % 2 else rank} {i} " + "x" * 5000 for i in range(500)))
        for rank in range(8)
    }
    (only,) = render(said)
    assert len(str(only.data["text/plain"])) < 100_000


def seconds_to_merge(count: int) -> float:
    """Return the least CPU time of three merges of eight ranks' lines, of which many repeat."""
    said = {
        rank: lines(*("ab"[(i * i * (rank + 1)) % 7 % 2] for i in range(count)))
        for rank in range(8)
    }

    def merge() -> float:
        began = time.thread_time()
        render(said)
        return time.thread_time() - began

    return min(merge() for _ in range(3))


def test_the_time_to_merge_texts_with_many_repeats_does_not_grow_with_their_square() -> None:
    assert seconds_to_merge(4000) < 4 * 8 * seconds_to_merge(500)


texts = st.lists(st.sampled_from(["a", "b", "c", "", "--", "step 1"]), max_size=12)
everyone = st.dictionaries(st.integers(0, 5), texts.map(lambda t: lines(*t)), min_size=1)


@given(everyone, st.sets(st.integers(0, 5)))
def test_read_for_one_rank_the_blocks_are_what_it_said_in_order(
    said: dict[int, list[Item]], failed: set[int]
) -> None:
    blocks = arrange(said, failed)
    for rank, items in said.items():
        assert [i for block in blocks if rank in block.ranks for i in block.items] == items


@given(everyone)
def test_the_order_in_which_ranks_arrived_changes_nothing(said: dict[int, list[Item]]) -> None:
    backwards = dict(reversed(said.items()))
    assert render(backwards) == render(said)


@given(texts, st.integers(1, 6))
def test_ranks_that_said_the_same_make_one_block(said: list[str], count: int) -> None:
    blocks = arrange({rank: lines(*said) for rank in range(count)})
    assert len(blocks) == (1 if said else 0)


@given(everyone)
def test_rows_hold_every_item_once(said: dict[int, list[Item]]) -> None:
    rows = align(said)
    assert sum(len(row.items) for row in rows) == sum(len(items) for items in said.values())


def test_displayed_plain_text_reads_as_a_line() -> None:
    assert text_of(Shown(Display({"text/plain": "hello"}))) == ["hello"]
