"""The interactive board in JupyterLab: what the mouse can do with it, and what the file keeps."""

import re

import pytest
from playwright.sync_api import Locator, Request

from tests.browser.conftest import Reopen
from tests.browser.lab import PICTURES, Cell, OpenNotebook

pytestmark = pytest.mark.browser
pytest.importorskip("plotly", reason="the extra 'interactive' is not installed")

HELD_MS = 300  # how long the button is held before it moves: the extension redraws after 100

TRAIN = """%%distributed --run hovered
from torch import nn
torch.manual_seed(0)
model = nn.Linear(16, 1)
nbdist.parallelize(model, "ddp")
torch.manual_seed(rank)  # other samples on each rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(60):
    x = torch.randn(64, 16)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def drawn(cell: Cell, place: int) -> Locator:
    """Move the mouse over a picture; return the figure that comes in its place."""
    output = cell.output.locator(".jp-RenderedPlotly").nth(place)
    output.hover(force=True)  # what is under the mouse changes at once
    output.locator(".plot-img").wait_for(state="hidden")  # until then the figure is below it
    output.locator(".main-svg").first.wait_for()
    return output


def keep(figure: Locator, name: str) -> None:
    """Keep a picture for people to look at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.screenshot(path=PICTURES / f"{name}.png")


def test_values_are_hovered_over_ranks_are_hidden_and_the_axis_becomes_logarithmic(
    notebook: OpenNotebook, reopen: Reopen
) -> None:
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    notebook.page.on("request", note)
    notebook.run(TRAIN).wait()
    cell = notebook.run("%dist board hovered --interactive").wait()
    loss = drawn(cell, 0)

    loss.locator(".nsewdrag").first.hover()
    loss.locator(".hoverlayer").get_by_text(re.compile(r"rank 0 : \d")).wait_for()
    keep(loss, "interactive-loss")

    assert loss.locator(".scatterlayer .trace").count() == 5
    loss.locator(".legendtoggle").nth(1).click()
    loss.locator('.legend .traces[style*="opacity: 0.5"]').wait_for()
    assert loss.locator(".scatterlayer .trace").count() == 4

    linear = loss.locator(".ytick text").all_inner_texts()
    loss.locator(".updatemenu-button").get_by_text("log", exact=True).click()
    assert loss.locator(".ytick text").all_inner_texts() != linear
    y_axis = loss.evaluate("figure => [figure._fullLayout.yaxis.type, figure._fullLayout.dragmode]")
    assert y_axis == ["log", "zoom"]

    drawn(cell, 1)
    lanes = drawn(cell, 2)
    size = lanes.locator(".main-svg").first.bounding_box()
    before = lanes.evaluate("figure => figure._fullLayout.xaxis.range[0]")
    box = lanes.locator(".nsewdrag").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    notebook.page.mouse.move(box["x"] + 500, middle)
    notebook.page.mouse.down()
    notebook.page.wait_for_timeout(HELD_MS)
    notebook.page.mouse.move(box["x"] + 300, middle, steps=5)
    notebook.page.mouse.up()
    notebook.page.wait_for_function(
        "([figure, before]) => figure._fullLayout.xaxis.range[0] > before",
        arg=[lanes.element_handle(), before],
    )
    assert lanes.locator(".main-svg").first.bounding_box() == size, "it keeps its size and place"
    assert cell.output.locator('[data-title*="hare"]').count() == 0, "no button sends it away"
    notebook.use_theme("JupyterLab Dark")
    lanes.locator(".nsewdrag").first.hover()
    keep(lanes, "interactive-dark")
    notebook.use_theme("JupyterLab Light")

    outputs = cell.saved_outputs()
    figures = [o for o in outputs if any("plotly" in mime for mime in o.data)]
    assert len(figures) == 3
    for output in figures:
        assert output.data["image/png"]
        assert output.data["text/plain"].startswith("Run hovered: ")
    assert sum(len(str(output.data)) for output in outputs) < 1_000_000
    later = reopen(notebook)
    drawn(later.cell(cell.index), 0)
    later.close()
    notebook.page.remove_listener("request", note)
    foreign = [url for url in asked if not url.startswith(("data:", "blob:"))]
    assert foreign
    assert all("//127.0.0.1" in url for url in foreign)
