"""What the buttons of a board do while its cell runs, in a real kernel with subshells."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cluster.conftest import LONGEST_S, Kernel

_VIEW = "application/vnd.jupyter.widget-view+json"

# Trains until the file "enough" is there, and says its first word after the file "speak" is.
_TRAIN = """
import itertools, pathlib, time
from torch import nn
model = nn.Linear(4, 1)
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in itertools.count():
    nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)  # the line to find
    if pathlib.Path("speak").exists():
        pathlib.Path("speak").unlink(missing_ok=True)
        print("spoken", flush=True)
    enough = torch.tensor(pathlib.Path("enough").exists(), dtype=torch.uint8)
    dist.all_reduce(enough)
    if enough:
        break
"""


@dataclass
class RunningCell:
    """A cell that was sent, with what its front end has heard, and a subshell to click over."""

    kernel: Kernel
    sent: str
    subshell: str
    widgets: dict[str, dict[str, Any]] = field(default_factory=dict)  # state, by comm's id
    shown: list[dict[str, Any]] = field(default_factory=list)  # outputs of the cell alone
    has_ended: bool = False

    def until(self, condition: Callable[[], Any]) -> None:
        """Hear until `condition()` is true."""
        deadline = time.monotonic() + 2 * LONGEST_S
        while not condition():
            assert time.monotonic() < deadline, self._seen()
            self._hear(self.kernel._client.get_iopub_msg(timeout=LONGEST_S))

    def _seen(self) -> str:
        """Return what a person sees now, and the cell's last outputs."""
        said = [str(w["value"])[:2000] for w in self.widgets.values() if "value" in w]
        shown = [str(m["content"])[:200] for m in self.shown[-20:]]
        return "\n".join(["widgets:", *said, "outputs:", *shown])

    def _hear(self, message: dict[str, Any]) -> None:
        content, kind = message["content"], message["msg_type"]
        if kind == "comm_open":
            self.widgets[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.widgets.setdefault(content["comm_id"], {}).update(content["data"]["state"])
        if message["parent_header"].get("msg_id") == self.sent:
            self.shown.append(message)
            if kind == "status" and content["execution_state"] == "idle":
                self.has_ended = True

    def find(self, model: str, **state: Any) -> str | None:
        """Return the id of the widget that has this state."""
        for comm, known in self.widgets.items():
            if known.get("_model_name") == model and state.items() <= known.items():
                return comm
        return None

    def is_shown(self, name: str) -> bool:
        """Return whether a button is seen, which nobody clicks sooner: then it is heard."""
        left = [
            content["data"][_VIEW]["model_id"]
            for content in (message["content"] for message in self.shown)
            if _VIEW in content.get("data", {})
        ]
        while left:
            known = self.widgets.get(left.pop(), {})
            if known.get("_model_name") == "ButtonModel" and known.get("description") == name:
                return True
            left += [child.removeprefix("IPY_MODEL_") for child in known.get("children", ())]
        return False

    def says(self, pattern: str) -> bool:
        """Return whether an HTML widget says this now."""
        return any(re.search(pattern, str(w.get("value", ""))) for w in self.widgets.values())

    def click(self, name: str, *, over_subshell: bool = True) -> None:
        """Click a button, as front ends with subshells send it, or as those without."""
        self.send_click(self.find("ButtonModel", description=name), over_subshell=over_subshell)

    def send_click(self, comm: str | None, *, over_subshell: bool = True) -> None:
        """Click the button with this id, which may be gone."""
        data = {"method": "custom", "content": {"event": "click"}}
        self._send(comm, data, over_subshell=over_subshell)

    def choose(self, model: str, index: int) -> None:
        """Choose an option by its place."""
        data = {"method": "update", "state": {"index": index}, "buffer_paths": []}
        self._send(self.find(model), data, over_subshell=True)

    def _send(self, comm: str | None, data: dict[str, Any], *, over_subshell: bool) -> None:
        assert comm is not None, list(self.widgets.values())
        message = self.kernel._client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        message["header"]["subshell_id"] = self.subshell if over_subshell else None
        self.kernel._client.shell_channel.send(message)


@pytest.fixture
def training(notebook: Kernel) -> Iterator[RunningCell]:
    """A cell that trains, whose board has opened."""
    client = notebook._client
    client.control_channel.send(client.session.msg("create_subshell_request"))
    subshell = client.control_channel.get_msg(timeout=LONGEST_S)["content"]["subshell_id"]
    for name in ("enough", "speak"):
        (notebook.folder / name).unlink(missing_ok=True)
    sent = client.execute(f"%%distributed --no-track\n{_TRAIN}", stop_on_error=False)
    cell = RunningCell(notebook, sent, subshell)
    cell.until(lambda: cell.is_shown("Close"))
    yield cell
    (notebook.folder / "enough").touch()
    cell.until(lambda: cell.has_ended)
    client.control_channel.send(
        client.session.msg("delete_subshell_request", {"subshell_id": subshell})
    )
    client.control_channel.get_msg(timeout=LONGEST_S)


def test_view_stacks_and_cost_are_shown_while_the_cell_runs(training: RunningCell) -> None:
    cell = training
    cell.choose("RadioButtonsModel", 4)  # the ranks
    cell.until(lambda: cell.says(r"<th[^>]*>\s*memory"))  # the overview's table has none
    cell.click("Stacks")
    cell.until(lambda: cell.says(r"Stacks at \d\d:\d\d:\d\d(?s:.*)rank 0: (?s:.*)rank 1: "))
    cell.click("Cost")
    cell.until(lambda: cell.says(r"Cost of watching at"))
    cell.click("Close")
    cell.until(lambda: not cell.says(r"Cost of watching at"))
    assert not cell.has_ended

    # A click of another shell has come since; what is shown for the first time is the cell's.
    (cell.kernel.folder / "speak").touch()
    cell.until(lambda: any("spoken" in str(m["content"]) for m in cell.shown))
    (cell.kernel.folder / "enough").touch()
    cell.until(lambda: cell.has_ended)
    left = " ".join(str(m["content"].get("data", "")) for m in cell.shown[-8:])
    assert re.search(r"Speed and memory on 2 ranks over [\d,]+ steps\.", left), (
        "the chosen view's picture stays"
    )


def test_an_interrupted_rank_ends_the_cell_and_the_session_lives_on(training: RunningCell) -> None:
    cell = training
    cell.choose("DropdownModel", 2)  # all ranks, rank 0, rank 1
    cell.click("Interrupt")
    cell.until(lambda: cell.has_ended)

    [error] = [m["content"] for m in cell.shown if m["msg_type"] == "error"]
    assert error["ename"].endswith("RankError")
    assert "1 of 2 ranks failed" in error["evalue"], error["evalue"]
    said = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"]))
    assert re.search(r"rank 1 \(.*\)  cell \d+, line \d+  KeyboardInterrupt", said), said
    assert "all ranks kept their variables" in said, said
    assert (
        "Out: [2.0, 2.0]"
        in cell.kernel.cell("_t = torch.ones(2); dist.all_reduce(_t); _t.tolist()").text
    )


def test_a_click_is_heard_at_once_or_never_and_interrupts_no_later_cell(
    training: RunningCell,
) -> None:
    cell = training
    button = cell.find("ButtonModel", description="Interrupt")
    cell.click("Interrupt", over_subshell=False)  # heard when the cell has ended
    cell.click("Stacks")
    cell.until(lambda: cell.says("Stacks at"))
    assert not cell.has_ended
    cell.click("Interrupt")
    cell.until(lambda: cell.has_ended)
    [error] = [m["content"] for m in cell.shown if m["msg_type"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"

    late = cell.kernel.cell(
        "import time\nprint('begun', flush=True)\ntime.sleep(1)\nprint('whole')",
        interrupt_after=["begun"],
        then=lambda: cell.send_click(button),
    )
    assert late.error is None
    assert "whole" in late.text
