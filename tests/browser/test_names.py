"""Tab, Shift+Tab and a NameError know the ranks' names: as a person types them in JupyterLab."""

import pytest
from playwright.sync_api import Locator

from tests.browser.lab import OpenNotebook

pytestmark = pytest.mark.browser

MODEL = "%%distributed\nmodel = torch.nn.Linear(4, 2)"


def after_tab(notebook: OpenNotebook, source: str, offered: str) -> Locator:
    """Press Tab at the end of a new cell; return the entry of the list that says `offered`."""
    notebook.edit(source)
    notebook.page.keyboard.press("Tab")
    return notebook.page.locator(".jp-Completer-item", has_text=offered).first


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("%%distributed\nmodel.param", "parameters"),
        ("%%distributed\ntorch.optim.Ada", "AdamW"),
        ("%dist board ", "collectives"),
    ],
)
def test_tab_offers_what_ranks_and_magics_know(
    notebook: OpenNotebook, typed: str, offered: str
) -> None:
    notebook.run(MODEL).wait()

    after_tab(notebook, typed, offered).wait_for()

    notebook.page.keyboard.press("Escape")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("%%distributed\nmodel", "Linear, on rank 0"),
        ("%%distributed", "--run"),
    ],
)
def test_shift_tab_tells_of_a_name_and_of_the_magic(
    notebook: OpenNotebook, typed: str, said: str
) -> None:
    notebook.run(MODEL).wait()

    notebook.edit(typed)
    notebook.page.keyboard.press("Shift+Tab")

    notebook.page.locator(".jp-Tooltip").get_by_text(said).first.wait_for()
    notebook.page.keyboard.press("Escape")


def test_a_name_that_only_ranks_have_is_an_error_that_says_where_it_is(
    notebook: OpenNotebook,
) -> None:
    notebook.run(MODEL).wait()

    cell = notebook.run("model").wait()

    assert "NameError" in cell.text
    assert "%dist pull model" in cell.text
    cell.picture("name-error")
