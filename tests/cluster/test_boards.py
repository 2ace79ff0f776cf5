"""The board of a run, looked at later: in the kernel that made it, and in another one."""

import pytest

from tests.cluster.conftest import Kernel

TRAIN = """
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    model(torch.ones(2, 4)).sum().backward()
    for p in model.parameters(): dist.all_reduce(p.grad)
    opt.step(); opt.zero_grad()
"""


def test_a_run_of_yesterday_shows_the_same_board_in_a_kernel_without_ranks(
    notebook: Kernel,
) -> None:
    notebook.cell(TRAIN, "--run yesterday")
    notebook.cell("nbdist.log(x=1)", "--run 'of today'")
    now = notebook.run("nbdist.current().show_board('step', run='yesterday')")
    later = Kernel(notebook.folder)
    try:
        later.run("%load_ext nbdist")
        assert "yesterday" in later.complete("%dist board yes")
        assert later.complete("%dist board yesterday col") == ["collectives"]
        assert later.complete("%dist board of") == ["'of today'"]
        assert later.complete("%dist runs 'of to") == ["'of today'"]
        shown = later.run("%dist board yesterday step")
        assert shown.error is None
        pictures = [["image/png", "text/html", "text/plain"]]
        assert [mimes for mimes in shown.mimes if "image/png" in mimes] == pictures
        assert "Run yesterday: Step-time breakdown on 2 ranks over 60 steps." in shown.text
        assert "A step takes" in shown.text
        assert shown.text.replace("\n", " ").split()[-40:] == now.text.split()[-40:]
        none_yet = later.run("%dist board loss")
        assert none_yet.error is not None
        assert "There is no board yet in this kernel" in none_yet.error[2]
        unknown = later.run("%dist board yesterdy")
        assert unknown.error is not None
        assert "did you mean yesterday? The newest runs: of today, yesterday" in unknown.error[2]
    finally:
        later.close()


@pytest.mark.slow
def test_looking_sets_no_view_and_the_option_does_from_the_next_cell_on(notebook: Kernel) -> None:
    notebook.cell(TRAIN, "--no-track")
    looked = notebook.run("%dist board ranks")
    assert "Speed and memory on 2 ranks" in looked.text
    assert "Loss and communication time" in notebook.cell(TRAIN, "--no-track").text
    assert notebook.run('%config NBDist.view = "step"').text == ""
    try:
        assert "Step-time breakdown" in notebook.cell(TRAIN, "--no-track").text
    finally:
        notebook.run('%config NBDist.view = "overview"')


def test_what_builds_a_model_counts_as_no_collective_that_was_left_out(notebook: Kernel) -> None:
    ddp = TRAIN.replace("opt =", "model = torch.nn.parallel.DistributedDataParallel(model)\nopt =")
    notebook.cell(ddp.replace("range(60)", "range(10)"), "--no-track")
    shown = notebook.run("%dist board collectives")
    assert "collectives per step" in shown.text
    assert "not timed" not in shown.text


def test_the_run_that_runs_is_shown_by_its_name(notebook: Kernel) -> None:
    notebook.run(
        "import nbdist, pathlib, threading, time\n"
        "def look():\n"
        "    while True:\n"
        "        try:\n"
        "            found = nbdist.current()._showing._board_of('going-on', None)\n"
        "            seen.append(found.scene.outcome)\n"
        "            return pathlib.Path('looked').touch()\n"
        "        except nbdist.NBDistError:\n"
        "            time.sleep(0.05)\n"
        "seen = []\n"
        "thread = threading.Thread(target=look); thread.start()"
    )
    until = "\nimport pathlib, time\nwhile not pathlib.Path('looked').exists(): time.sleep(0.05)"
    notebook.cell(TRAIN + until, "--run going-on")
    assert notebook.run("thread.join(); seen").text == "['running']"


@pytest.mark.slow
def test_a_run_that_went_on_says_of_which_of_its_steps_its_board_is(notebook: Kernel) -> None:
    notebook.cell(TRAIN, "--run longer")
    notebook.cell(TRAIN.replace("range(60)", "range(10)"), "--run longer --resume")
    shown = notebook.run("%dist board longer").text
    assert "Run longer (its newest cell, 10 of 70 steps): Loss and communication" in shown
