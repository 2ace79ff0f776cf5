"""What users call their runs and params stands in tables and lines as it is, and breaks neither."""

import html
import re

import pytest

from nbdist.client.board.past import caption
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.tracking.begin import name_of
from nbdist.client.tracking.past.tables import html_table, text_table

NAMES = [
    "a|b",
    "*loud* and _quiet_",
    "`code`",
    "<script>alert(1)</script>",
    "[a](javascript:alert(1))",
    "$x$ ~~y~~ # z &lt; \\",
]


def asked(name: str) -> str:
    return name_of(CellInfo(1, "", (0,), 1, "gloo", ("cpu",), run_name=name), {})


def unescaped(markdown: str) -> str:
    """Return what Markdown shows where every sign that means something is escaped."""
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_\[\]<>#$|~&]", markdown)
    return re.sub(r"\\([^A-Za-z0-9\s])", r"\1", markdown)


@pytest.mark.parametrize("name", NAMES)
def test_a_runs_line_shows_its_name_in_markdown_as_it_is(name: str) -> None:
    said = f'Saved as MLflow run "{name}". List runs: %dist runs. Open the UI: %dist ui.'
    shown = caption(said).data
    assert shown["text/plain"] == said
    assert unescaped(shown["text/markdown"]) == said


def test_lines_stay_lines_in_markdown_and_none_begins_a_list() -> None:
    shown = caption("Run a\n- is kept\n1. sent later\n=====").data["text/markdown"]
    assert shown.split("  \n") == ["Run a", "\\- is kept", "1\\. sent later", "\\====="]


@pytest.mark.parametrize("name", NAMES)
def test_a_table_shows_a_name_as_it_is(name: str) -> None:
    shown = html_table(["run", name], [[name, "1"]])
    assert "<script" not in shown
    assert (
        html.unescape(re.sub(r"</?(table|thead|tbody|tr|th|td)[^>]*>", "\n", shown)).count(name)
        == 2
    )
    assert text_table(["run"], [[name]])[1] == name


def test_a_long_name_or_one_of_many_lines_breaks_no_table() -> None:
    lines = text_table(["run", "state"], [["a\nb", "x" * 10_000], ["c", "running"]])
    assert [line.split("  ")[0] for line in lines] == ["run", "a b", "c"]
    assert max(map(len, lines)) < 100
    assert "x" * 100 not in html_table(["run"], [["x" * 10_000]])


def test_a_runs_name_is_one_line() -> None:
    assert asked("first\n# second\t third") == "first # second third"
    assert len(asked("x" * 10_000)) == 80
