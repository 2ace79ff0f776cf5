"""The buttons of a board while its cell trains, as a person clicks them in JupyterLab."""

import re

import pytest

from tests.browser.lab import OpenNotebook
from tests.browser.test_notebook import TRAIN, WIDGET

pytestmark = pytest.mark.browser


def test_views_stacks_and_the_interrupt_of_a_rank_are_clicked_while_a_cell_trains(
    notebook: OpenNotebook,
) -> None:
    (notebook.path.parent / "enough").unlink(missing_ok=True)
    notebook.run("%dist board overview").wait()
    cell = notebook.run(TRAIN)
    output = cell.output

    output.get_by_role("radio", name="ranks", exact=True).click()
    output.get_by_role("columnheader", name="samples/s").wait_for()
    output.get_by_role("radio", name="step", exact=True).click()
    output.get_by_role("columnheader", name="waits for").wait_for()
    assert output.get_by_role("radio", checked=True).count() == 1
    assert output.get_by_role("radio", name="step", checked=True).count() == 1
    output.get_by_role("button", name="Stacks").click()
    output.get_by_text(re.compile(r"Stacks at \d\d:\d\d:\d\d")).wait_for()
    assert "rank 1: " in output.locator(".nb-answer pre").inner_text()
    cell.picture("buttons-live")
    output.get_by_role("button", name="Close").click()
    output.locator(".nb-answer pre").wait_for(state="hidden")
    assert cell.is_running

    output.get_by_role("combobox").select_option("rank 1")
    output.get_by_role("button", name="Interrupt").click()
    cell.wait()

    assert re.search(r"rank 1 .*KeyboardInterrupt", cell.text), cell.text
    output.get_by_text(
        re.compile(r"Step-time breakdown on 2 ranks, failed after [\d,]+ steps\.")
    ).wait_for()
    assert output.get_by_role("button", name="Interrupt").count() == 0
    assert not any(WIDGET in o.get("data", {}) for o in cell.saved_outputs())
    after = notebook.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()").wait()
    assert after.text == "ranks 0-1 │ Out: 2.0"

    # JupyterLab has deleted its subshell with the last widget, and makes another.
    again = notebook.run(TRAIN)
    again.output.get_by_role("button", name="Stacks").click()
    again.output.get_by_text(re.compile(r"Stacks at \d\d:\d\d:\d\d")).wait_for()
    assert again.is_running
    again.output.get_by_role("button", name="Interrupt").click()
    again.wait()
    assert "KeyboardInterrupt" in again.text
