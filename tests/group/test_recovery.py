"""Training that a fault interrupts: the same objects go on, and end as if nothing had happened."""

import pytest

from tests.group import faults
from tests.group.engines import cluster

STEPS, BREAK_AT = 6, 3
KINDS = ("ddp", "ddp on a new_group", "replicate", "fsdp", "fsdp by hand")


@pytest.fixture(scope="module")
def unbroken() -> dict[str, list[str]]:
    """Return the fingerprints of a training without a fault, a kind of wrapper each."""
    prints = {}
    with cluster(3) as ranks:
        for kind in KINDS:
            ranks.run(faults.build, kind)
            ranks.run(faults.train, STEPS)
            prints[kind] = ranks.run(faults.fingerprint)
    return prints


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_equal_to_an_unbroken_run_after_faults_in_forward_and_backward(
    kind: str, unbroken: dict[str, list[str]]
) -> None:
    with cluster(3) as ranks:
        for generation, place in enumerate(("forward", "backward"), start=1):
            ranks.run(faults.build, kind)
            ranks.post(faults.train, STEPS, BREAK_AT, place)
            raised = ranks.engines[1].result()
            for rank in (0, 2):
                ranks.engines[rank].now(faults.abort)
            freed = [ranks.engines[rank].result() for rank in (0, 2)]

            healed = ranks.run(faults.reform, generation)
            ranks.run(faults.train, STEPS)

            assert raised["error"] == "Boom"
            assert [answer["step"] for answer in freed] == [BREAK_AT, BREAK_AT]
            assert all(result["healed"] for result in healed)
            assert ranks.run(faults.fingerprint) == unbroken[kind], place


def test_a_killed_rank_is_replaced_and_groups_it_did_not_know_are_named() -> None:
    with cluster(3) as ranks:
        ranks.run(faults.make_group, "survivors", [0, 1])
        ranks.run(faults.make_group, "with the dead", [1, 2])
        for rank in (0, 1):
            ranks.engines[rank].post(faults.wait_in, "all_reduce")
        ranks.engines[2].kill()
        for rank in (0, 1):
            ranks.engines[rank].now(faults.abort)
        assert all(ranks.engines[rank].result()["released"] for rank in (0, 1))

        ranks.post_join(ranks.replace(2), 1)
        for rank in (0, 1):
            ranks.engines[rank].post(faults.reform, 1)
        results = ranks.results()

        assert results[0]["stale"] == []
        assert results[1]["stale"] == ["group 2 (ranks 1-2)"]
        assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]
        for rank in (0, 1):
            ranks.engines[rank].post(faults.sum_of_ranks, "survivors")
        assert [ranks.engines[rank].result() for rank in (0, 1)] == [1.0, 1.0]
        ranks.run(faults.make_group, "new", [0, 1, 2])
        assert ranks.run(faults.sum_of_ranks, "new") == [3.0, 3.0, 3.0]
        ranks.run(faults.reform, 2)
        assert ranks.run(faults.sum_of_ranks, "new") == [3.0, 3.0, 3.0]
