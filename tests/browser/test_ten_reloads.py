"""What a person sees of a training whose page is opened again ten times, at any of its moments."""

import random
import re
import time

import pytest
from playwright.sync_api import Browser

from tests.browser.lab import Lab, OpenNotebook
from tests.browser.test_notebook import BOARD, MOVED, PICTURE
from tests.browser.test_reload import START

pytestmark = pytest.mark.browser

RELOADS = 10
EVERY = 40  # steps between lines
# Writes how many steps it has made, and ends when it is told to.
TRAIN = f"""%%distributed --run reloads
import itertools, os, pathlib, time

torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in itertools.count():
    if rank == 0:
        pathlib.Path("step.new").write_text(str(step))
        os.replace("step.new", "step")
        if step % {EVERY} == 0:
            print(f"line {{step // {EVERY}}};")
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    enough = torch.tensor(pathlib.Path("enough").exists(), dtype=torch.uint8)
    dist.all_reduce(enough)
    if enough:
        break
f"the result is {{world_size + 40}}"
"""


def test_whoever_opens_the_page_again_at_ten_moments_sees_it_all_once(
    lab: Lab, browser: Browser
) -> None:
    notebook = OpenNotebook(lab, browser)
    assert "Started 2 ranks" in notebook.run(START).wait().text
    for name in ("enough", "step"):
        (lab.root / name).unlink(missing_ok=True)
    draw = random.Random(2611)
    # The first is before the board is there; others come while the page before still loads.
    moments = [0, *(draw.randrange(1, 160) for _ in range(RELOADS - 1))]
    index = notebook.run(TRAIN).index
    notebook.saved()

    until_step(lab, 0)
    for at, gap in enumerate(moments):
        until_step(lab, steps_of(lab) + gap)
        if at == RELOADS // 2:  # a second window, and the first is closed
            notebook = notebook.opened_again()
        else:
            notebook.page.reload(wait_until="commit")
    board = notebook.cell(index).output.locator(BOARD)
    board.wait_for()
    notebook.page.wait_for_function(MOVED.format(3), arg=index)
    newest = steps_of(lab) // EVERY
    board.get_by_text(f"line {newest};").wait_for()
    seen = lines_of(board.inner_text())
    assert seen == list(range(seen[0], seen[-1] + 1))
    notebook.cell(index).picture("ten-reloads-live")
    (lab.root / "enough").touch()
    cell = notebook.cell(index)
    cell.output.locator(PICTURE).wait_for()
    board.wait_for(state="detached")
    all_lines = list(range(steps_of(lab) // EVERY + 1))
    assert lines_of(cell.text) == all_lines
    assert cell.text.count("the result is 42") == 1
    cell.picture("ten-reloads-ended", whole=True)

    following = notebook.run("1 + 1").wait()
    assert following.text.split() == ["[3]:", "2"], "the cell itself has it all"
    notebook = notebook.opened_again()
    assert lines_of(notebook.cell(index).text) == all_lines, "and so has the file"
    notebook.close()


def until_step(lab: Lab, step: int) -> None:
    """Wait until the training has made so many steps."""
    deadline = time.monotonic() + 60
    while steps_of(lab) < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # another process' file: there is no event to wait for


def steps_of(lab: Lab) -> int:
    """Return how many steps the training has made; -1 before it has begun."""
    try:
        return int((lab.root / "step").read_text())
    except FileNotFoundError:
        return -1


def lines_of(text: str) -> list[int]:
    """Return the numbers of the lines that are seen, in their order."""
    return [int(number) for number in re.findall(r"line (\d+);", text)]
