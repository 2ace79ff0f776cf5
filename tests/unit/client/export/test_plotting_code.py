"""What is taken out of a script as drawing, and that a training never is."""

import pytest

from nbdist.client.export.plotting_code import PlottingCode
from tests.unit.client.export.exported import code, reasons, script

PLT = "%%distributed\nimport matplotlib.pyplot as plt\n"
TRAIN = (
    PLT
    + """\
def train(n, plot=False):
    h = [step() for _ in range(n)]
    if plot:
        plt.plot(h)
    return h
"""
)
TRAINER = (
    PLT
    + """\
class Trainer:
    def fit(self, n):
        self.h = [step() for _ in range(n)]
    def plot(self):
        plt.plot(self.h)
"""
)
EPOCH = """\
%%distributed
from IPython.display import clear_output
def epoch(model, opt):
    clear_output(wait=True)
    return step(model, opt)
"""
USES_TRAIN = "uses train, which draws, with matplotlib"


@pytest.mark.parametrize(
    ("defines", "calls", "reason"),
    [
        (TRAIN, "h = train(5)\nacc = m(torch.ones(1, 2)).item()", USES_TRAIN),
        (TRAIN, "for _ in range(3):\n    train(5)", USES_TRAIN),
        (TRAIN, "with torch.no_grad():\n    train(5)", USES_TRAIN),
        (TRAIN, "plt.plot(train(5))", USES_TRAIN),
        (TRAIN, "def run():\n    return train(5)\nrun()", f"uses run, which {USES_TRAIN}"),
        (TRAIN, "run = train\nrun(5)", f"uses run, which is set by a line that {USES_TRAIN}"),
        (TRAINER, "trainer = Trainer(model)", "uses Trainer, which draws, with matplotlib"),
        (
            EPOCH,
            "l = epoch(model, opt)",
            "uses epoch, which shows widgets or displays, with IPython",
        ),
        (
            EPOCH,
            "for e in range(3):\n    clear_output()\n    epoch(model, opt)",
            "uses epoch, which shows widgets or displays, with IPython",
        ),
    ],
)
def test_a_training_with_drawing_in_it_keeps_cells_out_that_use_it(
    defines: str, calls: str, reason: str
) -> None:
    cell = f"%%distributed\na = 1\n{calls}"
    assert reasons(defines, cell)[2] == reason
    assert "a = 1" not in code(defines, cell)


def test_what_uses_an_instance_of_a_trainer_that_draws_stays_out_too() -> None:
    make, fit = "%%distributed\ntrainer = Trainer(model)", "%%distributed\ntrainer.fit(5)\nb = 1"
    found = reasons(TRAINER, make, fit)
    assert found[3] == "uses trainer, which cell 2 would have given"


def test_only_the_definition_of_a_training_that_draws_leaves_its_cell() -> None:
    made = script(TRAIN + "b = 2", "%%distributed\nprint(b)")
    assert made.cells == (1, 2)
    assert made.without[0][1] == ("import matplotlib.pyplot as plt", "def train(n, plot=False)")


@pytest.mark.parametrize(
    "draws",
    [
        "def show(h):\n    '''Draw.'''\n    plt.plot(h)\nshow(h)",
        (
            "def show(h):\n    import seaborn as sns\n"
            "    xs = range(len(h))\n    sns.plot(xs, h)\nshow(h)"
        ),
        "def show(ax, h):\n    ax.plot(h)\n    plt.show()\nshow(plt.gca(), h)",
        (
            "def show(h, a=None):\n    if a is None:\n"
            "        _, a = plt.subplots()\n    a.plot(h)\nshow(h)"
        ),
        (
            "def show(h):\n    def one(v):\n"
            "        plt.plot(v)\n    for v in h:\n        one(v)\nshow(h)"
        ),
        (
            "def show(h):\n    if not h:\n"
            "        return\n    plt.plot(h)\n    return plt.gcf()\nf = show(h)"
        ),
        "fig, axes = plt.subplots(2)\nfor i, (ax, v) in enumerate(zip(axes, h)):\n    ax.plot(v)",
        "[ax.plot(v) for ax, v in zip(plt.gcf().axes, h)]",
        "def show(h):\n    with torch.no_grad():\n        plt.plot(torch.arange(3), h)\nshow(h)",
        "if h:\n    plt.plot(h)\nelse:\n    plt.close()",
    ],
)
def test_a_function_that_does_nothing_but_draw_is_taken_out_with_its_calls(draws: str) -> None:
    kept = code(f"{PLT}{draws}\na = 1").replace("pass  # without", "# without").split("\n")
    assert [line for line in kept if line.strip() and not line.startswith("#")] == ["a = 1"]


@pytest.mark.parametrize(
    "acts",
    [
        "for opt, ax in zip(opts, plt.gcf().axes):\n    ax.plot(1)\n    opt.step()",
        "for model in models:\n    plt.plot(1)\n    model.train_step()",
        "for fig in models:\n    plt.plot(1)\n    fig.step()",
        "[(plt.plot(1), opt.step()) for opt in opts]",
        "model.history = plt.plot(1)",
        "fig = plt.figure()\nfig = make(fig)\nfig.step()",
        "def show(fig, opt):\n    plt.plot(1)\n    opt.step()\nshow(1, opt)",
        "def show():\n    global n\n    n = plt.plot(1)\nshow()",
        "def round(server):\n    server.step()\nplt.plot(round(server))",
        "@run_now\ndef show():\n    plt.plot(1)",
        "def show(h=step()):\n    plt.plot(h)",
        "class Show:\n    h = step()\n    plt.plot(h)",
        "from matplotlib.animation import FuncAnimation\nFuncAnimation(plt.gcf(), step)",
        "from matplotlib.pyplot import *",
    ],
)
def test_what_may_do_more_than_draw_keeps_its_cell_out(acts: str) -> None:
    cell = f"{PLT}a = 1\n{acts}"
    assert code(cell) == ""
    assert 1 in reasons(cell)


def test_a_name_that_gets_another_value_no_longer_draws() -> None:
    plots = PlottingCode()
    plots.taken_out("import matplotlib.pyplot as plt\nfig = plt.figure()\nfig = make(plt)")
    assert plots.taken_out("fig.step()\nb = 1") == ("fig.step()\nb = 1", (), "")


def test_what_a_line_that_draws_has_set_is_not_said_to_draw() -> None:
    reason = "uses n, which is set by a line that draws, with matplotlib"
    assert reasons(f"{PLT}a = 1\nn = len(plt.gcf().axes)", "%%distributed\nprint(n)") == {2: reason}
