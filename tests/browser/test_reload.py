"""What a person sees of a training whose page was closed and opened again, or whose kernel ends."""

import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from nbdist.client.tracking.past.runs import runs
from tests.browser.lab import CONNECTED, Lab, OpenNotebook
from tests.browser.test_notebook import BOARD, KEPT, MOVED, PICTURE, TRAIN, WIDGET

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
    own.cell(index).output.locator(BOARD).get_by_text("step 50").wait_for()
    until_saved(own)

    again = own.opened_again()
    cell = again.cell(index)
    live = cell.output.locator(BOARD)
    live.wait_for()
    again.page.wait_for_function(MOVED.format(2), arg=index)
    live.get_by_text("step 150").wait_for()
    shown = cell.output.first.inner_text()
    assert [shown.count(f"step {step}\n") for step in (0, 50, 100, 150)] == [1, 1, 1, 1]
    assert shown.index("step 50\n") < shown.index("step 100\n") < shown.index("step 150")
    assert cell.output.locator(KEPT).is_hidden()
    assert not again.page.get_by_text("Loading widget").is_visible()
    cell.picture("reload-live")
    (own.path.parent / "enough").touch()

    cell.output.locator(PICTURE).wait_for()
    live.wait_for(state="detached")
    assert cell.text.count("step 0") == 1, "what was printed before, and again in the end"
    cell.picture("reload-ended")
    following = again.run("1 + 1").wait()
    assert "opened again" not in following.text, "the cell itself shows it"
    outputs = cell.saved_outputs()
    assert sum("image/png" in output.data for output in outputs) == 1
    assert any("│ step 50" in output.data.get("text/plain", "") for output in outputs)
    assert not any(WIDGET in output.data for output in outputs)

    # The next training of that page is like any: its prints stand beside its board.
    (own.path.parent / "enough").unlink()
    following = again.run(PRINTS)
    following.output.locator(BOARD).get_by_text("step 50").wait_for()
    assert following.output.get_by_text("step 0").is_visible()
    (own.path.parent / "enough").touch()
    assert "step 50" in following.wait().text
    again.close()


def until_saved(notebook: OpenNotebook) -> None:
    """Wait until the file has the board: JupyterLab's part of nbdist saves it."""
    deadline = time.monotonic() + 60
    while "nbdist-kept" not in notebook.path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)  # another process' file: there is no event to wait for


def test_a_page_is_found_again_that_was_reloaded_before_anyone_saved_it(own: OpenNotebook) -> None:
    index = own.run(PRINTS).index
    own.cell(index).output.locator(BOARD).get_by_text("step 50").wait_for()
    until_saved(own)

    again = own.opened_again()

    live = again.cell(index).output.locator(BOARD)
    live.get_by_text("step 150").wait_for()
    assert live.inner_text().count("step 0\n") == 1
    (own.path.parent / "enough").touch()
    again.cell(index).output.locator(PICTURE).wait_for()
    again.close()


def test_beside_a_window_that_shows_the_end_the_next_cell_does_not_show_it_again(
    own: OpenNotebook, lab: Lab, browser: Browser
) -> None:
    cell = own.run(PRINTS)
    cell.output.locator(BOARD).get_by_text("step 50").wait_for()
    until_saved(own)
    other = OpenNotebook(lab, browser, own.path.name)
    beside = other.cell(cell.index).output.locator(BOARD)
    beside.get_by_text("step 100").wait_for()

    (own.path.parent / "enough").touch()

    cell.wait().output.locator(PICTURE).wait_for()
    beside.get_by_text("Loss and communication time on 2 ranks").wait_for()
    assert "opened again" not in own.run("1 + 1").wait().text
    assert not other.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.context.model.dirty"
    ), "two windows with changes ask whose to keep"
    other.page.close()
    own.close()


def test_a_board_whose_outputs_are_cleared_comes_back_and_its_end_is_shown(
    own: OpenNotebook,
) -> None:
    cell = own.run(PRINTS)
    board = cell.output.locator(BOARD)
    board.get_by_text("step 50").wait_for()

    own.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    board.wait_for(state="detached")
    board.get_by_text("step 150").wait_for()
    assert board.inner_text().count("step 50\n") == 1
    own.page.wait_for_function(MOVED.format(2), arg=cell.index)

    (own.path.parent / "enough").touch()
    cell.wait().output.locator(PICTURE).wait_for()
    assert board.count() == 0
    assert cell.text.count("step 50\n") == 1
    own.close()


# As on a server that is far away: a save takes 2 s. People save when a board comes, and once more
# while the board's own save is under way.
SLOW = """
  const fetched = window.fetch;
  window.saves = 0;
  window.fetch = async (request, ...more) => {
    const answer = await fetched(request, ...more);
    if (request.method !== 'PUT' || !request.url.includes('/api/contents/')) return answer;
    window.saves += 1;
    if (window.isWaitedFor && window.saves === 2) press();
    await new Promise(done => setTimeout(done, 2000));
    return answer;
  };
  const press = () => window.jupyterapp.commands.execute('docmanager:save');
  document.addEventListener('nbdist-board-place', () => {
    [window.isWaitedFor, window.saves] = [true, 0];
    press();
  });
"""


def test_saves_beside_the_boards_own_raise_no_question(own: OpenNotebook) -> None:
    own.saved()
    own.page.add_init_script(SLOW)
    own.page.reload()
    own.page.wait_for_function(CONNECTED)
    cell = own.run(PRINTS)

    own.page.wait_for_function("() => window.saves >= 3")

    assert own.page.locator(".jp-Dialog").count() == 0
    assert cell.is_running
    (own.path.parent / "enough").touch()
    cell.wait()
    own.close()


def test_notebook_7_shows_the_board_and_finds_it_again(browser: Browser, tmp_path: Path) -> None:
    with Lab(tmp_path, "notebook") as server:
        own = OpenNotebook(server, browser)
        own.run(START).wait()
        index = own.run(PRINTS).index
        own.cell(index).output.locator(BOARD).get_by_text("step 50").wait_for()
        own.page.wait_for_function(MOVED.format(2), arg=index)
        until_saved(own)

        again = own.opened_again()

        live = again.cell(index).output.locator(BOARD)
        live.get_by_text("step 150").wait_for()
        again.cell(index).picture("notebook-7")
        (own.path.parent / "enough").touch()
        again.cell(index).output.locator(PICTURE).wait_for()
        again.close()


def test_a_page_that_is_opened_after_the_end_says_from_when_it_is_and_where_the_end_is(
    own: OpenNotebook,
) -> None:
    index = own.run(PRINTS.replace("--no-track", "--run closed")).index
    own.cell(index).output.locator(BOARD).get_by_text("step 50").wait_for()
    until_saved(own)
    own.page.close()
    (own.path.parent / "enough").touch()
    deadline = time.monotonic() + 60
    while not (found := runs(own.path.parent / ".nbdist")) or found[0].state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)  # another process' file: there is no event to wait for

    again = own.opened_again()
    kept = again.cell(index).output.locator(KEPT)
    kept.wait_for()
    assert "The board as it was at" in kept.inner_text()
    assert "%dist board shows what is known now" in kept.inner_text()
    again.page.get_by_text("Loading widget").wait_for(state="hidden")
    again.cell(index).picture("opened-after-the-end")
    board = again.run("%dist board").wait()
    board.output.locator(BOARD).get_by_text(f"over {found[0].steps:,} steps").wait_for()
    assert "step 50" in again.run("nbdist.current().last[0].show()").wait().text
    again.close()


def test_a_kernel_that_restarts_in_mid_training_leaves_a_last_frame_that_says_so(
    own: OpenNotebook,
) -> None:
    cell = own.run(TRAIN)
    live = cell.output.locator(BOARD)
    live.wait_for()
    own.page.wait_for_function(MOVED.format(2), arg=cell.index)

    own.restart_kernel()

    live.get_by_text("The kernel was restarted or has ended while this cell ran").wait_for()
    assert live.get_by_role("button", name="Stacks").is_hidden()
    last = own.page.evaluate(
        "() => document.querySelector('.nbdist-board').parentElement.nbdist.steps()"
    )
    assert last[1] > 1, "its points are still there"
    live.locator("canvas").first.hover()
    live.locator(".nb-tip:visible").first.wait_for()
    cell.picture("restarted")
    own.close()
