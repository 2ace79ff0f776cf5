"""What stays of a live board where its widget does not."""

from nbdist.client.board.live.kept import below, kept
from nbdist.client.output.slots import Display


def test_it_says_from_when_it_is_and_what_is_known() -> None:
    display = kept(["73 [00:12]", "Step 73, loss <1."], "b1", "14:03:20")

    first, *said = display.data["text/plain"].splitlines()
    assert "14:03:20" in first
    assert "%dist board" in first
    assert said == ["73 [00:12]", "Step 73, loss <1."]
    assert "Step 73, loss &lt;1." in display.data["text/html"]


def test_what_it_hides_and_what_hides_it_is_one_board_and_no_other_output() -> None:
    (style,) = [
        part.split("</style>")[0]
        for part in below(Display({"text/html": "x", "text/plain": "x"}), "b1")
        .data["text/html"]
        .split("<style>")[1:]
    ]

    rules = [rule for rule in style.split("}") if rule.strip()]
    assert len(rules) == 2
    assert all(".nbdist-kept-b1" in rule for rule in rules)
