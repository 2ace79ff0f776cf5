"""What a thread copies beside training is the state of one step, or no checkpoint.

Copies are made as late as they may be: when the next step waits for them, after its forward and
backward. A saved model with batch norm has statistics that a forward changes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.group import checkpoint_copy_ranks as on_ranks
from tests.group.engines import Cluster, cluster
from tests.group.parity_cases import Case

STEPS = 4
CASES = [
    Case(2, "zero3"),
    pytest.param(Case(2, "ddp", model="conv"), marks=pytest.mark.slow),
    pytest.param(Case(2, "zero1"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def equal(saved: list[dict[str, Any]], restored: list[dict[str, Any]]) -> bool:
    """Return whether trainings have the same weights to the bit."""
    pairs = zip(saved, restored, strict=True)
    return all(bool((a[name] == b[name]).all()) for a, b in pairs for name in a.keys() | b.keys())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model} {case.layout}")
def test_what_is_copied_beside_the_next_step_is_the_state_of_the_save(
    ranks: Cluster, tmp_path: Path, case: Case
) -> None:
    found = ranks.run(on_ranks.save_each_step, str(tmp_path), case, STEPS)
    for told in found:
        assert told["errors"] == [""] * STEPS
        first, *later = told["left"]
        assert first == 0, "what nothing is known of is copied at once"
        assert all(later), "and beside the next step where nothing else has changed it"
    restored = ranks.run(on_ranks.restored, str(tmp_path), case, list(range(1, STEPS + 1)))
    assert equal(found[0]["weights"], restored[0])


@pytest.mark.slow
def test_a_program_that_changes_weights_after_a_save_has_them_copied_at_once(
    ranks: Cluster, tmp_path: Path
) -> None:
    case = CASES[0]
    (found, _) = ranks.run(
        on_ranks.save_each_step, str(tmp_path), case, STEPS, on_ranks.clip_unseen
    )
    assert found["left"] == [0] * STEPS
    restored = ranks.run(on_ranks.restored, str(tmp_path), case, list(range(1, STEPS + 1)))
    assert equal(found["weights"], restored[0])


@pytest.mark.slow
@pytest.mark.parametrize("way", [on_ranks.change, on_ranks.clip_unseen])
def test_a_weight_that_changes_while_it_is_copied_makes_no_checkpoint(
    ranks: Cluster, tmp_path: Path, way: Any
) -> None:
    changes = on_ranks.Once(3, way)
    (found, _) = ranks.run(on_ranks.save_each_step, str(tmp_path), CASES[0], STEPS, changes)
    first, second, third, fourth = found["errors"]
    assert (first, second, fourth) == ("", "", "")
    what, *_ = third.splitlines()
    assert third.splitlines() == [
        what,
        "Why: between a save and the next step parameters are copied beside training",
        "Do:  save again: from now on training stands still while they are copied",
    ]
    assert what.endswith("was changed while it was copied, and not by its optimizer's step.")
    assert found["left"][3] == 0, "from then on it is copied at once"
    restored = ranks.run(on_ranks.restored, str(tmp_path), CASES[0], [1, 2, 4])
    assert equal([found["weights"][i] for i in (0, 1, 3)], restored[0])
