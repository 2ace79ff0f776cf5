"""What a person sees of a training whose page was closed and opened again, or whose kernel ends."""

import time

import pytest
from playwright.sync_api import Browser

from nbdist.client.tracking.past.runs import runs
from tests.browser.lab import Lab, OpenNotebook
from tests.browser.test_notebook import TRAIN, WIDGET

pytestmark = pytest.mark.browser

PRINTS = TRAIN.replace(
    "    time.sleep(0.02)",
    "    if step % 50 == 0:\n        print('step', step)\n    time.sleep(0.02)",
)
START = "%load_ext nbdist\n%dist start -n 2 --device cpu"


@pytest.fixture
def own(lab: Lab, browser: Browser) -> OpenNotebook:
    """A notebook with two ranks and a kernel that a test may do anything to."""
    notebook = OpenNotebook(lab, browser)
    assert "Started 2 ranks" in notebook.run(START).wait().text
    (notebook.path.parent / "enough").unlink(missing_ok=True)
    return notebook


def test_a_page_that_is_opened_again_shows_the_training_go_on_and_how_it_ended(
    own: OpenNotebook,
) -> None:
    index = own.run(PRINTS).index
    own.cell(index).output.get_by_text("step 50").wait_for()
    own.cell(index).output.locator(".nbdist-live .widget-image").wait_for()
    own.saved()

    again = own.opened_again()
    cell = again.cell(index)
    live = cell.output.locator(".nbdist-live")
    live.locator(".widget-image").wait_for()
    frame = "document.querySelector('.nbdist-live .widget-image').src"
    before = again.page.evaluate(frame)
    again.page.wait_for_function(f"before => {frame} !== before", arg=before)
    assert cell.output.locator(".nbdist-kept").is_hidden()
    assert not again.page.get_by_text("Loading widget").is_visible()
    cell.picture("reload-live")
    (own.path.parent / "enough").touch()

    live.get_by_text("Loss and communication time on 2 ranks").wait_for()
    assert live.locator("img:visible").count() == 1
    shown = cell.output.first.inner_text()
    assert shown.count("step 0") == 1, "what was printed before, and again in the end"
    cell.picture("reload-ended")

    # The page could not be told; so the file gets it with the next cell, once.
    following = again.run("1 + 1").wait()
    following.output.get_by_text("The page was opened again").wait_for()
    following.output.locator("img:visible").wait_for()
    outputs = following.saved_outputs()
    assert sum("image/png" in output.data for output in outputs) == 1
    assert any("│ step 50" in output.data.get("text/plain", "") for output in outputs)
    assert not any(WIDGET in output.data for output in outputs)
    following.picture("reload-next-cell")
    assert again.run("1 + 1").wait().text.strip().endswith("2")
    assert "opened again" not in again.cell(following.index + 1).text

    # The next training of that page is like any: its prints stand beside its board.
    (own.path.parent / "enough").unlink()
    following = again.run(PRINTS)
    following.output.locator(".nbdist-live .widget-image").wait_for()
    following.output.get_by_text("step 50").wait_for()
    assert following.output.get_by_text("step 0").is_visible()
    (own.path.parent / "enough").touch()
    assert "step 50" in following.wait().text
    again.close()


def test_a_page_that_is_opened_after_the_end_says_from_when_it_is_and_where_the_end_is(
    own: OpenNotebook,
) -> None:
    index = own.run(PRINTS.replace("--no-track", "--run closed")).index
    own.cell(index).output.locator(".nbdist-live .widget-image").wait_for()
    own.cell(index).output.get_by_text("step 50").wait_for()
    own.saved()
    own.page.close()
    (own.path.parent / "enough").touch()
    deadline = time.monotonic() + 60
    while not (found := runs(own.path.parent / ".nbdist")) or found[0].state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)  # another process' file: there is no event to wait for

    again = own.opened_again()
    kept = again.cell(index).output.locator(".nbdist-kept")
    kept.locator("img").wait_for()
    assert "The board as it was at" in kept.inner_text()
    assert "%dist board shows what is known now" in kept.inner_text()
    again.page.get_by_text("Loading widget").wait_for(state="hidden")
    again.cell(index).picture("opened-after-the-end")
    board = again.run("%dist board").wait()
    board.output.get_by_text(f"Step {found[0].steps:,}, loss").wait_for()
    assert "step 50" in again.run("nbdist.current().last[0].show()").wait().text
    again.close()


def test_a_kernel_that_restarts_in_mid_training_leaves_a_last_frame_that_says_so(
    own: OpenNotebook,
) -> None:
    cell = own.run(TRAIN)
    live = cell.output.locator(".nbdist-live")
    live.locator(".widget-image").wait_for()

    own.restart_kernel()

    own.page.wait_for_function(
        "() => getComputedStyle(document.querySelector('.nbdist-live'), '::before')"
        ".content.includes('The kernel was restarted or has ended')"
    )
    icons = own.page.evaluate(
        "() => [...document.querySelectorAll('.nbdist-live .jupyter-widgets-disconnected')]"
        ".filter(e => getComputedStyle(e, '::before').content !== 'none').length"
    )
    assert icons == 0, "broken links"
    assert live.locator(".widget-image").is_visible()
    cell.picture("restarted")
    own.close()
