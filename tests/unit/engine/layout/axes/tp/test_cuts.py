"""A tensor-parallel plan as values: who owns a pair, and how people read it."""

from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    HEAD,
    ROW,
    VOCAB,
    ColumnRowPair,
    Cut,
    TensorPlan,
)


def test_a_pair_is_owned_by_the_innermost_module_that_holds_it() -> None:
    assert (
        ColumnRowPair(("blocks.0.attn.q", "blocks.0.attn.k"), "blocks.0.attn.out").owner
        == "blocks.0.attn"
    )
    assert ColumnRowPair(("blocks.0.up",), "blocks.0.mlp.down").owner == "blocks.0"
    assert ColumnRowPair(("0",), "2").owner == ""


def test_a_plan_shows_each_repeated_module_once_with_its_reason() -> None:
    cuts = [Cut(f"blocks.{i}.up", COLUMN, "feeds a row") for i in range(12)]
    plan = TensorPlan("tracing one forward", (*cuts, Cut("head", HEAD, "makes the logits")))
    assert str(plan) == (
        "tp cuts, by tracing one forward:\n"
        "  blocks.*.up  column: feeds a row (12 times)\n"
        "  head         head: makes the logits"
    )


def test_a_module_kept_whole_says_why() -> None:
    plan = TensorPlan(
        "your plan", (Cut("token", VOCAB, "by your plan"), Cut("down", ROW, "by your plan"))
    )
    kept = plan.without("token", "37 entries are not divisible by 2")
    assert kept.style_of("token") is None
    assert kept.style_of("down") == ROW
    assert "token  whole: 37 entries are not divisible by 2" in str(kept)


def test_a_cut_added_takes_the_place_of_one_of_the_same_module() -> None:
    plan = TensorPlan("your plan", (Cut("head", COLUMN, "first"),)).with_cuts(
        [Cut("head", HEAD, "second")]
    )
    assert plan.cuts == (Cut("head", HEAD, "second"),)
