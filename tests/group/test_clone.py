"""A killed rank's successor holds what the living hold, and training goes on as if unbroken."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests.group import clone_ranks
from tests.group.clone_ranks import WRAPS
from tests.group.engines import Cluster, cluster

STEPS, KILL_AT = 6, 3
_generations = count(1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(3) as made:
        made.run(clone_ranks.cell, clone_ranks.DEFINE)
        yield made


def kill_and_clone(ranks: Cluster, until: str, dead: int = 1, source: int = 0) -> list[dict]:
    """Run a cell in which a rank is killed; put a newcomer in its place and clone for it."""
    ranks.post(clone_ranks.try_cell, until)
    ranks.engines[dead].process.join(30)
    living = [engine for engine in ranks.engines if engine.rank != dead]
    for engine in living:
        engine.now(clone_ranks.let_go)
    for engine in living:
        assert engine.result()["error"], "a peer of a dead rank gets an error"
    return replace_and_clone(ranks, dead, source)


def replace_and_clone(ranks: Cluster, dead: int, source: int) -> list[dict]:
    generation = next(_generations)
    ranks.post_join(ranks.replace(dead), generation)
    ranks.post(clone_ranks.recover, generation, source, [dead], KILL_AT)
    ranks.engines[dead].result()  # of its join
    return ranks.results()


def outcome(ranks: Cluster) -> list[object]:
    return [
        ranks.run(clone_ranks.fingerprint),
        ranks.run(clone_ranks.tensors_of_optimizer),
        ranks.run(
            clone_ranks.value, "(step, schedule.get_last_lr(), [l.item() for l in losses][0])"
        ),
    ]


def check_training(ranks: Cluster, wrap: str, kind: str, place: str, dead: int, at: int) -> None:
    prepare = f"prepare({WRAPS[wrap]}, {kind!r})"
    ranks.run(clone_ranks.cell, f"{prepare}\ntrain({STEPS})")
    unbroken = outcome(ranks)[:2]

    ranks.run(clone_ranks.cell, prepare)
    ranks.engines[dead].post(clone_ranks.cell, f"armed = ({at}, {place!r})")
    ranks.engines[dead].result()
    # The living keep their objects; the newcomer's share what they share.
    ranks.run(clone_ranks.cell, "same = (model, opt, dict(model.named_parameters()))")
    answers = kill_and_clone(ranks, f"train({STEPS})", dead, source=(dead + 1) % 3)
    assert answers[dead]["cloned"]["placeholders"] == {}
    assert len({str(answer["cloned"]) for answer in answers}) == 1
    assert ranks.run(clone_ranks.value, "step") == [at] * 3
    ranks.run(clone_ranks.cell, f"train({STEPS})")

    assert outcome(ranks)[:2] == unbroken, (wrap, kind, place)
    kept = (
        "same[0] is model and same[1] is opt and "
        "all(same[2][n] is p for n, p in model.named_parameters())"
    )
    assert ranks.run(clone_ranks.value, kept) == [True] * 3


@pytest.mark.parametrize("wrap", WRAPS)
def test_training_with_adam_is_bit_equal_to_an_unbroken_run_after_a_kill_in_backward(
    ranks: Cluster, wrap: str
) -> None:
    check_training(ranks, wrap, "adam", "backward", dead=1, at=KILL_AT)
