"""Which checkpoint is restored when one is asked for."""

from pathlib import Path

import pytest

from nbdist.engine.checkpoint import manifest, saved
from nbdist.engine.checkpoint.folder import COMMIT, CheckpointFolder
from nbdist.engine.checkpoint.manifest import Manifest
from nbdist.shared.errors import CheckpointError, UsageError


@pytest.fixture
def place(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(tmp_path / "run"))


def save(place: CheckpointFolder, step: int, saved_at: float, **more: float) -> str:
    name = manifest.name_of(step, place.names())
    place.begin(name, 0)
    place.commit(name, Manifest(step, saved_at, 1, {"GPT": "ddp"}, {}, more.get("metric")))
    return name


def text_of(place: CheckpointFolder, which: str | int) -> str:
    with pytest.raises(CheckpointError) as caught:
        saved.choose(place, which)
    return str(caught.value).replace(place.url, "RUN")


def test_where_nothing_is_nothing_is_chosen(place: CheckpointFolder) -> None:
    assert saved.choose(place, "latest") is None
    assert str(saved.missing(place)).startswith(f"There is no checkpoint in {place.url}.\nDo:  ")


def test_saves_that_did_not_end_are_told_of_where_there_is_no_checkpoint(
    place: CheckpointFolder,
) -> None:
    place.begin("step-00000001", 0)
    assert saved.choose(place, "latest") is None
    assert "Why: 1 save there did not come to an end\n" in str(saved.missing(place))


def test_the_latest_is_the_one_pointed_to(place: CheckpointFolder) -> None:
    save(place, 9, 1.0)
    back = save(place, 3, 2.0)
    found = saved.choose(place, "latest")
    assert found is not None
    assert (found.name, found.before) == (back, None)


def test_the_best_follows_from_the_metrics_where_its_pointer_was_not_written_yet(
    place: CheckpointFolder,
) -> None:
    place.point_to_best(save(place, 100, 1.0, metric=2.0))
    better = save(place, 200, 2.0, metric=1.0)
    found = saved.choose(place, "best")
    assert found is not None
    assert found.name == better


@pytest.mark.parametrize("pointer", ["", "step-00000077", "\xff\xfe", "../elsewhere"])
def test_a_pointer_to_nothing_is_not_followed(place: CheckpointFolder, pointer: str) -> None:
    save(place, 9, 1.0)
    newest = save(place, 3, 2.0)
    Path(place.url, "latest").write_bytes(pointer.encode("latin1"))
    found = saved.choose(place, "latest")
    assert found is not None
    assert found.name == newest


def test_a_folder_that_is_named_is_taken_though_its_step_was_saved_again(
    place: CheckpointFolder,
) -> None:
    first, again = save(place, 5, 1.0), save(place, 5, 2.0)
    for name in (first, again):
        found = saved.choose(place, "latest", name)
        assert found is not None
        assert found.name == name


def test_a_folder_that_is_named_and_no_checkpoint_is_told_with_those_that_are(
    place: CheckpointFolder,
) -> None:
    save(place, 5, 1.0)
    place.begin("step-00000006", 0)
    for name, why in (
        ("step-00000006", "Why: its save did not come to an end\n"),
        ("step-00000007", ""),
    ):
        with pytest.raises(CheckpointError) as caught:
            saved.choose(place, "latest", name)
        said = f"RUN/{name} is no checkpoint.\n{why}Do:  those in RUN are step-00000005"
        assert str(caught.value).replace(place.url, "RUN") == said


def test_of_a_step_the_newest_is_chosen_and_the_one_before_it_is_named(
    place: CheckpointFolder,
) -> None:
    save(place, 1, 1.0)
    save(place, 5, 2.0)
    again = save(place, 5, 3.0)
    found = saved.choose(place, 5)
    assert found is not None
    assert (found.name, found.before) == (again, 1)


def test_the_best_is_chosen_by_its_metric(place: CheckpointFolder) -> None:
    best = save(place, 1, 1.0, metric=0.1)
    place.point_to_best(best)
    save(place, 2, 2.0, metric=0.2)
    found = saved.choose(place, "best")
    assert found is not None
    assert found.name == best


def test_what_is_not_there_is_told_with_what_is(place: CheckpointFolder) -> None:
    save(place, 1, 1.0)
    save(place, 5, 2.0)
    assert text_of(place, 7) == ("RUN has no checkpoint of step 7.\nDo:  it has those of step 1, 5")
    assert text_of(place, "best").startswith("No checkpoint in RUN was saved with a metric")


@pytest.mark.parametrize("which", ["bset", True, 1.5, None])
def test_what_makes_no_sense_is_refused(place: CheckpointFolder, which: str) -> None:
    with pytest.raises(UsageError, match=r'takes "latest", "best" or a step'):
        saved.choose(place, which)


def test_a_newer_format_is_refused_by_its_version(place: CheckpointFolder) -> None:
    name = save(place, 1, 1.0)
    place.write(name, COMMIT, b'{"format": 2, "nbdist": "9.0"}')
    assert text_of(place, "latest") == (
        "RUN/step-00000001 was written by nbdist 9.0, in a format that this version cannot read.\n"
        "Do:  update nbdist where the ranks run"
    )


@pytest.mark.parametrize("which", ["latest", 5])
def test_no_older_one_is_taken_silently_for_one_with_a_damaged_commit(
    place: CheckpointFolder, which: str | int
) -> None:
    save(place, 1, 1.0)
    name = save(place, 5, 2.0)
    text = place.read(name, COMMIT)
    place.write(name, COMMIT, text.replace(b'"step": 5', b'"step": 4'))
    assert text_of(place, which) == (
        "RUN/step-00000005 is damaged, and nothing was restored from it: checkpoint.json is not "
        "what was written.\nDo:  restore the last good one before it: nbdist.restore(which=1)"
    )
    found = saved.choose(place, 1)
    assert found is not None
    assert found.commit.step == 1


def test_a_retry_takes_the_newest_since_the_cell_was_sent(place: CheckpointFolder) -> None:
    save(place, 8, 10.0)
    newest = save(place, 3, 20.0)
    assert saved.newest_since(place, 21.0) is None
    found = saved.newest_since(place, 5.0)
    assert found is not None
    assert found.name == newest
