"""A plain `StatefulDataLoader` that is kept: its position is each rank's own."""

from functools import partial
from pathlib import Path

from tests.group import stateful_ranks
from tests.group.engines import cluster


def test_a_kept_stateful_loader_goes_on_and_is_refused_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "run")
    whole, again = partial(stateful_ranks.train, restores=False), partial(stateful_ranks.train)
    with cluster(2) as ranks:
        unbroken = ranks.run(whole, str(tmp_path / "unbroken"), 100)
        begun = ranks.run(whole, folder, 2)
        rest = ranks.run(partial(again, restores=True), folder, 100)
    assert [[*first, *later] for first, later in zip(begun, rest, strict=True)] == unbroken
    with cluster(1) as ranks:
        (told,) = ranks.run(partial(again, restores=True), folder, 100)
    assert "train is a StatefulDataLoader, whose position is one of 2 ranks' own" in told
    assert "nbdist.loader resumes on any number" in told
