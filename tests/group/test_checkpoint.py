"""Checkpoints: saved in one layout, and gone on from in the same and in others."""

from pathlib import Path
from typing import Any

import pytest

import nbdist
from tests.group import checkpoint_ranks
from tests.group.engines import cluster
from tests.group.parity_cases import PIPELINE, Case


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two trainings are the same to the bit."""
    same = all(bool((a["weights"][n] == b["weights"][n]).all()) for n in a["weights"])
    return same and all(a[what] == b[what] for what in ("lr", "average", "loader", "draw"))


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the largest difference of two trainings' weights."""
    names = a["weights"].keys() & b["weights"].keys()
    assert names
    return max(float((a["weights"][n] - b["weights"][n]).abs().max()) for n in names)


SAME = [
    Case(2, "zero1", model="dropping"),
    Case(2, "zero3", model="dropping"),
    Case(2, "pp=2", (PIPELINE,), model="dropping"),
]
SAME_AS_WELL = [
    Case(2, "ddp", model="dropping"),
    Case(2, "tp=2", model="dropping"),
    Case(2, "ddp", model="conv"),
    Case(2, "zero3", model="tied"),
    Case(4, "ddp", model="dropping"),
]


@pytest.mark.parametrize(
    "case",
    [*SAME, *(pytest.param(case, marks=pytest.mark.slow) for case in SAME_AS_WELL)],
    ids=lambda case: f"{case.ranks} {case.layout} {case.model}",
)
def test_a_restored_training_goes_on_bit_for_bit(tmp_path: Path, case: Case) -> None:
    with cluster(case.ranks) as ranks:
        unbroken = ranks.run(checkpoint_ranks.save_and_go_on, str(tmp_path), case, 8, 3)
    with cluster(case.ranks) as ranks:
        resumed = ranks.run(checkpoint_ranks.restore_and_go_on, str(tmp_path), case, 3)
    for before, after in zip(unbroken, resumed, strict=True):
        assert after["step"] == 8
        assert equal(before, after), (apart(before, after), before["loader"], after)


@pytest.mark.slow
def test_after_a_loop_that_was_left_the_restored_training_does_as_the_one_that_saved(
    tmp_path: Path,
) -> None:
    case = Case(2, "ddp", model="dropping")
    with cluster(2) as ranks:
        live = ranks.run(checkpoint_ranks.leave_and_save, str(tmp_path), case, 4, 8)
        (one,) = nbdist.saved(tmp_path)
        resumed = ranks.run(checkpoint_ranks.restore_and_go_on, str(tmp_path), case, 8)
    assert [(at.epoch, at.sample) for at in one.loaders] == [(1, 0)]
    for before, after in zip(live, resumed, strict=True):
        assert (before["epoch"], after["epoch"]) == (1, 1)
        assert equal(before, after), (apart(before, after), before["loader"], after)


def test_loaders_made_again_go_on_by_their_names_though_the_older_ones_live(tmp_path: Path) -> None:
    with cluster(1) as ranks:
        (found,) = ranks.run(checkpoint_ranks.loaders_made_again, str(tmp_path), Case(1, "ddp"))
    assert found == {"train": 12, "val": 0, "old train": 16, "old val": 0}
    (one,) = nbdist.saved(tmp_path)
    assert {("train", 0, 12), ("val", 0, 0)} <= set(one.loaders)


def test_what_follows_the_steps_goes_on_by_its_name(tmp_path: Path) -> None:
    with cluster(2) as ranks:
        for layout, average in (
            ("ddp", checkpoint_ranks.Averaged),
            ("zero3", checkpoint_ranks.Shadow),
        ):
            how = str(tmp_path / layout), layout, average
            unbroken = ranks.run(checkpoint_ranks.followers_saved, *how)
            assert ranks.run(checkpoint_ranks.followers_restored, *how) == unbroken
            assert unbroken[0][2][1], "an average"
        # Cut over ranks, each part is its rank's own.
        folder = str(tmp_path / "zero3")
        for said in ranks.run(checkpoint_ranks.followers_restored, folder, "ddp", average):
            assert "t.ema (a Shadow) was saved cut over ranks" in said
        for said in ranks.run(checkpoint_ranks.followers_restored, folder, "zero3"):
            assert "it has t.ema (a Shadow), and the training here no such object" in said
            assert "or leave the rest out: nbdist.restore(only=['t.model'])" in said
        call, model = checkpoint_ranks.followers_restored, ["t.model"]
        part = ranks.run(call, folder, "zero3", None, model)
        for (*going_on, _), (*before, _) in zip(part, unbroken, strict=True):
            assert going_on == before


def test_schedulers_of_a_checkpoint_without_names_go_on_by_class_and_order(tmp_path: Path) -> None:
    with cluster(1) as ranks:
        ((before, after, said),) = ranks.run(
            checkpoint_ranks.restored_from_old_format, str(tmp_path)
        )
    assert before == after
    assert "No name tells which of t.cosine, newer is which" in said


def test_a_model_that_only_a_traceback_holds_is_no_part_of_a_checkpoint() -> None:
    with cluster(1) as ranks:
        assert ranks.run(checkpoint_ranks.saved_beside_a_failed_cell) == [{"Linear": "ddp"}]


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_models_of_one_class_go_by_their_names_in_whatever_order_they_are_built(
    tmp_path: Path, layout: str
) -> None:
    with cluster(2) as ranks:
        saved = ranks.run(checkpoint_ranks.nets_saved, str(tmp_path), "abc", layout)
        for order in ("cab", "bca"):
            restored = ranks.run(checkpoint_ranks.nets_restored, str(tmp_path), order, layout)
            assert [states for states, _ in restored] == saved
            assert "order" not in restored[0][1]


def test_models_of_one_class_without_a_common_name_are_refused(tmp_path: Path) -> None:
    renamed = {"a": "x", "b": "y"}
    with cluster(1) as ranks:
        ranks.run(checkpoint_ranks.nets_saved, str(tmp_path), "abc", "ddp")
        ((_, said),) = ranks.run(
            checkpoint_ranks.nets_restored, str(tmp_path), "bac", "ddp", renamed
        )
    assert (
        "it has Linear (a), Linear-2 (b), the training here Linear (y), Linear-2 (x), each of "
        "which fits each: a name that is there and here tells which is which." in said
    )


def test_models_of_a_checkpoint_without_names_go_by_order_and_a_sentence_says_so(
    tmp_path: Path,
) -> None:
    with cluster(1) as ranks:
        (saved,) = ranks.run(checkpoint_ranks.nets_saved, str(tmp_path), "ab", "ddp", False)
        ((same, said),) = ranks.run(checkpoint_ranks.nets_restored, str(tmp_path), "ab", "ddp")
        ((other, _),) = ranks.run(checkpoint_ranks.nets_restored, str(tmp_path), "ba", "ddp")
    assert same == saved
    assert [other[name][:3] for name in "ab"] == [saved[name][:3] for name in "ba"]
    assert (
        "No name tells which of Linear, Linear-2 is which: they have gone by the order in which "
        "they were made." in said
    )


def test_what_is_not_trained_is_saved_once_kept_and_ranks_ask_for_the_same(tmp_path: Path) -> None:
    with cluster(2) as ranks:
        said, others = ranks.run(checkpoint_ranks.parts_asked_for, str(tmp_path))
    assert said == others
    advice = "; nbdist.keep(teacher=teacher) adds a model that is not trained"
    assert said["untrained"].endswith(advice)
    assert said["its name"].endswith(advice)
    assert "keep" not in said["no model"]
    assert said["kept"] == ""
    (saved,) = nbdist.saved(tmp_path)
    assert sorted(saved.models) == ["a", "teacher"]
    for name, call in (("others", "save"), ("restored", "restore")):
        assert said[name].startswith(
            f"UsageError: Ranks ask nbdist.{call} for different models or optimizers: rank 0 for "
            "Linear, trained by SGD; rank 1 for Linear-2, trained by SGD."
        )
    assert "rank 0 for Linear, Linear-2, trained by" in said["all or one"]


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_checkpoint_is_of_what_its_cell_trains_or_of_what_is_asked_for(
    tmp_path: Path, layout: str
) -> None:
    with cluster(2) as ranks:
        (told, _) = ranks.run(checkpoint_ranks.cells_saved, str(tmp_path), layout)
        names = ("second", "asked", "all", "first")
        listed = {name: nbdist.saved(tmp_path / name) for name in names}
        assert {name: sorted(one.models) for name, (one,) in listed.items()} == {
            "second": ["b"],
            "asked": ["a", "b"],
            "all": ["a", "b", "c"],
            "first": ["a", "c"],
        }
        assert "Without a, c, not trained in this cell: nbdist.save(what=[...])" in told["said"]

        (second,) = listed["second"]
        assert second.models == {"b": "Linear"}
        assert second.layouts == {"b": layout}
        assert second.others == {"opt_b": "SGD", "rate_b": "StepLR"}
        assert (second.step, second.world_size, second.damage) == (1, 2, "")

        def restored(name: str, order: str, **how: Any) -> tuple[dict[str, Any], str]:
            call = checkpoint_ranks.nets_restored
            found = ranks.run(call, str(tmp_path / name), order, layout, None, how)
            assert found[0] == found[1]
            return found[0]

        states, b = told["states"], {"b": told["states"]["b"]}
        assert restored("second", "b")[0] == b
        # Beside another model, which stays as it is.
        found, said = restored("second", "ab")
        assert found["b"] == b["b"]
        assert found["a"] != states["a"]
        assert "Here and not there is Linear (a): it stays as it is." in said
        # A stranger in the checkpoint is left out by what the refusal advises.
        _, said = restored("all", "b")
        assert "it has Linear (a), Linear-2 (c), Linear-3 (b); the training here Linear (b)" in said
        assert "or leave the rest out: nbdist.restore(only=['b'])" in said
        assert restored("all", "b", only=["b"])[0] == b
        assert restored("all", "bc", only=["b"])[0]["b"] == b["b"]
        _, said = restored("all", "b", only=["x"])
        assert (
            "UsageError: nbdist.restore takes models and optimizers that are trained here" in said
        )
        assert "those here are b, opt_b" in said
        _, said = restored("asked", "bc", only=["c"])
        assert "it has Linear (a), Linear-3 (b), the training here Linear-2 (c), each of" in said
