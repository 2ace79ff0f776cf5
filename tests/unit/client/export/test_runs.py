"""Cells that ran more than once, and what they sent: a script as the notebook's last runs were."""

from dataclasses import dataclass, field

import pytest

from nbdist.client.export.modules import beside
from nbdist.client.export.notebook_cells import History, choose
from nbdist.client.export.resolve import resolve
from nbdist.client.export.script import Script, ScriptOptions, write
from nbdist.client.notebook.arguments import parse_dist, parse_distributed

NO_ID = ""


@dataclass
class Notebook:
    """A kernel's history, each run with the cell's id; `sends` are values or functions."""

    history: History = field(default_factory=History)
    count: int = 0

    def run(
        self, cell_id: str, source: str, *, failed: bool = False, attempts: int = 0, **sends: object
    ) -> None:
        self.count += 1
        for name, value in sends.items():
            self.history.note_push({name: value})
        for _ in range(attempts):
            self.history.note_failed_attempt()
        self.history.note_run(self.count, source, cell_id or None, has_failed=failed)

    def script(self) -> Script:
        found = resolve(self.history.cells(), None, parse_dist, parse_distributed)
        modules = beside(found.code, found.written, None)
        return write(found, ScriptOptions(2, "cpu"), "train.py", "", modules)

    def code(self) -> list[str]:
        found = resolve(self.history.cells(), None, parse_dist, parse_distributed)
        return [block.code for block in found.blocks if block.code]


def step(x: int) -> int:
    return x


STEP = "def step(x): return x + 1"
OTHER = "def step(x): return x + 100"
USE = "%%distributed\nprint(step(1))"
PUSH = "%dist push step"
PUSH_OUTER = "%dist push outer"


@pytest.mark.parametrize("id_of_other", ["a", "d"])
def test_a_function_that_is_pushed_again_is_the_one_of_then_in_each_place(id_of_other: str) -> None:
    notebook = Notebook()
    notebook.run("a", STEP)
    notebook.run("b", PUSH, step=step)
    notebook.run("c", USE)
    notebook.run(id_of_other, OTHER)
    notebook.run("b", PUSH, step=step)
    notebook.run("f", USE)
    assert notebook.code() == [STEP, "print(step(1))", OTHER, "print(step(1))"]


def test_a_value_that_is_pushed_again_is_the_one_of_then_in_each_place() -> None:
    notebook = Notebook()
    for value, user in ((0.1, "b"), (0.2, "c")):
        notebook.run("a", f"lr = {value}\n%dist push lr", lr=value)
        notebook.run(user, "%%distributed\nprint(lr)")
    assert notebook.code() == ["lr = 0.1", "print(lr)", "lr = 0.2", "print(lr)"]


def test_a_definition_that_was_not_pushed_again_changes_nothing() -> None:
    notebook = Notebook()
    notebook.run("a", STEP)
    notebook.run("b", PUSH, step=step)
    notebook.run("c", USE)
    notebook.run("a", OTHER)
    notebook.run("c", USE)
    assert notebook.code() == [STEP, "print(step(1))"]


def test_cells_that_all_ran_again_stand_once_as_they_ran_last() -> None:
    notebook = Notebook()
    for source, rate in ((STEP, 0.1), (OTHER, 0.2)):
        notebook.run("a", source)
        notebook.run("b", PUSH, step=step)
        notebook.run("c", f"lr = {rate}\n%dist push lr", lr=rate)
        notebook.run("d", "%%distributed\nprint(step(lr))")
    assert notebook.code() == [OTHER, "lr = 0.2", "print(step(lr))"]
    assert not notebook.script().doubts


def test_what_another_cell_sends_in_between_keeps_both_values() -> None:
    notebook = Notebook()
    for cell_id, rate in (("a", 0.1), ("b", 0.5), ("a", 0.1)):
        notebook.run(cell_id, f"lr = {rate}\n%dist push lr", lr=rate)
    notebook.run("c", "%%distributed\nprint(lr)")
    assert notebook.code() == ["lr = 0.1", "lr = 0.5", "lr = 0.1", "print(lr)"]


RATE = "%dist push lr"


@pytest.mark.parametrize("edited", [0.4, 0.1])
def test_a_name_that_two_cells_send_is_that_of_the_last_round_in_each_place(edited: float) -> None:
    notebook = Notebook()
    for rate in (0.1, edited, edited):
        notebook.run("z", "%%distributed\nimport torch")
        notebook.run("a", f"lr = {rate}")
        notebook.run("b", RATE, lr=rate)
        notebook.run("c", "%%distributed\nseed = torch.manual_seed(0)")
        notebook.run("d", "%%distributed\na = lr")
        notebook.run("e", "lr = lr / 2")
        notebook.run("f", RATE, lr=rate / 2)
        notebook.run("g", "%%distributed\nb = lr")
    sent = [f"lr = {edited}", f"lr = {edited / 2}"]
    seed = "seed = torch.manual_seed(0)"
    assert notebook.code() == ["import torch", sent[0], seed, "a = lr", sent[1], "b = lr"]
    assert not notebook.script().doubts


def test_a_round_that_ended_early_leaves_both_values_where_they_were_taken() -> None:
    notebook = Notebook()
    for rate, cells in ((0.1, "bdfg"), (0.4, "bd"), (0.8, "f")):
        for cell_id in cells:
            if cell_id in "bf":
                notebook.run(cell_id, RATE, lr=rate if cell_id == "b" else rate / 2)
            else:
                notebook.run(cell_id, f"%%distributed\n{cell_id} = lr")
    assert notebook.code() == ["lr = 0.1", "d = lr", "lr = 0.05", "g = lr", "lr = 0.4", "lr = 0.4"]
    assert notebook.script().doubts


def test_a_cell_that_sends_a_name_twice_sends_both_again() -> None:
    notebook = Notebook()
    for rate in (1, 2):
        notebook.history.note_push({"lr": rate})
        notebook.run("a", f"{RATE}\n{RATE}", lr=rate * 10)
        notebook.run("b", "%%distributed\nprint(lr)")
    assert notebook.code() == ["lr = 2", "lr = 20", "print(lr)"]


def test_cells_that_do_not_take_what_is_sent_again_do_not_keep_it_twice() -> None:
    notebook = Notebook()
    for rate in (0.1, 0.2):
        notebook.run("a", RATE, lr=rate)
        if rate == 0.1:
            notebook.run("b", "%%distributed\nseed = 1")
        notebook.run("c", "%%distributed\nprint(lr)")
    assert notebook.code() == ["lr = 0.2", "seed = 1", "print(lr)"]


def test_a_cell_that_stands_above_what_it_took_last_is_told() -> None:
    notebook = Notebook()
    notebook.run("x", "%%distributed\ndef train(): return lr")
    notebook.run("a", "lr = 0.1\n%dist push lr", lr=0.1)
    notebook.run("b", "%%distributed\nloss = train()")
    notebook.run("c", "%%distributed\nprint(loss)")
    notebook.run("a", "lr = 0.2\n%dist push lr", lr=0.2)
    notebook.run("b", "%%distributed\nloss = train()")
    (told,) = notebook.script().doubts
    assert told.startswith("Cell 6 ran last after cell 5 had set lr: it stands above cell 5")


def test_code_that_ranks_ran_again_by_other_means_stands_where_it_ran() -> None:
    notebook = Notebook()
    for cell_id, source in (
        ("a", "%dist run conf.py"),
        ("b", "%%distributed\nscale = 3"),
        ("a", "%dist run conf.py"),
        ("c", "%%distributed\nprint(scale)"),
    ):
        if cell_id == "a":
            notebook.history.note_code("scale = 1")
        notebook.run(cell_id, source)
    assert notebook.script().left_out[-1] == (
        4,
        "uses scale, which cell 3 would have given",
    )


def test_runs_of_a_cell_that_has_sent_are_one_cell_to_those_who_choose() -> None:
    notebook = Notebook()
    for rate in (0.1, 0.2):
        notebook.run("a", f"lr = {rate}\n%dist push lr", lr=rate)
        notebook.run(NO_ID, "%%distributed\nlr")
    assert choose(notebook.history.cells(), "1-4") == [2, 3, 4]


def test_cells_of_equal_text_are_two_where_no_id_says_otherwise() -> None:
    notebook = Notebook()
    for source in (STEP, OTHER):
        notebook.run(NO_ID, source)
        notebook.run(NO_ID, PUSH, step=step)
        notebook.run(NO_ID, USE)
    assert notebook.code() == [STEP, "print(step(1))", OTHER, "print(step(1))"]
    assert not notebook.script().repeated
    assert not notebook.script().doubts


def test_without_ids_a_cell_that_is_tried_again_failed_before_it_succeeded() -> None:
    notebook = Notebook()
    notebook.run(NO_ID, USE)
    notebook.run(NO_ID, USE, failed=True)
    notebook.run(NO_ID, STEP)
    notebook.run(NO_ID, USE)
    notebook.run(NO_ID, USE)
    assert [cell.number for cell in notebook.history.cells()] == [1, 3, 4, 5]
    (told,) = notebook.script().doubts
    assert told.startswith("Cell 4 failed before it succeeded")


def test_a_failure_after_the_last_success_is_none_before_it() -> None:
    notebook = Notebook()
    notebook.run("a", "%%distributed\na = 1")
    notebook.run("a", "%%distributed\na = 1", failed=True)
    assert not notebook.script().doubts
    notebook.run("a", "%%distributed\na = 1")
    assert len(notebook.script().doubts) == 1


def test_attempts_that_failed_within_a_cell_are_told() -> None:
    notebook = Notebook()
    notebook.run("a", "%%distributed --retry 2\na = 1", attempts=1)
    notebook.run("b", "%%distributed --retry 2\nb = 1")
    (told,) = notebook.script().doubts
    assert told.startswith("Cell 1 failed before it succeeded: what it had changed by then")


def test_a_cell_that_a_retry_ran_again_failed_before_it_succeeded() -> None:
    notebook = Notebook()
    notebook.run("a", "%%distributed\ncount += 1", failed=True)
    notebook.run("b", "%dist retry")
    (told,) = notebook.script().doubts
    assert told.startswith("Cell 2 failed before it succeeded")


def test_without_ids_a_cell_that_a_retry_ran_may_run_once_more() -> None:
    notebook = Notebook()
    notebook.run(NO_ID, "%%distributed\ncount += 1", failed=True)
    notebook.run(NO_ID, "%dist retry")
    notebook.run(NO_ID, "%%distributed\ncount += 1")
    assert notebook.code() == ["count += 1", "count += 1"]
    (told,) = notebook.script().doubts
    assert told.startswith("Cell 2 failed before it succeeded")


def test_what_a_cell_had_sent_before_it_failed_stands_in_its_place() -> None:
    notebook = Notebook()
    notebook.run("a", "%dist push lr\nfails", failed=True, lr=0.1)
    notebook.run("b", "%%distributed\nprint(lr)")
    notebook.run("a", "%dist push lr", lr=0.2)
    notebook.run("c", "%%distributed\nprint(lr)")
    assert notebook.code() == ["lr = 0.1", "print(lr)", "lr = 0.2", "print(lr)"]
    assert not notebook.script().doubts


def test_a_number_of_too_many_digits_has_no_literal_and_breaks_nothing() -> None:
    notebook = Notebook()
    notebook.run("a", "%dist push big lr", big=[10**5000], lr=0.1)
    notebook.run("b", "%%distributed\nprint(lr)")
    script = notebook.script()
    assert "\nlr = 0.1\n" in script.text
    ((number, reason),) = script.left_out
    assert number == 1
    assert reason.startswith("pushes big: it holds a number of more digits than Python writes")


HELPER = "def helper(x): return x * 2"
OTHER_HELPER = "def helper(x): return x * 5"
OUTER = "def outer(x): return helper(x) + 1"


def in_order(*sources: str) -> Notebook:
    notebook = Notebook()
    for number, source in enumerate(sources):
        if source.startswith("%dist"):
            notebook.history.note_push(dict.fromkeys(source.split()[2:], step))
        notebook.run(f"cell {number}", source)
    return notebook


def test_a_function_that_is_pushed_with_another_helper_is_the_one_of_then_in_each_place() -> None:
    use = "%%distributed\nprint(outer(3))"
    notebook = in_order(HELPER, OUTER, PUSH_OUTER, use, OTHER_HELPER, PUSH_OUTER, use)
    first, last = f"{HELPER}\n\n{OUTER}", f"{OUTER}\n\n{OTHER_HELPER}"
    assert notebook.code() == [first, "print(outer(3))", last, "print(outer(3))"]
    assert not notebook.script().left_out


def test_a_helper_that_is_edited_in_place_is_the_one_of_then_in_each_place() -> None:
    notebook = Notebook()
    for helper, user in ((HELPER, "d"), (OTHER_HELPER, "e")):
        notebook.run("a", helper)
        notebook.run("b", OUTER)
        notebook.run("c", PUSH_OUTER, outer=step)
        notebook.run(user, "%%distributed\nprint(outer(3))")
    use = "print(outer(3))"
    assert notebook.code() == [f"{HELPER}\n\n{OUTER}", use, f"{OTHER_HELPER}\n\n{OUTER}", use]


@pytest.mark.parametrize("names", ["helper outer", "outer helper"])
def test_a_helper_that_is_pushed_with_its_function_is_the_one_of_then(names: str) -> None:
    use = "%%distributed\nprint(outer(3), helper(3))"
    push = f"%dist push {names}"
    notebook = in_order(HELPER, OUTER, push, use, OTHER_HELPER, push, use)
    assert not notebook.script().left_out


def test_a_function_that_would_see_another_push_s_helper_stays_out() -> None:
    other = OUTER.replace("outer", "other")
    use = "%%distributed\nprint(other(3), outer(3))"
    sent = (HELPER, OUTER, other, PUSH_OUTER, OTHER_HELPER, "%dist push other")
    assert in_order(*sent, use).script().left_out == (
        (4, "pushes outer, and its helper is another one in cell 6's push"),
        (7, "uses outer, which cell 4 would have given"),
    )
    assert not in_order(*sent, "%%distributed\nprint(other(3))").script().left_out
    assert not in_order(*sent, PUSH_OUTER, use).script().left_out


NET = "class Net:\n    def __call__(self, x): return helper(x)"


@pytest.mark.parametrize(
    ("own", "makes", "is_refused"),
    [
        (NET, "made = Net()", True),
        (NET, "made = wrap(Net())", True),
        (NET, "loss = Net()(3)\nmade = 1", False),
        (OUTER.replace("outer", "Net"), "made = Net", True),
        (OUTER.replace("outer", "Net"), "made = Net(3)", False),
    ],
)
def test_what_was_made_of_an_older_push_keeps_its_helper(
    own: str, makes: str, is_refused: bool
) -> None:
    push = "%dist push Net"
    before = (HELPER, own, push, f"%%distributed\nwrap = print\n{makes}", OTHER_HELPER, push)
    found = in_order(*before, "%%distributed\nprint(made)").script().left_out
    assert bool(found) is is_refused
    assert not in_order(*before, "%%distributed\nmade = 1\nprint(made)").script().left_out
