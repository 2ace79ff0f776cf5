"""`%dist run`: a script on the live ranks, as torchrun would run it; and an export's way back."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from nbdist import Session
from nbdist.shared.errors import CellSyntaxError, ClusterError, RankError, UsageError
from tests.cluster.conftest import Kernel
from tests.export.torchrun import torchrun

SUM = "_s = torch.ones(1); dist.all_reduce(_s); _s.item()"


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


def test_a_script_finds_what_torchrun_gives_it_and_leaves_the_group(
    session: Session, tmp_path: Path
) -> None:
    script(tmp_path, "SIZE = 3\n", "beside.py")
    path = script(
        tmp_path,
        '''

        """Trains nothing."""
        from __future__ import annotations
        import argparse, os, sys
        import torch
        import torch.distributed as dist
        from beside import SIZE

        def parse() -> nothing.that.exists:
            parser = argparse.ArgumentParser()
            parser.add_argument("--lr", type=float)
            return parser.parse_args()

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            total = torch.ones(SIZE)
            dist.all_reduce(total)
            told = (os.path.basename(__file__), sys.argv[1:], parse().lr, total.tolist())
            dist.destroy_process_group()
            sys.exit(0)
        "a value that no script shows"
        ''',
    )
    session.run("__file__ = 'kept'; group = dist.group.WORLD.group_name")
    result = session.run_script(path, ["--lr", "0.5"])
    assert result.ok
    assert result.value_list == [None, None]
    expected = ("train.py", ["--lr", "0.5"], 0.5, [2.0, 2.0, 2.0])
    assert session.run("told").value_list == [expected] * 2
    assert (
        session.run("__file__, dist.group.WORLD.group_name == group").value_list
        == [("kept", True)] * 2
    )
    assert session.run(SUM).value_list == [2.0, 2.0]
    kept = f"import sys; {str(tmp_path)!r} in sys.path, 'train.py' in sys.argv[0]"
    assert session.run(kept).value_list == [(False, False)] * 2
    # Annotations of a cell are evaluated again.
    assert "NameError" in _failure(session, "def f() -> nothing.that.exists: ...")


def _failure(session: Session, code: str) -> str:
    with pytest.raises(RankError) as caught:
        session.run(code)
    return str(caught.value)


def test_an_error_names_the_scripts_line_and_frees_the_others(
    session: Session, tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        def step():
            if dist.get_rank() == 1:
                raise ValueError("no data")
            dist.barrier()
        step()
        """,
    )
    with pytest.raises(RankError) as caught:
        session.run_script(path)
    assert "train.py, line 5  ValueError: no data" in str(caught.value)
    assert session.run(SUM).value_list == [2.0, 2.0]
    exits = script(tmp_path, "import sys\nsys.exit('no such option')\n", "exits.py")
    with pytest.raises(RankError, match=r"called sys.exit\(no such option\)"):
        session.run_script(exits)
    parses = "import argparse\nparser = argparse.ArgumentParser()\n"
    parses += "parser.add_argument('--steps', type=int)\nparser.parse_args()\n"
    with pytest.raises(RankError, match="look at the words after parses"):
        session.run_script(script(tmp_path, parses, "parses.py"), ["--steps", "x"])


ENDS = {
    "fails in its loop": """
        import nbdist, torch
        layers = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for step, x in enumerate(nbdist.loader([torch.ones(1)] * 16, global_batch=4)):
            layers(x).sum().backward()
            optimizer.step()
            if step == 2:
                raise ValueError("no data")
        """,
    "ends on one rank": """
        import torch.distributed as dist
        if dist.get_rank():
            dist.barrier()
        """,
    "calls another collective": """
        import torch, torch.distributed as dist
        if dist.get_rank():
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_reduce(torch.ones(3))
        """,
    "loses a rank": """
        import os, signal
        import torch.distributed as dist
        if dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        """,
    "runs too long": "import time\ntime.sleep(600)\n",
}
SAY = {
    "fails in its loop": (
        "Do:  fix line 9 of train.py, then %dist run {path} again; all ranks kept their "
        "variables. It starts over where it creates its optimizer"
    ),
    "ends on one rank": "rank 0 has finished train.py; rank 1 waits for it",
    "calls another collective": "train.py, line 6",
    "loses a rank": "Do:  %dist retry runs train.py again.",
    "runs too long": "train.py ran longer than its timeout_s of 0.5 s",
}


@pytest.mark.parametrize("how", ENDS)
def test_all_that_is_said_of_a_script_is_true_of_a_script(
    session: Session, tmp_path: Path, how: str
) -> None:
    path = script(tmp_path, ENDS[how])
    limit_s = 0.5 if how == "runs too long" else None
    with pytest.raises((RankError, ClusterError)) as caught:
        session.run_script(path, timeout_s=limit_s, track=False)
    told = str(caught.value)
    assert SAY[how].format(path=path) in told
    assert "%%distributed" not in told
    assert re.search(r"(?i)\b(the|this) cell\b|cell \d|loaders", told) is None, told


def test_a_module_beside_the_script_that_was_edited_is_read_again(
    session: Session, tmp_path: Path
) -> None:
    script(tmp_path, "SIZE = 3\n", "edited_between.py")
    path = script(tmp_path, "from edited_between import SIZE\n")
    session.run_script(path)
    script(tmp_path, "SIZE = 4000\n", "edited_between.py")
    session.run_script(path)
    assert session.run("SIZE").value_list == [4000] * 2


def test_a_module_that_a_cell_imported_and_that_was_edited_is_read_again(
    session: Session, tmp_path: Path
) -> None:
    script(tmp_path, "SIZE = 3\n", "edited_too.py")
    script(tmp_path, "from edited_too import SIZE\n", "unedited.py")
    path = script(tmp_path, "import unedited\n")
    session.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import unedited as of_cell")
    session.run_script(path)
    assert session.run("unedited is of_cell").value_list == [True] * 2
    script(tmp_path, "SIZE = 4000\n", "edited_too.py")
    session.run_script(path)
    values = session.run(f"sys.path.remove({str(tmp_path)!r}); unedited.SIZE, of_cell.SIZE")
    assert values.value_list == [(4000, 3)] * 2


def test_a_module_runs_by_its_name_as_python_runs_it(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "job"
    (package / "part").mkdir(parents=True)
    script(package, "LOADED = True\n", "__init__.py")
    script(package, "SIZE = 5\n", "sizes.py")
    script(package / "part", "", "__init__.py")
    told = "told = SIZE, sys.argv[1:], __name__, __package__, job.LOADED, __file__\n"
    head = "import sys, job\nfrom ..sizes import SIZE\n"
    script(package / "part", head + told, "train.py")
    script(package, "import sys\nfrom .sizes import SIZE\nraise ValueError(SIZE)\n", "__main__.py")
    monkeypatch.chdir(tmp_path)
    session.run("__package__ = 'kept'")
    session.run_script("job.part.train", ["--lr", "1"], is_module=True)
    file = str(package / "part" / "train.py")
    expected = (5, ["--lr", "1"], "__main__", "job.part", True, file)
    assert session.run("told, __package__").value_list == [(expected, "kept")] * 2
    session.run("del __package__")
    with pytest.raises(RankError) as caught:
        session.run_script("job", ["--lr", "1"], is_module=True)
    assert "__main__.py, line 3  ValueError: 5" in str(caught.value)
    assert "then %dist run -m job --lr 1 again" in str(caught.value)
    for wrong in ("nothing_there", "job.nothing", "job.part", "math"):
        with pytest.raises(UsageError, match=f"(module|package) {wrong}"):
            session.run_script(wrong, is_module=True)


def test_a_cell_has_no_words_and_sys_exit_0_ends_it_well(session: Session) -> None:
    assert session.run("import sys; sys.argv").value_list == [[""]] * 2
    parsed = "import argparse; argparse.ArgumentParser().parse_args()"
    assert session.run(f"{parsed}.__dict__").value_list == [{}] * 2
    for ends in ("sys.exit(0)", "sys.exit()", "sys.exit(None)", "await asyncio.sleep(0); exit_0()"):
        code = "import asyncio\ndef exit_0(): sys.exit(0)\n"
        result = session.run(f"{code}print('before')\n{ends}\nprint('after')")
        assert [result[rank].text for rank in range(2)] == ["before"] * 2
    with pytest.raises(RankError, match=r"called sys.exit\(2\)"):
        session.run("sys.exit(2)")


def test_a_script_may_run_coroutines_as_under_torchrun(session: Session, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import asyncio

        async def add(n):
            await asyncio.sleep(0)
            return n + 1

        async def fail():
            raise ValueError("within")

        told = [asyncio.run(add(n)) for n in range(2)]
        asyncio.run(asyncio.wait_for(add(2), 10))
        try:
            asyncio.run(fail())
        except ValueError as error:
            told.append(str(error))
        """,
    )
    for _ in range(2):
        session.run_script(path)
        code = "await asyncio.sleep(0)\n(told, asyncio.get_running_loop().is_running())"
        assert session.run(code).value_list == [([1, 2, "within"], True)] * 2
    with pytest.raises(RankError, match="running event loop"):
        session.run("asyncio.run(add(1))")


def test_a_script_that_cannot_run_is_refused_before_it_is_sent(
    session: Session, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"none.py cannot be read: No such file"):
        session.run_script(tmp_path / "none.py")
    with pytest.raises(CellSyntaxError, match=r"line 2; train.py was not run"):
        session.run_script(script(tmp_path, "a = 1\n%timeit a\n"))


TRAIN = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
x, y = torch.randn(40, 8)[rank::world_size], torch.randint(3, (40,))[rank::world_size]
losses = []
for _ in range(steps):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
"""
WRITE = """
import asyncio, json
await asyncio.sleep(0)
with open(f"losses-{rank}.json", "w") as file:
    json.dump(losses, file)
len(losses)
"""


def losses(folder: Path) -> list[list[str]]:
    files = [folder / f"losses-{rank}.json" for rank in range(2)]
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def go_to(notebook: Kernel, folder: Path) -> None:
    """Have the kernel and its ranks work in a folder."""
    notebook.run(f"%cd -q {folder}")
    notebook.cell(f"import os; os.chdir({str(folder)!r})", "--no-track")


@pytest.fixture
def elsewhere(notebook: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """The shared kernel in a folder of this test's; others find it where it was."""
    go_to(notebook, tmp_path)
    yield notebook
    go_to(notebook, notebook.folder)


@pytest.mark.slow
def test_a_script_may_be_guarded_and_have_rules_that_say_nothing_of_it(
    elsewhere: Kernel, tmp_path: Path
) -> None:
    script(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.full((2, 4), float("nan") if step == 2 else 1.0)
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    finite = "all(p.isfinite().all().item() for p in model.parameters())"
    plain = elsewhere.run("%dist run --no-track train.py").text
    assert "The loss is NaN" in plain
    assert "[False, False]" in elsewhere.run(f"nbdist.current().run('{finite}').value_list").text
    guarded = "%dist run --no-track --guard --ignore loss-not-finite train.py"
    said = elsewhere.run(guarded).text
    assert "left out" in said, said
    assert "The loss is NaN" not in said
    assert "[True, True]" in elsewhere.run(f"nbdist.current().run('{finite}').value_list").text


@pytest.mark.slow
def test_an_export_in_plain_torch_has_the_cells_losses_under_torchrun_and_back_in_the_notebook(
    elsewhere: Kernel, tmp_path: Path
) -> None:
    notebook = elsewhere
    notebook.run("steps = 12\n%dist push steps")
    notebook.cell(TRAIN, "--run small -p lr=0.1")
    notebook.cell("import matplotlib.pyplot as plt", "-r 0 --no-track")
    notebook.cell(WRITE, "--no-track")
    in_cells = losses(tmp_path)
    first = notebook.run("first = len(In) - 6\nfirst").text.split()[-1]
    numbers = f"{first}-{int(first) + 4}"
    made = notebook.run(f"%dist export train.py --cells {numbers}").text
    assert "Run it: PYTHONHASHSEED=0 torchrun --nproc-per-node 2 train.py" in made, made
    text = (tmp_path / "train.py").read_text()
    assert "nbdist.init" not in text
    assert "lr = 0.1" in text
    assert "steps = 12" in text
    ran = torchrun(tmp_path / "train.py", 2)
    assert ran.returncode == 0, ran.stderr
    assert losses(tmp_path) == in_cells
    back = notebook.run("%dist run --no-track train.py")
    assert back.error is None, back
    assert losses(tmp_path) == in_cells
    assert len(in_cells[0]) == 12
    assert in_cells[0] != in_cells[1]
    assert "2.0" in notebook.cell(SUM, "--no-track").text
    refused = notebook.run("%dist export train.py")
    assert "train.py is there already; --force overwrites it." in str(refused)


def test_a_script_of_nbdists_trains_on_the_ranks_that_there_are(
    session: Session, tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        """
        import nbdist, torch, torch.distributed as dist
        found = nbdist.init(layouts=["dp=2"], device="cpu", threads=1)
        model = torch.nn.Linear(2, 1)
        nbdist.parallelize(model, "dp=2")
        model(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group()
        """,
    )
    session.run_script(path)
    assert session.run("tuple(found) == (rank, local_rank, 2, device)").value_list == [True] * 2
    # What the script has made goes on in cells.
    session.run("model(torch.ones(1, 2)).sum().backward()")
    wrong = script(tmp_path, 'import nbdist\nnbdist.init(layouts=["tp=4"])\n', "wrong.py")
    with pytest.raises(RankError, match="LayoutError: tp=4 needs 4 ranks"):
        session.run_script(wrong)
