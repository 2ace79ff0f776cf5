"""A dry run tells each mistake of the table with its line, and none of a sound cell."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.shared.errors import UsageError
from tests.group.dry_cells import OF_KINDS, PLANTED, SOUND, Case

QUICK = {
    "a model that is moved, and metrics gathered as objects",
    "rank 0 alone evaluates a DDP with batch norm",
    "an object broadcast, then used as a number of turns",
    "the shortest loader of all ranks counts",
    "rank 0 alone broadcasts",
    "sizes that differ",
    "more batches on some ranks, then a barrier",
}


def _found(cases: Sequence[Case], *options: str) -> dict[str, Any]:
    names = (case.name for case in cases)
    command = [sys.executable, "-m", "tests.group.dry_ranks", *options, *names]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _check(cases: Sequence[Case]) -> None:
    found = _found(cases)
    wrong = [f"{case.name}: {found[case.name][2]}" for case in cases if not _told(case, found)]
    assert wrong == []


def _told(case: Case, found: dict[str, Any]) -> bool:
    is_sound, findings, *_ = found[case.name]
    if not case.kind:
        return bool(is_sound)
    kind, places, text = findings[0] if findings else ("", (), "")
    return kind == case.kind and case.place in places and all(one in text for one in case.words)


def test_the_table_has_as_many_sound_cells_as_such_with_a_mistake() -> None:
    assert (len(SOUND), len(PLANTED)) == (29, 29)


def test_mistakes_are_told_with_their_lines_and_none_of_sound_cells() -> None:
    _check([case for case in (*SOUND, *PLANTED) if case.name in QUICK])


def test_one_rank_of_64_that_calls_alone_is_told_and_few_ranks_are_run() -> None:
    case = OF_KINDS[0]
    _, _, text, forks = _found([case])[case.name]
    assert "Rank 17 alone calls barrier at line 2; ranks 0-16, 18-63 end the cell" in text
    assert forks == 4


@pytest.mark.slow
def test_ranks_that_are_not_run_are_told_as_if_they_were() -> None:
    few, each = _found(OF_KINDS), _found(OF_KINDS, "--each")
    assert {name: one[:3] for name, one in few.items()} == {
        name: one[:3] for name, one in each.items()
    }
    assert all(few[case.name][3] < each[case.name][3] for case in OF_KINDS)


@pytest.mark.slow
def test_no_sound_cell_is_blamed() -> None:
    _check(SOUND)


@pytest.mark.slow
def test_each_planted_mistake_is_told_with_its_line() -> None:
    _check(PLANTED)


@pytest.mark.slow
def test_a_dry_run_leaves_no_file_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = nbdist.dry(
        'open("a.txt", "w").write("x")\nimport os\nos.makedirs("b")\nnbdist.save()\n'
        "x = torch.ones(k)\nos.remove('c')\n",
        2,
        before=["k = 3"],
    )
    assert list(tmp_path.iterdir()) == []
    assert "Not known of ranks 0-1 from line 6 on: it changes files (os.remove)" in str(found)
    missing = str(nbdist.dry("dist.barrier()\nmodel(3)", 2))
    assert "from line 2 on: name 'model' is not defined: a dry run has what earlier" in missing


@pytest.mark.parametrize(("n", "memory"), [(0, None), (2, "80 potatoes")])
def test_arguments_that_make_no_sense_are_refused(n: int, memory: str | None) -> None:
    with pytest.raises(UsageError):
        nbdist.dry("pass", n, memory=memory)
