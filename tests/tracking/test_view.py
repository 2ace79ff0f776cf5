"""`%dist ui`: MLflow's UI on loopback, and the page it opens with."""

import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.client.tracking import Tracker, start_ui
from nbdist.client.tracking.view import MOST_CHARACTERS, encode, view_state
from tests.tracking.conftest import Ranks, cell

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def ui(make_home: Callable[[], Path]) -> Iterator[tuple[Path, str, str]]:
    """A notebook with two runs, and the UI opened on it: (folder, address, a run's id)."""
    home = make_home()
    tracker = Tracker(home, experiment="02_train")
    for lr in (0.03, 0.1):
        ranks = Ranks(4, {"layout": "ddp"})
        run = tracker.follow(cell(ranks=4, params={"lr": lr}), ranks.telemetry)
        ranks.step(100)
        ranks.log(accuracy=0.9)
        link = run.finish("finished")
    assert link is not None
    assert tracker.flush(60), (home / "logs/tracking.log").read_text()
    tracker.close(5)
    url, process = start_ui(home)
    assert process is not None
    try:
        yield home, url, link.run_id
    finally:
        os.killpg(process.pid, 9)
        process.wait(10)


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
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.read() == cell().source.encode()


def test_the_views_size_stays_below_mlflows_limit_for_a_tag() -> None:
    summaries = [
        {
            "ranks": range(16),
            "user_keys": [f"a_rather_long_metric_name_{i:03d}" for i in range(100)],
            "params": [f"a_rather_long_parameter_name_{i:03d}" for i in range(100)],
        }
    ]
    assert len(encode(view_state(summaries))) < MOST_CHARACTERS


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing")
def test_the_page_opens_with_one_chart_for_all_ranks(
    ui: tuple[Path, str, str], tmp_path: Path
) -> None:
    from playwright.sync_api import sync_playwright

    _, url, _ = ui
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"],
        )
        page = browser.new_context(viewport={"width": 1500, "height": 1100}).new_page()
        page.add_init_script(
            "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1','true')"
        )
        page.goto(url)
        page.get_by_text("ddp-w4-lr0.03").first.wait_for(timeout=60_000)
        page.get_by_text("Per rank", exact=True).first.wait_for(timeout=30_000)
        page.get_by_text("Summary", exact=True).first.wait_for(timeout=30_000)
        page.locator(".js-plotly-plot").first.wait_for(timeout=30_000)
        keep = os.environ.get("NBDIST_SCREENSHOTS")
        page.screenshot(path=(Path(keep) if keep else tmp_path) / "mlflow_view.png")
        browser.close()


def test_waiting_stands_beside_loss_and_throughput() -> None:
    state = view_state([{"ranks": [0, 1]}])
    keys = [chart["metricKey"] for chart in state["compareRunCharts"]]
    assert keys[:5] == ["loss", "samples_per_s", "comm_pct", "skew_ms", "wait_pct"]
    assert "rank_wait_s/00" in keys
