"""Which detached cluster is meant, and what a name may be."""

from pathlib import Path

import pytest

from nbdist.shared.errors import ClusterError, UsageError
from nbdist.shared.processes import detached
from nbdist.shared.processes.detached import Detached, choose, name_for

FREE = Detached("free", Path("/x"), "/home/me", "2 ranks on cpu, no cell runs", 0.0)
HAD = Detached("had", Path("/y"), "/home/me", "4 ranks on cpu, no cell runs", 0.0, kernel=7)


def test_without_a_name_the_only_one_that_no_kernel_has_is_meant() -> None:
    assert choose([FREE, HAD], None) is FREE
    assert choose([HAD], None) is HAD
    assert choose([FREE, HAD], "had") is HAD


@pytest.mark.parametrize(
    ("found", "name", "said"),
    [
        ([], None, "There is no detached cluster."),
        ([], "x", "There is no detached cluster x."),
        ([FREE, HAD], "x", "There is no detached cluster x."),
        ([FREE, Detached("more", Path("/z"))], None, "Several clusters are detached."),
    ],
)
def test_what_is_not_there_or_not_clear_is_refused_with_the_names_there_are(
    found: list[Detached], name: str | None, said: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        choose(found, name)
    assert caught.value.what == said
    assert all(one.name in str(caught.value) for one in found)


def test_a_cluster_has_the_name_of_its_notebook_where_none_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detached, "find", lambda: [FREE])
    assert name_for(True, "02 train/größer") == "02-train-gr-er"
    assert name_for(True, "...") == "notebook"
    assert name_for("small.gpt_2", "x") == "small.gpt_2"
    with pytest.raises(UsageError, match="There is a detached cluster free already"):
        name_for("free", "x")
    for wrong in ("../x", "a b", "x" * 41, ".hidden"):
        with pytest.raises(UsageError, match="is no name"):
            name_for(wrong, "x")
