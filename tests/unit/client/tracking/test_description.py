"""What a run's page says of it."""

import json
import re
from urllib.parse import parse_qs, urlsplit

from nbdist.client.tracking.names import rank_metric
from nbdist.client.tracking.shipping import view
from nbdist.client.tracking.shipping.description import RUN_ID, addressed, description

VALUES = {"loss": 0.12345, "step_ms": 12.34, "comm_pct": 13.4, "wait_pct": 5.0}
CHARTS = (
    "#/experiments/{experiment_id}/runs?viewStateShareKey=nbdist&compareRunsMode=CHART"
    "&workflowType=machine_learning"
)
FACTS = {"world_size": "2", "layout": "fsdp=2", "proof": "equal bit for bit"}


def test_it_begins_with_the_picture_and_has_numbers_verdict_layout_and_proof() -> None:
    said = description("finished", 300, VALUES, FACTS, ["Rank 1 is slow."], has_picture=True)
    picture, ended, *others = said.split("\n\n")
    assert picture == f"![The board](get-artifact?path=board.png&run_uuid={RUN_ID})"
    assert ended.split("  \n") == [
        "Finished after 300 steps, last loss 0.123, 12.3 ms per step, 13 % of it in communication.",
        "**Rank 1 is slow.**",
    ]
    assert others == [
        "**Layout:** fsdp=2 on 2 ranks",
        "**Proof** (`layout.verify`): equal bit for bit",
        f"[Charts of all runs]({CHARTS})",
    ]


def test_a_link_draws_all_ranks_of_a_quantity_in_one_chart() -> None:
    keys = {"loss", "rank_loss/00", "rank_loss/01", "rank_comm_ms/00", "rank_comm_ms/01"}
    said = description("finished", 9, VALUES, FACTS, [], keys=keys, has_picture=False)
    (line,) = [line for line in addressed(said, "r1", "7").split("\n\n") if "in one chart" in line]
    links = dict(re.findall(r"\[([\w ]+)\]\((\S+)\)", line))
    assert list(links) == ["comm_ms", "loss"]
    query = parse_qs(urlsplit(links["loss"].removeprefix("#")).query)
    asked = {name: json.loads(query[name][0]) for name in ("runs", "experiments", "metric")}
    assert asked == {"runs": ["r1"], "experiments": ["7"], "metric": "rank_loss/00"}
    assert json.loads(query["plot_metric_keys"][0]) == ["rank_loss/00", "rank_loss/01"]


def test_many_ranks_are_drawn_by_their_spread_and_one_rank_has_no_link() -> None:
    spread = {f"rank_loss/{part}" for part in ("min", "median", "max", "argmax")}
    said = description("finished", 9, VALUES, FACTS, [], keys=spread, has_picture=False)
    assert "rank_loss%2Fmedian" in said
    assert "argmax" not in said
    said = description("finished", 9, VALUES, FACTS, [], keys={"rank_loss/00"}, has_picture=False)
    assert "in one chart" not in said


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


def test_words_from_outside_are_no_markdown_and_cut_no_address() -> None:
    quantities = ("loss", "comm_ms", "wait_ms", "step_ms", "data_ms")
    keys = {rank_metric(quantity, rank) for quantity in quantities for rank in range(16)}
    verdict = "<b>[a](b) *c*" + "x" * 9000
    said = description("failed", 3, {}, FACTS, [verdict], keys=keys, has_picture=True)
    assert "\\<b\\>\\[a\\](b) \\*c\\*" in said
    assert said.startswith(f"![The board](get-artifact?path=board.png&run_uuid={RUN_ID})\n\n")
    assert said.endswith(f"[Charts of all runs]({CHARTS})")
    assert len(addressed(said, 32 * "a", 19 * "1")) < view.MOST_CHARACTERS


def test_what_was_changed_by_hand_is_in_it() -> None:
    said = description(
        "finished", 9, {}, {}, [], ["lr 0.1 -> 0.01 after step 5"], has_picture=False
    )
    assert "**Changed by hand:** lr 0.1 -\\> 0.01 after step 5" in said
