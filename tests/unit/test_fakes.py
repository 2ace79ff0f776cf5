"""The fakes of the unit tests have the signatures of what they stand for."""

import inspect

import pytest

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.connection import Connection
from nbdist.client.cluster.events import EventLog
from tests.unit.fakes import FakeCluster, FakeConnection, FakeEvents

FAKES = [(FakeCluster, Cluster), (FakeConnection, Connection), (FakeEvents, EventLog)]


def differences(fake: type, real: type) -> list[str]:
    """Name the public methods of `fake` that `real` lacks, or takes other arguments for."""
    methods = [name for name in vars(fake) if not name.startswith("_")]
    assert methods, "a fake replaces something"
    return [
        name
        for name in methods
        if not hasattr(real, name)
        or inspect.signature(getattr(fake, name)) != inspect.signature(getattr(real, name))
    ]


@pytest.mark.parametrize(("fake", "real"), FAKES)
def test_a_fake_has_only_methods_of_the_real_class_with_their_signatures(
    fake: type, real: type
) -> None:
    assert differences(fake, real) == []


def test_a_fake_that_lags_behind_the_real_class_is_named_with_the_method() -> None:
    class Changed:
        def kill(self, rank: int, *, group: bool) -> None: ...

        def replace(self, ranks: list[int]) -> None: ...

    assert differences(Changed, Cluster) == ["kill", "replace"]


def test_what_a_fake_cluster_says_of_its_ranks_follows_deaths_and_replacements() -> None:
    cluster = FakeCluster(dead=[1])
    assert (cluster.living(), cluster.dead()) == ([0, 2], [1])

    cluster.replace([1])

    assert cluster.dead() == []
    assert cluster.ranks[1].pid == 201
