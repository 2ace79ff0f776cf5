"""Live and static cells leave the same outputs in the file, in a real kernel."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from nbdist.client.output.slots import Display, Slots

SET_UP = """
import threading
from nbdist.client.output.slots import Slots
from nbdist.client.output.live_text import LiveText
from nbdist.client.output.merge import render
from nbdist.client.output.slots import Display
def text(t): return Display({"text/plain": t})
def figure(t):
    return Display({"image/png": t, "text/plain": "a figure"}, {"image/png": {"width": 9}})
"""

CELLS = {
    "live text that becomes the final text": """
slots = Slots()
live = LiveText(slots, [0, 1])
for i in range(300):
    live.receive(i % 2, {"parts": [["stdout", f"line {i // 2}\\n"]]})
live.close()
slots.settle(render(live.items()))
""",
    "more finals than slots": """
slots = Slots()
slots.open(text("live")).update(text("still live"))
slots.settle([text("one"), figure("AAAA"), text("two")])
""",
    "a widget whose place a figure takes": """
import ipywidgets
slots = Slots()
slots.open(text("live"))
slots.open(ipywidgets.IntProgress())
slots.settle([text("one"), figure("BBBB")])
""",
    "fewer finals than slots": """
slots = Slots()
slots.open(text("live")); slots.open(text("more")); slots.open(text("yet more"))
slots.settle([text("one")])
""",
    "nothing left": """
slots = Slots()
slots.open(text("live"))
slots.settle([])
""",
    "updates from a thread, and late ones": """
slots = Slots()
slot = slots.open(text("live"))
thread = threading.Thread(target=lambda: [slot.update(text(str(i))) for i in range(50)])
thread.start(); thread.join()
slots.settle([text("final")])
slot.update(text("too late"))
_ = slots.open(text("too late"))
""",
    "what passes, where nothing follows": """
slots = Slots()
slots.show_passing(text("running"))
slots.settle([])
""",
    "what passes, where text follows": """
slots = Slots()
slots.show_passing(text("running"))
slots.open(text("live")).update(text("still live"))
slots.settle([text("final")])
""",
    "what passes, where a widget follows": """
import ipywidgets
slots = Slots()
slots.show_passing(text("running"))
slots.open(ipywidgets.IntProgress())
slots.settle([figure("CCCC")])
""",
    "what passes, where the end follows": """
slots = Slots()
slots.show_passing(text("running"))
slots.settle([text("one"), text("two")])
""",
    "what would pass, where something stands": """
slots = Slots()
slots.open(text("live"))
slots.show_passing(text("running"))
slots.settle([text("final")])
slots.show_passing(text("too late"))
""",
}


def execute(folder: Path, static: bool) -> list[list[dict[str, object]]]:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in (SET_UP, *CELLS.values())]
    )
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    root = str(Path(__file__).parents[4])
    environment = {**os.environ, "PYTHONPATH": root, "NBDIST_STATIC": "1" if static else "0"}
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    saved = nbformat.reads(nbformat.writes(notebook), as_version=4)
    return [[dict(output) for output in cell.outputs] for cell in saved.cells[1:]]


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[list[dict[str, object]]], list[list[dict[str, object]]]]:
    folder = tmp_path_factory.mktemp("notebook")
    return execute(folder, static=False), execute(folder, static=True)


@pytest.mark.parametrize("index", range(len(CELLS)), ids=list(CELLS))
def test_live_and_static_leave_the_same_outputs(both, index: int) -> None:  # type: ignore[no-untyped-def]
    live, static = both
    assert live[index] == static[index]
    assert all(output["output_type"] == "display_data" for output in static[index])
    assert len(static[index]) == [1, 3, 2, 1, 0, 1, 0, 1, 1, 2, 1][index]


def test_the_finals_stand_in_the_file_in_their_order(both) -> None:  # type: ignore[no-untyped-def]
    live, _ = both
    assert [output["data"]["text/plain"] for output in live[1]] == ["one", "a figure", "two"]


def test_a_plain_script_prints_the_finals() -> None:
    program = """
from nbdist.client.output.slots import Slots
from nbdist.client.output.slots import Display
slots = Slots()
slots.open(Display({"text/plain": "live"}))
slots.settle([Display({"text/plain": "the end"})])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "the end\n"


def test_settling_twice_shows_the_finals_once(capsys: pytest.CaptureFixture[str]) -> None:
    slots = Slots(live=False)
    slots.settle([Display({"text/plain": "once"})])
    slots.settle([Display({"text/plain": "twice"})])
    assert capsys.readouterr().out == "once\n"
