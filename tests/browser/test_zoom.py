"""A zoom into a long training in JupyterLab: while its cell runs, and on the board after it."""

import re
from collections.abc import Mapping

import pytest

from tests.browser.lab import Cell, OpenNotebook
from tests.browser.test_notebook import BOARD

pytestmark = pytest.mark.browser

# So many steps that lines are thinned twice; the loss of each tells which it is.
TRAIN = """%%distributed --no-track -r 0
import pathlib, time

parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.0)
for step in range(1, 32_001):
    (parameter * float(step * 7919 % 10_007)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
while not pathlib.Path("enough").exists():
    time.sleep(0.05)
"""
STEPS = 32_000
RANGE = re.compile(r"^steps [\d,]+ to [\d,]+$")
# What the board of a cell shows: its lines' steps and values within the zoom.
SHOWN = """([output]) => {
  const page = output.querySelector('.nbdist-board').parentElement.nbdist;
  const line = page.lines.of('loss', page.zoom).get(0);
  const known = [...line.x.subarray(0, line.n)].map((x, at) => [x, line.y[at]]);
  return [page.zoom, known.filter(([x]) => page.zoom[0] <= x && x <= page.zoom[1])];
}"""
UNTIL_LAST = """([index, last]) => {
  const board = window.jupyterapp.shell.currentWidget.content.widgets[index].node
    .querySelector('.nbdist-board')?.parentElement?.nbdist;
  return board?.steps()?.[1] === last;
}"""


def losses_in_a_zoom(notebook: OpenNotebook, cell: Cell) -> Mapping[float, float]:
    """Drag over a twentieth of the run, and return what is shown when it has been fetched."""
    canvas = cell.output.locator(".nb-plot canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    notebook.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    notebook.page.mouse.down()
    notebook.page.mouse.move(box["x"] + 0.35 * box["width"], box["y"] + 40, steps=3)
    notebook.page.mouse.up()
    cell.output.locator(".nb-range", has_text=RANGE).wait_for()  # and no word that some are not
    (low, high), points = cell.output.evaluate_all(SHOWN)
    assert [x for x, _ in points] == list(range(int(low) + 1, int(high) + 1))
    assert len(points) > 1000
    return dict(points)


def test_a_zoom_shows_every_step_of_a_long_run_while_it_runs_and_after_it(
    notebook: OpenNotebook,
) -> None:
    enough = notebook.path.parent / "enough"
    enough.unlink(missing_ok=True)
    cell = notebook.run(TRAIN)
    cell.output.locator(BOARD).wait_for()
    notebook.page.wait_for_function(UNTIL_LAST, arg=[cell.index, STEPS], timeout=120_000)

    while_it_runs = losses_in_a_zoom(notebook, cell)
    cell.picture("zoom-live")
    assert cell.is_running
    enough.touch()
    cell.wait()
    after = losses_in_a_zoom(notebook, notebook.run("%dist board overview"))

    for losses in (while_it_runs, after):
        assert losses == {step: step * 7919 % 10_007 for step in losses}
