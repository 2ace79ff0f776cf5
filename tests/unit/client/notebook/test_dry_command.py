"""`%%distributed --dry`: its words, and which cells run before it."""

import pytest

from nbdist.client.export.history import History
from nbdist.client.notebook import dry_command, export_command
from nbdist.client.notebook.arguments import parse_distributed
from nbdist.shared.errors import UsageError
from nbdist.study.dry import DryRun


def test_n_and_memory_are_for_dry_runs_only() -> None:
    for words in ("-n 4", "--memory 80GB"):
        with pytest.raises(UsageError, match="is for --dry"):
            parse_distributed(words)


def test_a_dry_run_begins_with_the_cells_that_ranks_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, object] = {}

    def dry(code: str, n: int, **options: object) -> DryRun:
        asked.update(options, code=code, n=n)
        return DryRun(n)

    history = History()
    history.note_run(1, "%%distributed\nmodel = 3", "a", has_failed=False)
    history.note_run(2, "%%distributed\nbroken", "b", has_failed=True)
    history.note_run(3, "%%distributed\nolder = 1", "c", has_failed=False)
    for number in (4, 5):
        history.note_run(number, "%%distributed --dry\nchecked = 1", f"{number}", has_failed=False)
    monkeypatch.setattr(export_command, "here", history)
    monkeypatch.setattr(dry_command, "dry", dry)
    words = parse_distributed("--dry -n 8 -p lr=[0.1,0.2]")
    assert words is not None

    made = dry_command.check_cell(words, "# %%distributed --dry\nnewer = 1", 2, "c")

    assert asked["before"] == [(1, "model = 3"), (0, "lr = 0.1")]
    assert (asked["code"], asked["n"]) == ("# %%distributed --dry\nnewer = 1", 8)
    assert made.notes == (
        "Before it ran cell 1.",
        "Not in it: cell 2 (it failed).",
        "Not in it: cells 4, 5 (each was only checked, by --dry).",
        "Of -p lr the first value was taken.",
    )
