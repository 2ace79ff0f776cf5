"""Faults while backward runs beside the main thread, as on a GPU: see `tests/bare_thread`."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import Session
from tests.cluster.conftest import LONGEST_S, Kernel
from tests.cluster.test_faults import assert_usable, fail
from tests.cluster.test_interrupts import assert_interrupted

MODEL = """
from tests.bare_thread import install, nested, remove
torch.manual_seed(0)
kept = rank + 1
model = torch.nn.Linear(4, 4)
layout = nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 4)).sum()
"""
WAYS = {"a bare thread": "loss.backward()", "a thread of autograd's pool": "nested(loss.backward)"}


@pytest.fixture(params=WAYS)
def backward(session: Session, request: pytest.FixtureRequest) -> Iterator[str]:
    """Code that calls a backward beside the main thread, in a session with `MODEL`."""
    session.run(MODEL)
    if request.param == "a bare thread":
        session.run("install()")
    yield WAYS[request.param]
    session.run("from tests.bare_thread import remove; remove()")


@pytest.fixture
def on_bare_threads(session: Session) -> Iterator[Session]:
    """A session all of whose backwards run on bare threads."""
    session.run(f"{MODEL}\ninstall()")
    yield session
    session.run("from tests.bare_thread import remove; remove()")


def assert_trains(session: Session) -> None:
    assert_usable(session)
    assert session.run("kept").value_list == [1, 2]
    session.run("model(torch.ones(2, 4)).sum().backward(); optimizer.step()")
    first, second = session.run("[p.tolist() for p in model.parameters()]").value_list
    assert first == second


def test_a_rank_that_finished_without_its_backward_is_named_with_the_peers_line(
    session: Session, backward: str
) -> None:
    said = fail(session, f"# a cell\nif rank:\n    {backward}")
    assert "rank 0 has finished the cell; rank 1 waits for it in all_reduce #" in said
    assert ", line 3." in said
    assert_trains(session)


def test_where_a_rank_is_in_its_backward_is_said_while_it_waits(
    session: Session, backward: str, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    code = f"""
import pathlib, time
if rank == 0:
    while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)
{backward}
"""
    cell = threading.Thread(target=session.run, args=(code,), kwargs={"timeout_s": 60})
    cell.start()
    try:
        deadline = time.monotonic() + LONGEST_S
        while "all_reduce" not in (state := session.status().ranks[1].state):
            assert time.monotonic() < deadline, state
            time.sleep(0.02)
        stacks = str(session.stacks("1"))
    finally:
        seen.touch()
        cell.join()
    assert "line 4" in state
    assert "line 4, in <module>" in stacks
    assert_trains(session)


def test_a_rank_that_is_killed_while_its_peer_waits_in_backward_comes_back(
    session: Session, backward: str
) -> None:
    code = f"import os, signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)\n{backward}"
    said = fail(session, code)
    assert "SIGKILL" in said
    assert session.run("kept").value_list == [1, 1]  # rank 1's came from rank 0
    session.run("kept = rank + 1")
    assert_trains(session)


@pytest.mark.parametrize(
    "way",
    [pytest.param("a bare thread", marks=pytest.mark.slow), "a thread of autograd's pool"],
)
def test_an_interrupt_ends_a_backward_that_waits(notebook: Kernel, way: str) -> None:
    notebook.cell(MODEL)
    if way == "a bare thread":
        notebook.cell("install()")
    code = f"print('in')\n{WAYS[way]} if rank else None"
    assert_interrupted(notebook.cell(code, "--no-track", interrupt_after=["in"], timeout_s=30))
    ran = notebook.cell("model(torch.ones(2, 4)).sum().backward(); kept - rank")
    assert ran.text == "ranks 0-1 │ Out: 1"
    notebook.cell("remove()")


def test_an_interrupted_training_has_launched_as_much_on_all_ranks(notebook: Kernel) -> None:
    notebook.cell(f"{MODEL}\ninstall()")
    for _ in range(5):
        code = "print('in')\nwhile True: model(torch.ones(2, 4)).sum().backward(); optimizer.step()"
        assert_interrupted(notebook.cell(code, "--no-track", interrupt_after=["in"], timeout_s=30))
        ran = notebook.cell("[round(p.sum().item(), 4) for p in model.parameters()]")
        assert ran.text.startswith("ranks 0-1 │ Out: "), ran.text
    notebook.cell("remove()")


@pytest.mark.parametrize("place", ["forward", "full_backward"])
def test_an_error_in_a_hook_names_its_line_and_frees_the_peer(
    on_bare_threads: Session, place: str
) -> None:
    code = f"""
def hook(*_):
    raise ValueError("planted")
if rank: handle = model.register_{place}_hook(hook)
try: model(torch.ones(2, 4)).sum().backward()
finally: rank and handle.remove()
"""
    said = fail(on_bare_threads, code)
    assert "ValueError: planted" in said
    assert ", line 2  ValueError: planted" in said
    assert_trains(on_bare_threads)


def test_a_collective_of_another_size_in_a_hook_is_refused_with_both_lines(
    on_bare_threads: Session,
) -> None:
    code = """
def hook(gradient):
    dist.all_reduce(torch.ones(4 + rank))
other = torch.nn.Linear(2, 2)
other.weight.register_hook(hook)
other(torch.ones(1, 2)).sum().backward()
"""
    said = fail(on_bare_threads, code)
    assert "all_reduce" in said
    assert "16 B" in said
    assert "20 B" in said
    assert_trains(on_bare_threads)


LIBRARIES = {
    "Accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(4, 1)
net, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(5):
    accelerator.backward(net(torch.ones(2, 4)).square().mean()); opt.step(); opt.zero_grad()
""",
    "Lightning": """
import lightning, logging, warnings
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Net(lightning.LightningModule):
    def __init__(self): super().__init__(); self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, _): return self.net(batch).square().mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.ones(20, 4), batch_size=2)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning.Trainer(accelerator="cpu", devices=world_size, strategy="ddp", max_epochs=1,
                      enable_model_summary=False, **quiet).fit(Net(), data)
""",
}


# Accelerate's own backward tells that a library's is seen; Lightning takes seconds to import.
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(LIBRARIES["Accelerate"], id="Accelerate"),
        pytest.param(LIBRARIES["Lightning"], id="Lightning", marks=pytest.mark.slow),
    ],
)
def test_the_steps_of_other_libraries_are_counted(on_bare_threads: Session, code: str) -> None:
    on_bare_threads.run(code, timeout_s=120, track=False)
    assert [rank.step for rank in on_bare_threads.status().ranks] == [5, 5]
