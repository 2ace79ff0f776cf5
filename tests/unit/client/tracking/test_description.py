"""What a run's page says of it."""

from nbdist.client.tracking.shipping.description import (
    MOST_CHARACTERS,
    RUN_ID,
    addressed,
    description,
)

VALUES = {"loss": 0.12345, "step_ms": 12.34, "comm_pct": 13.4, "wait_pct": 5.0}
CHARTS = (
    "#/experiments/{experiment_id}/runs?viewStateShareKey=nbdist&compareRunsMode=CHART"
    "&workflowType=machine_learning"
)
FACTS = {"world_size": "2", "layout": "fsdp=2", "proof": "equal bit for bit"}


def test_it_has_verdict_numbers_layout_proof_and_picture() -> None:
    said = description("finished", 300, VALUES, FACTS, ["Rank 1 is slow."], has_picture=True)
    first, *others = said.split("\n\n")
    assert first.split("  \n") == [
        "Finished after 300 steps, loss 0.123, 12.3 ms per step, 13 % of it in communication.",
        "**Rank 1 is slow.**",
    ]
    assert others == [
        "**Layout:** fsdp=2 on 2 ranks",
        "**Proof** (`layout.verify`): equal bit for bit",
        f"[Charts of all runs]({CHARTS})",
        f"![The board](get-artifact?path=board.png&run_uuid={RUN_ID})",
    ]


def test_what_is_not_known_is_not_said() -> None:
    said = description("interrupted", 1, {}, {"world_size": "1"}, [], has_picture=False)
    known, _, charts = said.rpartition("\n\n")
    assert known == "Interrupted after 1 step.\n\n**Ranks:** 1 rank"
    assert addressed(charts, "r", "7").startswith("[Charts of all runs](#/experiments/7/runs?")


def test_that_no_rank_stands_out_is_said_when_enough_steps_were_compared() -> None:
    def said(steps: int) -> str:
        return description("finished", steps, VALUES, FACTS, [], has_picture=False)

    assert "stands out" not in said(9)
    assert said(90).splitlines()[1] == "No rank stands out over the last 50 steps."


def test_words_from_outside_are_no_markdown_and_leave_room_for_the_picture() -> None:
    said = description("failed", 3, {}, FACTS, ["<b>[a](b) *c*" + "x" * 9000], has_picture=True)
    assert "\\<b\\>\\[a\\](b) \\*c\\*" in said
    assert len(said) < MOST_CHARACTERS + 250
    assert said.endswith(f"{RUN_ID})")
