"""What a rank's text looks like once control characters have been obeyed."""

import io

from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from nbdist.client.output.merge import OutputLine, Shown
from nbdist.client.output.slots import Display
from nbdist.client.output.terminal import MAX_DISPLAYS, RankOutput, Screen


def seen(*pieces: str) -> list[str]:
    screen = Screen()
    for piece in pieces:
        screen.feed(piece)
    return screen.lines()


def test_lines_blank_ones_and_indentation_stay_as_they_were_printed() -> None:
    assert seen("a\n\n  b\n") == ["a", "", "  b"]


def test_an_unfinished_line_is_shown_and_then_continued() -> None:
    assert seen("loss: ") == ["loss: "]
    assert seen("loss: ", "0.5\n") == ["loss: 0.5"]


def test_a_carriage_return_overwrites_the_line() -> None:
    assert seen("10%\r20%\r30%") == ["30%"]
    assert seen("long line\rshort") == ["shortline"]


def test_a_windows_line_break_is_one_line_break() -> None:
    assert seen("a\r\nb\r", "\n") == ["a", "b"]


def test_a_backspace_goes_back_by_one() -> None:
    assert seen("ab\bc") == ["ac"]


def test_a_real_progress_bar_leaves_one_line() -> None:
    text = io.StringIO()
    for _ in tqdm(range(50), file=text, mininterval=0, ncols=60):
        pass
    (line,) = seen(text.getvalue())
    assert "50/50" in line


def test_nested_progress_bars_leave_a_line_each() -> None:
    text = io.StringIO()
    for _ in tqdm(range(3), file=text, mininterval=0, ncols=60, position=0):
        for _ in tqdm(range(20), file=text, mininterval=0, ncols=60, position=1, leave=False):
            pass
    shown = [line for line in seen(text.getvalue()) if line.strip()]
    assert len(shown) == 1
    assert "3/3" in shown[0]


def test_many_lines_keep_their_head_and_tail_and_say_what_is_missing() -> None:
    screen = Screen(head=10, tail=10)
    for i in range(12_040):
        screen.feed(f"{i}\n")
    shown = screen.lines()
    assert shown[:2] == ["0", "1"]
    assert shown[-1] == "12039"
    missing = [line for line in shown if line.startswith("…")]
    assert missing == ["… 12,001 lines not shown"]
    assert len(shown) - 1 + 12_001 == 12_040


@given(st.lists(st.text(alphabet="ab \r\n\b\x1b[A", max_size=8), max_size=20))
def test_how_a_text_was_cut_into_lines_of_messages_changes_nothing(lines: list[str]) -> None:
    ended = [line + "\n" for line in lines]
    assert seen(*ended) == seen("".join(ended))


@given(st.lists(st.text(alphabet="abc ", max_size=5), max_size=50))
def test_plain_lines_come_back_as_they_went_in(lines: list[str]) -> None:
    assert seen(*(f"{line}\n" for line in lines)) == lines


def display(text: str) -> Display:
    return Display({"image/png": text, "text/plain": "<Figure>"})


def test_text_and_displays_stay_in_the_order_in_which_they_came() -> None:
    rank = RankOutput()
    rank.write("before\n")
    rank.show(display("x"))
    rank.write("after\n")
    assert rank.items() == [OutputLine("before"), Shown(display("x")), OutputLine("after")]
    assert rank.text() == "before\nafter"


def test_a_window_replaces_the_one_with_its_number_and_says_what_is_missing() -> None:
    rank = RankOutput()
    rank.receive({"parts": [["stdout", "head\n"]]})
    rank.receive({"parts": [["stdout", "rt\nold\n"]], "window": 0, "cut_bytes": 1000})
    rank.receive({"parts": [["stdout", "art\nnew\n"]], "window": 0, "cut_bytes": 19_000_000})
    assert rank.text() == "head\n… 19 MB not shown\nnew"


def test_a_window_from_which_nothing_is_missing_reads_as_ordinary_text() -> None:
    rank = RankOutput()
    rank.receive({"parts": [["stdout", "head\n"]]})
    rank.receive({"parts": [["stderr", "\r 9%\r10%"]], "window": 0, "cut_bytes": 0})
    assert rank.text() == "head\n10%"


def test_clear_output_forgets_what_came_before_when_something_follows() -> None:
    rank = RankOutput()
    rank.show(display("old"))
    rank.clear(wait=True)
    assert rank.items() == [Shown(display("old"))]
    rank.show(display("new"))
    assert rank.items() == [Shown(display("new"))]


def test_an_updated_display_stays_in_its_place() -> None:
    rank = RankOutput()
    rank.show(display("old"), display_id="id")
    rank.write("after\n")
    rank.update("id", display("new"))
    rank.update("unknown", display("never"))
    assert rank.items() == [Shown(display("new")), OutputLine("after")]


def test_a_loop_that_displays_without_end_stays_bounded_and_keeps_the_newest() -> None:
    rank = RankOutput()
    for i in range(1000):
        rank.show(display(str(i)))
    items = rank.items()
    assert len(items) == MAX_DISPLAYS
    assert items[-1] == Shown(display("999"))
