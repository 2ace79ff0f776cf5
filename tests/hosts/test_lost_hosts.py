"""A host is lost while its ranks train: others take its place, or fewer ranks go on."""

import re

import pytest

from tests.hosts.bed import Bed
from tests.hosts.clusters import TRAIN, during, hosts_of, start
from tests.hosts.kernel import Kernel

pytestmark = pytest.mark.hosts


def cell(layout: str, retry: int = 1) -> str:
    code = TRAIN.replace("{layout}", layout).replace("{flag!r}", "'{flag}'")
    return f"%%distributed --retry {retry} --no-track\n{code}"


def test_a_spare_host_takes_a_lost_ones_rank_then_fewer_go_on_and_it_comes_back(bed: Bed) -> None:
    with Kernel(bed["a"]) as kernel:
        start(kernel, "localhost:2,b:1,c:1,d:1", "-n 4")
        assert hosts_of(kernel) == ["a", "a", "b", "c"]

        said, _ = during(kernel, bed, cell("dp=-1"), bed["c"].power_cut)
        assert "rank 3 (c, cpu) died: its host c is lost: it did not answer for 4 s." in said
        assert "cloned from rank 0" in said
        assert re.search(r"ranks 0-3 │ trained to \S+ on 4\n", said), said
        assert hosts_of(kernel) == ["a", "a", "b", "d"]

        said, _ = during(kernel, bed, cell("dp=-1"), bed["b"].power_cut)
        assert "rank 2 (b, cpu) died: its host b is lost" in said
        assert "There are 3 ranks now." in said
        assert re.search(r"ranks 0-2 │ trained to \S+ on 3\n", said), said
        assert hosts_of(kernel) == ["a", "a", "d"]

        bed["c"].power_on()
        said = kernel.run("%dist scale 4")
        assert "Host c is back." in said
        assert "Host b cannot be used: it does not answer." in said
        assert hosts_of(kernel) == ["a", "a", "d", "c"]
        assert kernel.run("%dist stop").startswith("Stopped. b could not be reached: ")
    assert bed["c"].left_running() == bed["d"].left_running() == []


def test_shards_come_back_from_another_host_and_are_named_where_none_is_left(bed: Bed) -> None:
    with Kernel(bed["a"]) as kernel:
        start(kernel, "b:1,c:1,d:1", "-n 2", "--peer-snapshots 2")

        said, _ = during(kernel, bed, cell("fsdp=-1"), bed["c"].power_cut)
        assert "shards of model" not in said
        assert re.search(r"on 2\n", said), said
        assert hosts_of(kernel) == ["b", "d"]

        # No slot is left but the living rank's own: the other gets all it holds, and goes on.
        said, _ = during(kernel, bed, cell("fsdp=-1", retry=0), bed["b"].power_cut)
        assert "rank 0 (b, cpu) died: its host b is lost" in said
        assert "There is 1 rank now." in said
        assert "What was sharded over the ranks is lost with them: model." in said
        assert hosts_of(kernel) == ["d"]
        assert "on 1" in kernel.run("%%distributed\nprint('on', dist.get_world_size())")
