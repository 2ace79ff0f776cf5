"""What a person sees in JupyterLab while a cell runs, when it has ended, and on another day."""

import re

import pytest

from tests.browser.conftest import Reopen
from tests.browser.lab import OpenNotebook

pytestmark = pytest.mark.browser

WIDGET = "application/vnd.jupyter.widget-view+json"
BOARD = ".nbdist-board"
KEPT = "[class^=nbdist-kept]"
# Points come: how often the board has drawn other ones.
MOVED = """index => {{
  const board = window.jupyterapp.shell.currentWidget.content.widgets[index].node
    .querySelector('.nbdist-board')?.parentElement?.nbdist;
  if (!board) return false;
  const last = board.steps()?.[1];
  if (last !== board.seenStep) [board.seenStep, board.seen] = [last, (board.seen ?? 0) + 1];
  return board.seen > {0};
}}"""
PICTURE = '.nbdist-auto img[width="960"]'  # of a board that has ended, in a wide window

# The height of small letters in the picture, how many pictures are seen, and whether they scroll.
_LETTERS = """([output]) => {
  const frame = output.querySelector('.nbdist-auto');
  const seen = [...frame.querySelectorAll('img')].filter(image => image.clientWidth > 0);
  const composed = seen[0].getAttribute("width") === "960" ? 960 : 500;
  const letters = 8 / 72 * 100 * seen[0].clientWidth / composed;
  return [letters, seen.length, frame.scrollWidth > frame.clientWidth];
}"""

# Trains until the file "enough" is there: a test decides when it has seen enough.
TRAIN = """%%distributed --no-track
import itertools, pathlib, time
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 1)
nbdist.parallelize(model, "ddp")
torch.manual_seed(rank)  # other samples on each rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
weights = torch.arange(16.0)[:, None] / 16
for step in itertools.count():
    x = torch.randn(64, 16)
    loss = nn.functional.mse_loss(model(x), x @ weights)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)  # a step of a larger model
    enough = torch.tensor(pathlib.Path("enough").exists(), dtype=torch.uint8)
    dist.all_reduce(enough)
    if enough:
        break
"""


def test_a_cell_prints_while_it_runs_and_leaves_one_tidy_block(notebook: OpenNotebook) -> None:
    cell = notebook.run(
        "%%distributed\n"
        "import time\n"
        "for i in range(3):\n"
        "    print(f'epoch {i}')\n"
        "    time.sleep(0.5)\n"
        "print(f'my share: {rank + 1}/{world_size}')"
    ).wait()

    while_running = [s["text"] for s in cell.states if s["is_running"]]
    assert any("epoch 0" in t and "epoch 2" not in t for t in while_running)
    tidy = (
        "ranks 0-1 │ epoch 0\n"
        "          │ epoch 1\n"
        "          │ epoch 2\n"
        "rank 0    │ my share: 1/2\n"
        "rank 1    │ my share: 2/2"
    )
    assert cell.text == tidy
    [output] = cell.saved_outputs()
    assert output.data == {"text/plain": tidy}
    cell.picture("text", whole=True)


def test_the_board_opens_by_itself_moves_and_leaves_its_picture(
    notebook: OpenNotebook, reopen: Reopen
) -> None:
    (notebook.path.parent / "enough").unlink(missing_ok=True)
    cell = notebook.run(TRAIN)
    cell.output.locator(BOARD).wait_for()
    notebook.page.wait_for_function(MOVED.format(3), arg=cell.index)
    assert cell.is_running
    cell.picture("board-live")
    assert cell.output.locator(KEPT).is_hidden(), "while its widget lives"
    early = reopen(notebook)  # the file of now, in a page without this widget
    kept = early.cell(cell.index).output.locator(KEPT)
    kept.wait_for()
    assert "The board as it was at" in kept.inner_text()
    early.page.get_by_text("Loading widget").wait_for(state="detached")
    assert not early.page.get_by_text("Error displaying widget").is_visible()
    early.close()
    (notebook.path.parent / "enough").touch()
    cell.wait()

    sentence = r"Loss and communication time on 2 ranks over [\d,]+ steps\."
    cell.output.locator(PICTURE).wait_for()
    assert cell.output.locator(PICTURE).count() == 1
    assert cell.output.locator(f"{BOARD}, .jp-OutputArea-output.jupyter-widgets").count() == 0
    cell.output.get_by_text(re.compile(sentence)).wait_for()
    picture, caption = cell.saved_outputs()
    assert picture.data.keys() == {"text/html", "image/png", "text/plain"}
    assert re.fullmatch(sentence, caption.data["text/plain"])
    cell.picture("board-static")
    for width in (600, 960, 1400, 2000):
        notebook.page.set_viewport_size({"width": width, "height": 1000})
        letters_px, is_seen, scrolls = cell.output.evaluate_all(_LETTERS)
        assert (letters_px >= 9.9, is_seen, scrolls) == (True, 1, False), width
    notebook.page.set_viewport_size({"width": 1280, "height": 1000})
    assert cell.output.get_by_alt_text(re.compile(sentence)).count() == 1

    later = reopen(notebook)
    again = later.cell(cell.index)
    again.output.locator(PICTURE).wait_for()
    assert again.output.locator(PICTURE).evaluate("image => image.naturalWidth") > 900
    again.output.get_by_text(re.compile(sentence)).wait_for()
    assert "Error displaying widget" not in later.page.locator(".jp-Notebook").inner_text()
    again.picture("board-reopened")
    later.close()


def test_a_chosen_view_is_live_and_its_buttons_work_between_cells(
    notebook: OpenNotebook, reopen: Reopen
) -> None:
    notebook.run('%config NBDist.view = "step"').wait()
    (notebook.path.parent / "enough").unlink(missing_ok=True)
    cell = notebook.run(TRAIN)
    cell.output.locator(BOARD).wait_for()
    cell.output.get_by_text("waits for").first.wait_for()
    assert cell.is_running
    cell.picture("view-step-live")
    (notebook.path.parent / "enough").touch()
    cell.wait()
    cell.output.get_by_text(
        re.compile(r"Step-time breakdown on 2 ranks over [\d,]+ steps\.")
    ).wait_for()
    cell.picture("view-step-static")

    board = notebook.run("%dist board").wait()
    button = board.output.get_by_role("radio", name="step")
    button.focus()
    notebook.page.keyboard.press("ArrowRight")
    board.output.get_by_role("table").get_by_text("all_reduce").first.wait_for()
    assert board.output.get_by_role("columnheader", name="busbw").count() == 1
    assert board.output.locator(PICTURE).is_hidden(), "while its widget lives"
    board.picture("view-collectives")
    early = reopen(notebook)  # the file as JupyterLab saves it by itself meanwhile
    early.cell(board.index).output.locator(PICTURE).wait_for()
    assert "Error displaying widget" not in early.page.locator(".jp-Notebook").inner_text()
    early.close()

    notebook.run("1 + 1").wait()
    board.output.get_by_text("Collectives on 2 ranks over").wait_for()
    assert board.output.locator(BOARD).count() == 0
    assert not any(WIDGET in o.get("data", {}) for o in board.saved_outputs())
    later = reopen(notebook)
    again = later.cell(board.index)
    again.output.locator(PICTURE).wait_for()
    again.output.get_by_role("table").wait_for()
    assert "Error displaying widget" not in later.page.locator(".jp-Notebook").inner_text()
    again.picture("view-reopened")
    later.close()


def test_a_past_board_that_nobody_leaves_gives_way_to_its_picture(notebook: OpenNotebook) -> None:
    notebook.run("from nbdist.client.board.live import past_board\npast_board.IDLE_S = 2").wait()
    board = notebook.run('%config NBDist.view = "overview"\n%dist board').wait()

    board.output.locator(BOARD).wait_for(state="detached")

    assert not any(WIDGET in o.get("data", {}) for o in board.saved_outputs())
    board.output.get_by_text(re.compile("Loss and communication time on 2 ranks")).wait_for()
    board.output.get_by_role("table").wait_for()
    board.picture("buttons-gone")


def test_interrupting_a_training_cell_ends_it_and_leaves_the_picture(
    notebook: OpenNotebook,
) -> None:
    (notebook.path.parent / "enough").unlink(missing_ok=True)
    cell = notebook.run(TRAIN)
    cell.output.locator(BOARD).wait_for()
    notebook.interrupt()
    cell.wait()

    assert "KeyboardInterrupt" in cell.text
    cell.output.get_by_text("interrupted after").wait_for()
    cell.output.locator(PICTURE).wait_for()
    assert cell.output.locator(PICTURE).count() == 1
    assert not any(WIDGET in o.get("data", {}) for o in cell.saved_outputs())
    cell.picture("interrupted")
    after = notebook.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()").wait()
    assert after.text == "ranks 0-1 │ Out: 2.0"


def test_an_error_shows_the_failing_rank_first(notebook: OpenNotebook) -> None:
    cell = notebook.run(
        "%%distributed\n"
        "print('before')\n"
        "if rank == 1:\n"
        "    table = [0] * 8\n"
        "    table[8]\n"
        "dist.barrier()"
    ).wait()

    text = cell.text
    cell.picture("error", whole=True)
    assert "RankError" in text
    assert "IndexError: list index out of range" in text
    assert "table[8]" in text, "the traceback has the cell's own line"
    assert "rank 1:" in text
    assert "rank 0:" not in text, "it only waited, so its traceback explains nothing"


def test_a_progress_bar_of_a_rank_leaves_no_dead_widget(
    notebook: OpenNotebook, reopen: Reopen
) -> None:
    cell = notebook.run(
        "%%distributed\n"
        "from tqdm.notebook import tqdm\n"
        "for _ in tqdm(range(20), desc='reading'):\n"
        "    pass\n"
        "print('done')"
    ).wait()

    assert "done" in cell.text
    cell.picture("tqdm")
    assert not any(WIDGET in o.get("data", {}) for o in cell.saved_outputs())
    later = reopen(notebook)
    everything = later.page.locator(".jp-Notebook").inner_text()
    assert "done" in later.cell(cell.index).text
    assert "Error displaying widget" not in everything
    later.close()
