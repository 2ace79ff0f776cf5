"""Every layout computes what one process computes, over 2, 4 and 8 ranks, for three kinds of model.

The whole matrix is slow; `make test` runs a choice of it. Each run compares with the committed
table; after a change, or with another torch, make it anew and read what has changed:

    NBDIST_WRITE_PARITY_TABLE=1 python -m pytest tests/group/test_parity.py -m ""
"""

import os
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from itertools import groupby

import pytest

from tests.group import parity_cases
from tests.group.harness import run_ranks
from tests.group.parity_cases import Case, Outcome

RANKS = "tests.group.parity_ranks:"
WRITES = bool(os.environ.get("NBDIST_WRITE_PARITY_TABLE"))


def _by_column(case: Case) -> tuple[int, str]:
    return case.ranks, case.column


GROUPS = [
    list(cases) for _, cases in groupby(sorted(parity_cases.matrix(), key=_by_column), _by_column)
]


@pytest.fixture
def measured() -> Iterator[dict[Case, Outcome]]:
    """What was measured; when the table is made anew, its other rows stay."""
    found: dict[Case, Outcome] = {}
    yield found
    if WRITES and found:
        cells = _table() | parity_cases.cells_of(found)
        text = parity_cases.render(cells, version("torch").split("+")[0], str(date.today()))
        parity_cases.FILE.write_text(text, "utf-8")


def _table() -> parity_cases.Cells:
    file = parity_cases.FILE
    return parity_cases.parse(file.read_text("utf-8")) if file.exists() else {}


def _run(cases: list[Case]) -> dict[Case, Outcome]:
    """Return each case's outcome, on rank 0; the ranks agree on the verdict."""
    on_ranks = run_ranks(cases[0].ranks, RANKS + "run", cases, timeout_s=600)
    for case, outcomes in zip(cases, zip(*on_ranks, strict=True), strict=True):
        assert len({outcome.verdict for outcome in outcomes}) == 1, f"ranks disagree on {case.way}"
    return dict(zip(cases, on_ranks[0], strict=True))


def _compare(found: dict[Case, Outcome]) -> None:
    table = {key: parity_cases.verdict_in(cell) for key, cell in _table().items()}
    wrong = [
        f"{case.ranks} ranks, {case.way}, {case.column}: {outcome}, worst is {outcome.worst}; "
        f"floors {outcome.loss_floor:.1e} / {outcome.parameters_floor:.1e}; expected {expected}"
        for case, outcome in found.items()
        for expected in [table.get((case.ranks, case.way, case.column))]
        if not parity_cases.is_as_expected(case, outcome.verdict, expected)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(WRITES, reason="the table is made anew")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_choice_of_layouts_computes_what_one_process_computes(ranks: int) -> None:
    _compare(_run([case for case in parity_cases.EVERY_TIME if case.ranks == ranks]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: "{}-{}".format(*_by_column(cases[0])))
def test_each_layout_computes_what_one_process_computes(
    cases: list[Case], measured: dict[Case, Outcome]
) -> None:
    found = _run(cases)
    measured |= found
    assert not [case.way for case in cases if found[case].verdict == "DIFFERS"], found
    if not WRITES:
        _compare(found)


def test_the_table_holds_nothing_that_differs() -> None:
    verdicts = set(map(parity_cases.verdict_in, _table().values()))
    assert verdicts == {"bit-equal", "noise floor", "refused"}


def test_the_choice_is_part_of_the_matrix() -> None:
    assert set(parity_cases.EVERY_TIME) <= set(parity_cases.matrix())
