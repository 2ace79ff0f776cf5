"""`%dist ui`: MLflow's UI on loopback, and the page it opens with."""

import io
import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from nbdist.client.metrics.analysis.values import Analysis, ExplainedStep, RankStep, Straggler
from nbdist.client.tracking.run import RunLink, Tracker
from nbdist.client.tracking.shipping.ui import start_ui
from nbdist.client.tracking.shipping.view import MOST_CHARACTERS, encode, view_state
from nbdist.client.tracking.shipping.view import page as view_page
from tests.tracking.conftest import Ranks, cell

if TYPE_CHECKING:
    from playwright.sync_api import Page

VERDICT = "Rank 3 takes 1.5 times as long per step as its peers: it computes longer."
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def ui(make_home: Callable[[], Path]) -> Iterator[tuple[Path, str, str]]:
    """Two runs and a study of three, and the UI opened on it: (folder, address, a run's id)."""
    home = make_home()
    tracker = Tracker(home, experiment="02_train")
    for lr in (0.03, 0.1):
        link = train(tracker, params={"lr": lr})
    study = tracker.begin_study("lr-sweep", "train()", {"lr": [1, 2, 3]})
    for lr in (1, 2, 3):
        train(tracker, params={"lr": lr}, run_name=f"lr{lr}", study=study.key)
    study.finish("finished", None, [{"run": "lr1", "loss": 0.1}], "lr1 has the lowest loss.")
    assert tracker.flush(60), (home / "logs/tracking.log").read_text()
    tracker.close(5)
    url, process = start_ui(home)
    assert process is not None
    try:
        yield home, url, link.run_id
    finally:
        os.killpg(process.pid, 9)
        process.wait(10)


def train(tracker: Tracker, **info: Any) -> RunLink:
    """Track a run of 100 steps, in which all ranks wait for the last one."""
    ranks = Ranks(4, {"layout": "ddp", "proof": "equal within round-off over 3 steps"})
    run = tracker.follow(cell(ranks=4, **info), ranks.telemetry, Known())  # type: ignore[arg-type]
    for step in range(1, 101):
        ranks.step()
        waiting = {rank: 3.0 - rank for rank in range(4)}
        run.explained([ExplainedStep(step, waiting, dict.fromkeys(range(4), 0.5), 3.0, 3)])
    ranks.log(accuracy=0.9)
    link = run.finish("finished", picture=picture())
    assert link is not None
    return link


class Known:
    """Stands where a cell's analysis stands: what is known of these steps in the end."""

    def subscribe(self, hear: object) -> None:
        """Tell nothing of each step."""

    def now(self) -> Analysis:
        """Return who waited, and for whom."""
        parts = {rank: {"waiting": 3.0 - rank} for rank in range(4)}
        return Analysis(
            ranks=tuple(RankStep(rank, 10.0, parts[rank]) for rank in range(4)),
            verdicts=(Straggler(3, "forward", 0.5, VERDICT, 1),),
        )


def picture() -> bytes:
    """Return a PNG as large as a board."""
    out = io.BytesIO()
    Image.new("RGB", (960, 296), "#176f65").save(out, "png")
    return out.getvalue()


def test_the_address_opens_the_experiments_charts(ui: tuple[Path, str, str]) -> None:
    _, url, _ = ui
    assert url.startswith("http://127.0.0.1:")
    assert url.endswith(
        "/#/experiments/1/runs?viewStateShareKey=nbdist&compareRunsMode=CHART"
        "&workflowType=machine_learning"
    )


def test_the_ui_shows_a_runs_artifacts(ui: tuple[Path, str, str]) -> None:
    _, url, run_id = ui
    address = f"{url.partition('/#')[0]}/get-artifact?path=cell.py&run_uuid={run_id}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.read() == cell().source.encode()


def test_the_views_size_stays_below_mlflows_limit_for_a_tag() -> None:
    summaries = [
        {
            "ranks": range(16),
            "user_keys": [f"a_rather_long_metric_name_{i:03d}" for i in range(100)],
            "params": [f"a_rather_long_parameter_name_{i:03d}" for i in range(100)],
        }
    ]
    state = view_state(summaries)
    assert len(encode(state)) < MOST_CHARACTERS
    assert any(c["metricKey"] == "rank_device_w/00" for c in state["compareRunCharts"])


@pytest.mark.parametrize("quantity", ["allocated", "reserved", "peak", "total"])
def test_the_memory_of_gpus_has_charts_where_ranks_are_not_many(quantity: str) -> None:
    charts = view_state([{"ranks": range(8), "user_keys": ["accuracy"]}])["compareRunCharts"]
    (found,) = [c for c in charts if c["metricKey"] == f"rank_device_{quantity}_mb/00"]
    assert len(found["selectedMetricKeys"]) == 8


@pytest.fixture(scope="module")
def page(ui: tuple[Path, str, str]) -> Iterator["Page"]:
    """The page that the address opens, in a real browser."""
    if CHROMIUM is None:
        pytest.skip("Chromium is missing")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"],
        )
        # MLflow's assistant opens by itself and takes a quarter of such a window.
        page = browser.new_context(viewport={"width": 1400, "height": 2000}).new_page()
        page.goto(ui[1])
        page.get_by_text("ddp-w4-lr0.03").first.wait_for(timeout=60_000)
        page.locator(".js-plotly-plot").first.wait_for(timeout=30_000)
        yield page
        browser.close()


def keep(page: "Page", tmp_path: Path, name: str) -> None:
    """Keep a picture of the page where NBDIST_SCREENSHOTS says, else with the test."""
    folder = os.environ.get("NBDIST_SCREENSHOTS")
    page.screenshot(path=(Path(folder) if folder else tmp_path) / name)


@pytest.mark.browser
def test_the_page_opens_on_the_charts_that_explain_a_training(page: "Page", tmp_path: Path) -> None:
    for title in ("Summary", "loss", "samples_per_s", "comm_pct", "skew_ms", "wait_pct"):
        page.get_by_text(title, exact=True).first.wait_for(timeout=30_000)
    page.get_by_text("Per rank", exact=True).first.wait_for(timeout=30_000)
    for title in ("comm_ms of each rank", "wait_ms of each rank"):
        page.get_by_text(title, exact=True).first.wait_for(timeout=30_000)
    keep(page, tmp_path, "mlflow_view.png")


@pytest.mark.browser
def test_beside_the_assistant_two_charts_a_row_are_wide_and_their_titles_whole(
    page: "Page",
) -> None:
    page.get_by_text("MLflow Assistant").wait_for(timeout=30_000)
    title = page.get_by_text("wait_pct", exact=True).first
    title.wait_for(timeout=30_000)
    boxes = [chart.bounding_box() for chart in page.locator(".js-plotly-plot").all()[:4]]
    known = [box for box in boxes if box is not None]
    assert len({box["x"] for box in known}) == 2
    assert min(box["width"] for box in known) > 300
    assert title.evaluate("t => t.scrollWidth <= t.clientWidth")


@pytest.mark.browser
def test_the_runs_of_a_study_are_in_the_charts_and_nested_by_date(
    page: "Page", tmp_path: Path
) -> None:
    page.locator('[data-component-id$="table_resizer.collapse"]').click()  # the list of runs
    loss = page.locator(".js-plotly-plot").first
    for name in ("lr1", "lr2", "lr3"):
        page.get_by_role("link", name=name, exact=True).first.wait_for(timeout=30_000)
    # A folded study would leave three: itself, with nothing to draw, and the two other runs.
    page.wait_for_function("p => p.data.length >= 5", arg=loss.element_handle(), timeout=30_000)
    keep(page, tmp_path, "mlflow_study.png")
    page.get_by_text("Sort: Source").click()
    page.get_by_text("Created", exact=True).first.click()
    page.get_by_role("link", name="lr2", exact=True).first.wait_for(state="detached")
    page.get_by_role("link", name="lr-sweep", exact=True).first.wait_for()
    keep(page, tmp_path, "mlflow_study_nested.png")


@pytest.mark.browser
def test_a_runs_page_begins_with_the_board_and_says_who_made_others_wait(
    page: "Page", ui: tuple[Path, str, str], tmp_path: Path
) -> None:
    _, url, run_id = ui
    page.goto(f"{url.partition('/#')[0]}/#/experiments/1/runs/{run_id}")
    for said in (VERDICT, "Layout:", "ddp on 4 ranks", "equal within round-off over 3 steps"):
        page.get_by_text(said).first.wait_for(timeout=30_000)
    board = page.locator('img[src*="board.png"]')  # MLflow drops its alternative text
    board.wait_for(timeout=30_000)
    page.wait_for_function(
        "board => board.naturalWidth === 960", arg=board.element_handle(), timeout=30_000
    )
    keep(page, tmp_path, "mlflow_run_folded.png")
    page.get_by_text("Show more").click()
    keep(page, tmp_path, "mlflow_run.png")
    texts = ("Finished after 100 steps", VERDICT, "Layout:")
    below = [board, *(page.get_by_text(text).first for text in texts)]
    places = [box["y"] for part in below if (box := part.bounding_box())]
    assert places == sorted(places)
    assert len(places) == len(below)
    back = page.get_by_role("link", name="Charts of all runs")
    assert back.get_attribute("href") == view_page("1").lstrip("/")


@pytest.mark.browser
def test_a_link_in_a_runs_description_draws_its_ranks_in_one_chart(
    page: "Page", ui: tuple[Path, str, str], tmp_path: Path
) -> None:
    _, url, run_id = ui
    page.goto(f"{url.partition('/#')[0]}/#/experiments/1/runs/{run_id}")
    page.get_by_text("Finished after 100 steps").first.wait_for(timeout=30_000)
    if (more := page.get_by_text("Show more")).is_visible():
        more.click()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="comm_ms", exact=True).click()
    chart = opened.value.locator(".js-plotly-plot")
    chart.first.wait_for(timeout=30_000)
    for rank in range(4):
        opened.value.get_by_text(f"(rank_comm_ms/{rank:02d})").first.wait_for(timeout=30_000)
    assert chart.count() == 1
    keep(opened.value, tmp_path, "mlflow_ranks.png")


def test_ranks_that_stand_beside_the_first_one_get_no_chart_of_their_own() -> None:
    charts = view_state([{"ranks": [0, 1]}])["compareRunCharts"]
    (loss,) = [chart for chart in charts if chart["metricKey"] == "rank_loss/00"]
    assert loss["selectedMetricKeys"] == ["rank_loss/00", "rank_loss/01"]
    # MLflow adds a chart of each metric that none begins with, also where that one is deleted.
    assert [c["deleted"] for c in charts if c["metricKey"] == "rank_loss/01"] == [True]


@pytest.mark.parametrize(("ranks", "whose"), [(2, "each rank"), (17, "the ranks")])
def test_a_chart_of_ranks_is_titled_by_its_quantity(ranks: int, whose: str) -> None:
    charts = view_state([{"ranks": range(ranks)}])["compareRunCharts"]
    (comm,) = [c for c in charts if c["displayName"].startswith("comm_ms")]
    assert comm["displayName"] == f"comm_ms of {whose}"
    assert len(comm["selectedMetricKeys"]) == min(ranks, 3)


def test_waiting_stands_beside_loss_and_throughput() -> None:
    state = view_state([{"ranks": [0, 1]}])
    keys = [chart["metricKey"] for chart in state["compareRunCharts"]]
    assert keys[:5] == ["loss", "samples_per_s", "comm_pct", "skew_ms", "wait_pct"]
    assert "rank_wait_ms/00" in keys


@pytest.mark.parametrize(("ranks", "charts"), [(2, 1), (17, 0)])
def test_devices_have_a_chart_of_all_ranks_where_there_are_series_of_them(
    ranks: int, charts: int
) -> None:
    state = view_state([{"ranks": range(ranks)}])
    shown = [c for c in state["compareRunCharts"] if "rank_device_c/01" in c["selectedMetricKeys"]]
    assert [chart["metricKey"] for chart in shown if not chart["deleted"]] == [
        "rank_device_c/00"
    ] * charts
