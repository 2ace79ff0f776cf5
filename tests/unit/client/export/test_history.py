"""The cells of a kernel's history: once each, where they succeeded first, as they did last."""

from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.history import History
from nbdist.client.export.parts import parts_of
from nbdist.client.metrics.changes import Change
from nbdist.client.notebook.arguments import parse_distributed

A, B = "%%distributed\na = 1", "%%distributed\nb = 2"


def run(history: History, number: int, source: str, key: str = "", *, fails: bool = False) -> None:
    history.note_run(number, source, key or None, has_failed=fails)


def found(history: History) -> list[tuple[int, str, str]]:
    return [(cell.number, cell.source, cell.trouble) for cell in history.cells()]


def test_a_cell_stands_where_it_succeeded_first_and_as_it_succeeded_last() -> None:
    history = History()
    run(history, 1, A, "a")
    run(history, 2, B, "b")
    run(history, 3, f"{A}0", "a")
    run(history, 4, f"{A}00", "a", fails=True)
    assert found(history) == [(3, f"{A}0", ""), (2, B, "")]
    assert history.cells()[0].runs == 2


def test_a_cell_that_failed_before_it_succeeded_stands_where_it_succeeded() -> None:
    history = History()
    run(history, 1, A, "a", fails=True)
    run(history, 2, B, "b")
    assert found(history) == [(1, A, "failed"), (2, B, "")]
    run(history, 3, A, "a")
    assert found(history) == [(2, B, ""), (3, A, "")]


def test_without_ids_each_run_is_a_cell_and_a_failed_one_goes_once_its_text_succeeds() -> None:
    history = History()
    run(history, 1, A)
    run(history, 2, A)
    run(history, 3, B, fails=True)
    run(history, 4, B)
    assert found(history) == [(1, A, ""), (2, A, ""), (4, B, "")]


def test_a_retry_is_the_success_of_the_cell_that_failed() -> None:
    history = History()
    run(history, 1, A, "a", fails=True)
    run(history, 2, "%dist retry", "r", fails=True)
    assert found(history) == [(1, A, "failed")]
    history.note_trained({0: 2.0})
    run(history, 3, "%dist retry", "r")
    assert found(history) == [(3, A, "")]
    assert history.cells()[0].losses == {0: 2.0}


def test_what_a_cell_has_sent_is_of_that_cell_and_as_it_was_sent() -> None:
    history = History()
    value = [1]
    history.note_push({"value": value}, "0")
    value.append(2)
    run(history, 1, "session.push({'value': value}, '0')", "p")
    run(history, 2, A, "a")
    (one,) = history.cells()[0].sent
    assert (one.code, one.ranks) == ((("value", "value = [1]"),), "0")
    assert history.cells()[1].sent == ()


def test_code_that_ran_by_other_means_is_known_and_losses_are_those_of_the_first_training() -> None:
    history = History()
    history.note_code()
    run(history, 1, "session.run('a = 1')", "s")
    history.note_code()
    history.note_trained({0: 2.0})
    history.note_trained({0: 1.0})
    run(history, 2, A, "a")
    assert [(cell.ran_code, cell.losses) for cell in history.cells()] == [
        (True, {}),
        (False, {0: 2.0}),
    ]


def test_a_cell_is_of_the_ranks_also_below_lines_that_time_it() -> None:
    cell = NotebookCell(1, "\n%%time\n%%distributed -r 0\nx = 1")
    assert cell.is_of_ranks
    assert (cell.line, cell.body) == ("-r 0", "%%time\nx = 1")
    assert not NotebookCell(1, "%%bash\nls").is_of_ranks


def test_what_was_changed_by_hand_stands_above_the_cell_that_a_script_has_also_of_a_retry() -> None:
    history = History()
    history.note_trained({0: 2.0}, [Change(120, "lr", "0.1", "0.01", 0.01)])
    run(history, 1, A, "a", fails=True)
    history.note_trained({0: 1.0}, [Change(3, "alpha", "1", "2", 2)])
    run(history, 2, "%dist retry", "r")
    (part,) = parts_of(history.cells(), None, set(), parse_distributed)
    assert part.heading.splitlines() == [
        "%%distributed",
        "lr was set to 0.01 after step 120 by hand",
        "alpha was set to 2 after step 3 by hand",
    ]
