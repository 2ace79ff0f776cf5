"""What front ends rely on while a cell trains: updates that find their place, and a second page.

Without a browser: VS Code and JupyterLab speak these same messages.
"""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.lifecycle.kernels import Notebook

VIEW = "application/vnd.jupyter.widget-view+json"
KEEPS_OFTEN = "from nbdist.client.board.live import live\nlive.KEEP_S = 0.5"
TRAIN = """%%distributed --no-track
import itertools, pathlib, time
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in itertools.count():
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)  # a step of a larger model
    enough = torch.tensor(pathlib.Path("enough").exists(), dtype=torch.uint8)
    dist.all_reduce(enough)
    if enough:
        break
print("the end")
"""
Message = dict[str, Any]


def hear_until(client: BlockingKernelClient, is_last: Callable[[Message], bool]) -> list[Message]:
    """Return what the kernel publishes, up to the message that is the last one."""
    heard: list[Message] = []
    while not heard or not is_last(heard[-1]):
        heard.append(client.get_iopub_msg(timeout=60))
    return heard


def is_kept(message: Message) -> bool:
    """Whether this renews what stands below the live board."""
    return "The board as it was" in message["content"].get("data", {}).get("text/plain", "")


def ends(cell: str) -> Callable[[Message], bool]:
    """Return what knows the last message of a cell."""
    return lambda message: (
        message["content"].get("execution_state") == "idle"
        and message["parent_header"].get("msg_id") == cell
    )


@pytest.fixture
def notebook(tmp_path: Path) -> Any:
    with Notebook(tmp_path) as notebook:
        notebook.start()
        notebook.run(KEEPS_OFTEN)
        yield notebook


def another_page(notebook: Notebook) -> BlockingKernelClient:
    """Return the connection of a page that is opened now."""
    client = BlockingKernelClient()
    client.load_connection_info(notebook.manager.get_connection_info())
    client.start_channels()
    return client


def widgets_of(page: BlockingKernelClient) -> list[dict[str, Any]]:
    """Return the states of all widgets, asked as JupyterLab does when it opens a notebook."""
    comm = uuid.uuid4().hex
    opened = {"comm_id": comm, "target_name": "jupyter.widget.control", "data": {}}
    version = {"version": "1.0.0"}
    for kind, content in (
        ("comm_open", opened),
        ("comm_msg", {"comm_id": comm, "data": {"method": "request_states"}}),
    ):
        page.shell_channel.send(page.session.msg(kind, content, metadata=version))
    *_, answer = hear_until(page, lambda m: m["content"].get("comm_id") == comm)
    return [widget["state"] for widget in answer["content"]["data"]["states"].values()]


def boards_of(page: BlockingKernelClient) -> list[dict[str, Any]]:
    """Return the states of boards of cells that run, or have been seen again."""
    return [state for state in widgets_of(page) if "left" in state.get("history", ())]


def said_beside(page: BlockingKernelClient, code: str) -> tuple[str, str]:
    """Run a cell in a subshell, as a console does; return its message's id and what it showed."""
    page.control_channel.send(page.session.msg("create_subshell_request", {}))
    made = page.get_control_msg(timeout=30)["content"]
    content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}}
    request = page.session.msg("execute_request", {**content, "allow_stdin": False})
    request["header"]["subshell_id"] = made["subshell_id"]
    page.shell_channel.send(request)
    asked: str = request["header"]["msg_id"]
    shown = [m for m in hear_until(page, ends(asked)) if m["parent_header"].get("msg_id") == asked]
    return asked, "\n".join(m["content"].get("data", {}).get("text/plain", "") for m in shown)


@pytest.mark.slow
def test_a_training_goes_on_in_a_page_that_is_opened_meanwhile_and_its_end_is_shown_next(
    notebook: Notebook, tmp_path: Path
) -> None:
    cell = notebook.client.execute(TRAIN)
    heard = hear_until(notebook.client, is_kept)

    page = another_page(notebook)
    page.kernel_info()
    info = page.get_shell_msg(timeout=30)["content"]
    assert info["status"] == "ok"
    assert "kernel subshells" in info["supported_features"]
    console, said = said_beside(page, "%dist board")
    assert "Step " in said
    [board] = boards_of(page)
    assert board["words"]["step"] > 0
    assert {name for name, *_ in board["history"]["headers"]} >= {"loss", "step"}
    assert board["history"]["left"] is None

    (tmp_path / "enough").touch()
    heard += hear_until(notebook.client, ends(cell))
    of_others = [m for m in heard if m["parent_header"].get("msg_id") != console]
    assert_updates_find_their_place(of_others, cell)
    [board] = boards_of(page)
    left = board["history"]["left"]
    assert "ranks 0-1 │ the end" in [output["data"]["text/plain"] for output in left]
    assert any("image/png" in output["data"] for output in left)
    page.stop_channels()

    next_cell = notebook.run("print('next')")
    assert "The page was opened again" in next_cell
    assert "Loss and communication time on 2 ranks" in next_cell
    assert "ranks 0-1 │ the end" in next_cell
    assert notebook.run("print('once')").strip() == "once"


def assert_updates_find_their_place(heard: list[Message], cell: str) -> None:
    """Check what VS Code and Notebook 7 rely on, too."""
    shown: dict[str, Message] = {}
    for message in heard:
        content = message["content"]
        place = content.get("transient", {}).get("display_id")
        if message["msg_type"] == "display_data":
            assert message["parent_header"]["msg_id"] == cell
            shown[place] = content
        elif message["msg_type"] == "update_display_data":
            assert place in shown, "an update of what was never shown"
    assert [c for c in shown.values() if VIEW in c["data"]], "a board"
    assert all(content["data"]["text/plain"] for content in shown.values())
    orphans = {m["msg_type"] for m in heard if not m["parent_header"]}
    assert not orphans, "front ends drop what belongs to no cell"
