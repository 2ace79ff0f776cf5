"""What `reset` says it did, and what is refused because no heal would make it right."""

from collections.abc import Iterator

import pytest
import torch
from packaging.version import Version

from tests.group import heal_ranks
from tests.group.engines import Cluster, cluster


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def test_healing_names_each_object_and_drops_the_gradients_that_it_holds(ranks: Cluster) -> None:
    lines = ranks.run(heal_ranks.heal_half_made_step)

    # torch's own reset drops them first
    theirs = 0 if Version(torch.__version__) >= Version("2.15") else 2
    assert lines[0] == lines[1]
    assert sorted(lines[0]) == [
        "DDP(Linear): reducer reset, 2 gradients dropped",
        "GradScaler: 1 reset, their scale kept",
        "SGD: 2 gradients dropped",
        f"fully_shard(Linear): iteration reset, {theirs} gradients dropped",
    ]


def test_an_interrupt_between_two_parameters_of_fsdp_is_healed(ranks: Cluster) -> None:
    for apart in ranks.run(heal_ranks.steps_after_interrupts, "zero3"):
        assert max(apart.values()) < 1e-12, apart


@pytest.mark.slow
def test_an_interrupt_between_two_parameters_is_healed_under_tensor_parallel() -> None:
    with cluster(4) as four:
        for apart in four.run(heal_ranks.steps_after_interrupts, "fsdp=2 tp=2"):
            assert max(apart.values()) < 1e-12, apart


def test_power_sgd_goes_back_to_the_last_boundary_as_often_as_it_must(ranks: Cluster) -> None:
    for told in ranks.run(heal_ranks.power_sgd_after_two_lost_steps):
        assert told["lost"] != told["noted"]
        assert told["restored"] == [told["noted"]] * 2
        assert "powerSGD_hook's state restored" in told["lines"]


def test_a_hook_whose_state_is_unknown_is_said_to_keep_it(ranks: Cluster) -> None:
    assert ranks.run(heal_ranks.hook_of_a_user)[0] == [
        "hook's Counter left as the lost step made it"
    ]


def test_power_sgd_over_gloo_is_refused_with_more_than_one_bucket(ranks: Cluster) -> None:
    assert ranks.run(heal_ranks.power_sgd_in_buckets)[0] == (
        "LayoutError: PowerSGD over gloo needs the gradients in one bucket; "
        "0.00403 MB make several."
    )
