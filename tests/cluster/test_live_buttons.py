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
    board: str = ""  # its comm's id
    state: dict[str, Any] = field(default_factory=dict)  # what the page got first
    told: list[dict[str, Any]] = field(default_factory=list)  # and since
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
        shown = [str(m["content"])[:200] for m in self.shown[-20:]]
        return "\n".join(["told:", *(str(t)[:300] for t in self.told[-5:]), "outputs:", *shown])

    def _hear(self, message: dict[str, Any]) -> None:
        content, kind = message["content"], message["msg_type"]
        if kind == "comm_open" and "frame" in content["data"]["state"]:
            self.board, self.state = content["comm_id"], content["data"]["state"]
        elif kind == "comm_msg" and content["comm_id"] == self.board:
            self.told.append(content["data"]["content"])
        if message["parent_header"].get("msg_id") == self.sent:
            self.shown.append(message)
            if kind == "status" and content["execution_state"] == "idle":
                self.has_ended = True

    def is_shown(self) -> bool:
        """Return whether the board is seen, which nobody clicks sooner: then it is heard."""
        views = [m["content"].get("data", {}).get(_VIEW, {}) for m in self.shown]
        return self.board in [view.get("model_id") for view in views] and self.board != ""

    def says(self, kind: str, pattern: str) -> bool:
        """Return whether the kernel has told the page such a thing."""
        return any(t["kind"] == kind and re.search(pattern, str(t)) for t in self.told)

    def say(self, *, over_subshell: bool = True, **said: Any) -> None:
        """Send what a page says, as front ends with subshells send it, or as those without."""
        data = {"comm_id": self.board, "data": {"method": "custom", "content": said}}
        message = self.kernel._client.session.msg("comm_msg", data)
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
    cell.until(cell.is_shown)
    yield cell
    (notebook.folder / "enough").touch()
    cell.until(lambda: cell.has_ended)
    client.control_channel.send(
        client.session.msg("delete_subshell_request", {"subshell_id": subshell})
    )
    client.control_channel.get_msg(timeout=LONGEST_S)


def test_stacks_cost_prints_and_a_range_come_while_the_cell_runs(training: RunningCell) -> None:
    cell = training
    cell.say(kind="hello", page="first")
    cell.until(lambda: cell.says("heard", ""))
    cell.say(kind="view", name="ranks")
    cell.say(kind="ask", what="stacks", rank=-1)
    cell.until(lambda: cell.says("answer", r"Stacks at \d\d:\d\d:\d\d.*rank 0: .*rank 1: "))
    cell.say(kind="ask", what="cost", rank=-1)
    cell.until(lambda: cell.says("answer", r"Cost of watching at"))
    cell.until(lambda: cell.says("points", "'loss', 1"))
    cell.say(kind="range", low=1, high=5)
    cell.until(lambda: cell.says("range", r"'low': 1"))
    cell.say(kind="whole")
    cell.until(lambda: cell.says("points", r"\['loss', 0, \d+, 0, "))
    assert not cell.has_ended

    # What ranks print is shown in the board from the first greeting on.
    (cell.kernel.folder / "speak").touch()
    cell.until(lambda: cell.says("texts", "spoken"))
    outputs = [m for m in cell.shown if m["msg_type"] != "comm_msg"]
    assert not any("spoken" in str(m["content"].get("data")) for m in outputs)
    (cell.kernel.folder / "enough").touch()
    cell.until(lambda: cell.has_ended)
    left = " ".join(str(m["content"].get("data", "")) for m in cell.shown[-8:])
    assert "spoken" in left
    assert re.search(r"Speed and memory on 2 ranks over [\d,]+ steps\.", left), (
        "the chosen view's picture stays"
    )


@pytest.mark.slow
def test_who_waited_in_a_step_that_was_compared_is_drawn_when_it_is_asked_for(
    training: RunningCell,
) -> None:
    cell = training

    def drawn() -> list[int]:
        """Return the steps that words have a time line of: the first may have none."""
        lines = [told["words"]["line"] for told in cell.told if told["kind"] == "words"]
        return [step for line in lines if line for step, _, _ in line["steps"]]

    cell.until(drawn)
    asked = drawn()[-1]
    cell.say(kind="step", step=asked)
    cell.until(lambda: cell.says("step", ""))
    [answer] = [told for told in cell.told if told["kind"] == "step"]
    assert [step for step, _, _ in answer["line"]["steps"]] == [asked]
    assert [lane["rank"] for lane in answer["line"]["lanes"]] == [0, 1]
    assert all(len(lane["spans"]) >= 2 for lane in answer["line"]["lanes"]), (
        "ddp's all_reduce, and the cell's own"
    )


def test_a_training_stands_still_is_looked_at_changed_and_goes_on_by_the_board(
    training: RunningCell,
) -> None:
    cell = training
    cell.say(kind="ask", what="pause", rank=-1)
    cell.until(lambda: cell.says("remark", r"Paused after step \d+ on ranks 0-1"))
    cell.until(lambda: cell.says("words", r"paused after step \d+"))
    cell.say(kind="ask", what="peek or change", text="model.weight.norm().item()", rank=-1)
    cell.until(lambda: cell.says("answer", r"after step \d+:.*ranks 0-1: \d"))
    cell.say(kind="ask", what="peek or change", text="lr = 0.005", rank=-1)
    cell.until(lambda: cell.says("remark", r"lr 0.01 -> 0.005 on ranks 0-1 after step \d+"))
    cell.say(kind="ask", what="peek or change", text="momentum=1", rank=-1)
    cell.until(lambda: cell.says("remark", r"momentum cannot be changed"))
    cell.say(kind="ask", what="continue", rank=-1)
    cell.until(lambda: cell.says("remark", r"Going on after step \d+"))


@pytest.mark.slow
def test_a_pause_that_an_interrupt_ended_is_none_of_the_next_cell(training: RunningCell) -> None:
    cell = training
    cell.say(kind="ask", what="pause", rank=-1)
    cell.until(lambda: cell.says("words", r"paused after step \d+"))
    cell.say(kind="ask", what="interrupt", rank=-1)
    cell.until(lambda: cell.has_ended)

    client = cell.kernel._client
    sent = client.execute(f"%%distributed --no-track\n{_TRAIN}", stop_on_error=False)
    cell.sent, cell.has_ended, cell.board = sent, False, ""
    cell.shown.clear()
    cell.told.clear()
    cell.until(lambda: cell.says("words", "steps/s"))
    assert not cell.says("words", "paused after")


def test_what_waits_for_a_step_is_not_queued(training: RunningCell) -> None:
    cell = training
    cell.say(kind="ask", what="peek or change", text="dist.barrier() if rank == 0 else 1", rank=-1)
    cell.say(kind="ask", what="peek or change", text="lr=0.5", rank=-1)
    cell.until(lambda: cell.says("remark", "still waits for a step"))
    cell.say(kind="ask", what="interrupt", rank=-1)
    cell.until(lambda: cell.has_ended)


def test_while_a_peek_waits_an_interrupt_is_heard(training: RunningCell) -> None:
    cell = training
    cell.say(kind="ask", what="peek or change", text="dist.barrier() if rank == 0 else 1", rank=-1)
    cell.say(kind="ask", what="stacks", rank=-1)
    cell.until(lambda: cell.says("answer", "Stacks at"))
    cell.say(kind="ask", what="interrupt", rank=-1)
    cell.until(lambda: cell.has_ended)
    [error] = [m["content"] for m in cell.shown if m["msg_type"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"


def test_an_interrupted_rank_ends_the_cell_and_the_session_lives_on(training: RunningCell) -> None:
    cell = training
    cell.say(kind="ask", what="interrupt", rank=1)
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
    stop: dict[str, Any] = {"kind": "ask", "what": "interrupt", "rank": -1}
    cell.say(**stop, over_subshell=False)  # heard when the cell has ended
    cell.say(kind="ask", what="stacks", rank=-1)
    cell.until(lambda: cell.says("answer", "Stacks at"))
    assert not cell.has_ended
    cell.say(**stop)
    cell.until(lambda: cell.has_ended)
    [error] = [m["content"] for m in cell.shown if m["msg_type"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"

    late = cell.kernel.cell(
        "import time\nprint('begun', flush=True)\ntime.sleep(1)\nprint('whole')",
        interrupt_after=["begun"],
        then=lambda: cell.say(**stop),
    )
    assert late.error is None
    assert "whole" in late.text
