"""What Tab offers after magics and in `%%distributed` cells, and the hint of a NameError."""

import pytest

from nbdist.client.notebook.completion import (
    Values,
    complete,
    fitting,
    help_at,
    hint,
    layout_at,
    typed_word,
    word_of_ranks,
)

VALUES = Values(
    runs=lambda: ["careful", "my run"],
    ranks=lambda: ["all", "0", "1"],
    of_ranks=lambda: ["model", "loss", "_private"],
    of_notebook=lambda: ["data", "_"],
    metrics=lambda: ["val_loss", "val/acc"],
    files=lambda beginning: ["train.py", "two words.py"],
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%dist runs ", ["careful", "'my run'"]),
        ("%dist runs careful ca", ["careful"]),
        ("%%distributed --run c", ["careful"]),
        ("%%distributed --timeout ", []),
        ("%dist restart -r ", ["all", "0", "1"]),
        ("%%distributed --ranks a", ["all"]),
        ("%dist pull mo", ["model"]),
        ("%dist pull model ", ["model", "loss"]),
        ("%dist pull -r 1 lo", ["loss"]),
        ("%dist push ", ["data"]),
        ("%dist verify m", ["model"]),
        ("%dist checks same", ["same-samples"]),
        ("%%distributed --ignore step", ["step-past-scaler"]),
        ("%%distributed --ignore step-past-scaler,same", ["step-past-scaler,same-samples"]),
        ("%dist probe --on 8 h", ["h100", "h200"]),
        ("%dist probe --on 8 h100, 2 hosts ib4", ["ib400"]),
        ("%dist start ", []),
        ("%dist scaling --on ib4", ["ib400"]),
        ("%dist start --device ", ["cpu", "cuda"]),
        ("%dist start -n 2 --backend n", ["nccl"]),
        ("%dist export ", ["train.py", "'two words.py'"]),
        ("%dist export --force tr", ["train.py"]),
        ("%dist export train.py --cells ", []),
        ("%dist run train.py --data tr", ["train.py"]),
        ("%dist board c", ["collectives", "careful"]),
        ("%dist board --interactive c", ["collectives", "careful"]),
        ("%dist expect final val", ["val_loss"]),
        ("%dist board careful st", ["step"]),
        ("%dist board step ", []),
        ("%dist board careful step ", []),
        ("%dist board --run ", ["careful", "'my run'"]),
        ("%dist board --run careful lo", ["loss"]),
        ("%dist runs my", ["'my run'"]),
        ("%dist board my", ["'my run'"]),
        ("%dist board 'my r", ["'my run'"]),
        ('%dist board "my r', ['"my run"']),
        ("%dist board 'my run' st", ["step"]),
        ("%dist runs 'my run' ca", ["careful"]),
        ("%%distributed -p it's --run ca", ["careful"]),
    ],
)
def test_values_of_magics_complete(text: str, expected: list[str]) -> None:
    assert complete(text, len(text), VALUES) == expected


def test_a_quote_that_the_editor_has_closed_is_not_closed_twice() -> None:
    line = "%dist board 'my '"
    assert complete(line, len(line) - 1, VALUES) == ["'my run"]
    assert typed_word(line, len(line) - 1) == "'my "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mod", ("", "mod")),
        ("y = model.par", ("model", "par")),
        ("f(torch.optim.", ("torch.optim", "")),
        ("f(x).par", None),
        ("layers[0].wei", None),
        ("'a'.jo", None),
        ("x = 1.", None),
        ("x = ", None),
    ],
)
def test_the_word_before_the_cursor(line: str, expected: tuple[str, str] | None) -> None:
    text = f"%%distributed -r 0\nx = 1\n{line}"
    assert word_of_ranks(text, len(text)) == expected
    assert word_of_ranks(line, len(line)) is None  # a plain cell


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('nbdist.parallelize(model, "', ""),
        ("layout = nbdist.parallelize(Net(8, 2), 'ze", "ze"),
        ('nbdist.parallelize(model, layout="dp=2 t', "t"),
        ('nbdist.parallelize(model, "ddp"', None),
        ('nbdist.parallelize(model)\nprint(x, "', None),
    ],
)
def test_the_word_of_a_layout_before_the_cursor(line: str, expected: str | None) -> None:
    text = f"%%distributed\n{line}"
    assert layout_at(text, len(text)) == expected
    assert layout_at(line, len(line)) is None  # a plain cell


def test_private_names_are_offered_when_asked_for() -> None:
    members = {"par": "function", "_p": "instance", "other": "class"}
    assert list(fitting(members, "")) == ["other", "par"]
    assert list(fitting(members, "_")) == ["_p"]
    assert fitting(members, "p") == {"par": "function"}


def test_a_magics_line_has_the_magics_help() -> None:
    assert "usage: %dist start" in help_at("%dist start -n 2", 11)
    assert "usage: %%distributed" in help_at("%%distributed --run x\ny", 18)
    assert "usage: %dist " in help_at("%dist", 5)
    assert help_at("%%distributed\ny", 15) == ""


def test_only_a_name_of_the_ranks_has_a_hint() -> None:
    said = hint("model", ["model"])
    assert said is not None
    assert said.startswith("`model` is a name of the ranks")
    assert hint("modle", ["model"]) is None
