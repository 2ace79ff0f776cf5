"""The choice among the board's views, as a widget.

A radio group and not ToggleButtons: those look pressed and have no `aria-pressed`, so a screen
reader cannot tell which view is shown. Browsers tell which radio button is checked by themselves.
"""

from typing import Any

from nbdist.client.board.views import VIEWS


def choice_of_views(name: str) -> Any:
    """Return a widget in one row whose `value` is the chosen view's name; `name` is chosen now."""
    import ipywidgets  # type: ignore[import-untyped]

    choice = ipywidgets.RadioButtons(
        options=[(each.capitalize(), each) for each in VIEWS],
        value=name,
        tooltip="\n".join(f"{each}: {view.HELP}" for each, view in VIEWS.items()),
        orientation="horizontal",
    )
    choice.layout.width = "auto"
    return choice
