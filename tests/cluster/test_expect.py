"""`%dist expect` about a training on two ranks: what holds, what does not, and about which run."""

from pathlib import Path

import pytest

from nbdist import ExpectationError, Session, UsageError
from nbdist.shared.errors import RankError
from tests.cluster.conftest import Kernel

MODEL = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
layout = nbdist.parallelize(net, "ddp")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
inputs = torch.randn(30, 32, 8, generator=torch.Generator().manual_seed(1))
"""
TRAIN = """
for x in inputs[:, rank::2]:
    opt.zero_grad()
    (net(x) - x.sum(-1, keepdim=True)).square().mean().backward()
    {more}
    opt.step()
nbdist.log(accuracy=0.5 + rank / 10)
seen = 3 + rank
bias = net[2].bias.sum()
"""


@pytest.fixture
def trained(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.delenv("NBDIST_BASELINE", raising=False)
    train(session)
    return session


def train(session: Session, more: str = "", name: str = "small") -> None:
    session.run(MODEL + TRAIN.format(more=more), run_name=name, track=False)


def expect_when_measured(session: Session, assertion: str) -> str:
    """Return what is told of a time, and train again where the machine was too full for one."""
    for _ in range(5):
        try:
            return session.expect(assertion)
        except UsageError as error:
            if "measured fewer" not in str(error):
                raise
            train(session)
    return session.expect(assertion)


@pytest.mark.parametrize(
    ("assertion", "found"),
    [
        ("loss < 5", "the mean of 2 ranks"),
        ("min loss < 0.5 * first(loss)", "first loss is"),
        ("accuracy == 0.55", "accuracy is 0.550"),
        ("spread accuracy < 0.11", "spread accuracy is 0.1"),
        ("bias < 1e9", "bias is"),
        ("seen >= 3", "seen is 3 on rank 0, 4 on rank 1"),
        ("step_ms > 0", "step_ms is"),
        ("collectives == 1", "collectives is 1"),
        ("parity", "ddp against one process on the same split: equal"),
        ("bytes 1 % of explain", "ddp's layout.explain"),
        ("no alarms", "nothing was found"),
    ],
)
def test_what_holds_is_told_in_a_line(
    session: Session, cluster: object, assertion: str, found: str
) -> None:
    if session.trained is None or session.trained.info.run_name != "held":
        train(session, name="held")
    said = session.expect(assertion)
    assert said.startswith(f"{assertion} holds: ")
    assert found in said
    assert "\n" not in said


# Collectives pass the tap's kernels for GPUs, with tensors of the CPU. Others compute on the GPU,
# so that no event which is recorded there passes soon.
ON_A_BUSY_GPU = """
from types import SimpleNamespace
from nbdist.engine.tap import in_flight, tap
from nbdist.engine.tap.cuda_times import CudaTimes

kernel, times = tap._kernel, in_flight.state.cuda
event = SimpleNamespace(query=lambda: False)
gpu = SimpleNamespace(mark=lambda device: event, mark_alone=lambda device: event,
                      stream=lambda device: 0, can_mark=lambda: True)
tap.set_level("off")
tap._kernel = lambda op, device, *, is_full: kernel(op, "cuda", is_full=is_full)
in_flight.state.cuda = CudaTimes(gpu)
tap.set_level("full")
"""
AS_BEFORE = """
tap.set_level("off")
tap._kernel, in_flight.state.cuda = kernel, times
tap.set_level("full")
"""


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_what_gloo_sends_on_gpus_that_ranks_share_is_known(session: Session, layout: str) -> None:
    """Proven with a stand-in for the GPU; notebook 03 asks this of a real one."""
    session.run(ON_A_BUSY_GPU)
    try:
        model = MODEL.replace('"ddp"', f'"{layout}"').replace("16, 1)", "16, 2)")  # in halves
        code = model + TRAIN.format(more="")
        session.run(code, run_name="shared", track=False)
        assert "layout.explain" in session.expect("bytes 1 % of explain")
    finally:
        session.run(AS_BEFORE)


def test_what_does_not_hold_is_one_error_with_the_number(trained: Session) -> None:
    with pytest.raises(ExpectationError, match=r"loss < 0 does not hold: loss is .* step 30"):
        trained.expect("loss < 0")
    with pytest.raises(ExpectationError, match=r"seen == 3 does not hold on rank 1"):
        trained.expect("seen == 3")
    with pytest.raises(UsageError, match="last is another run of that name"):
        trained.expect("loss <= last")
    with pytest.raises(UsageError, match="did you mean accuracy"):
        trained.expect("acuracy > 0.5")
    with pytest.raises(UsageError, match="opt is a SGD"):
        trained.expect("opt > 1")


def test_a_run_is_compared_with_the_one_of_its_name_before_it(trained: Session) -> None:
    train(trained)
    for assertion in ("collectives == last", "bytes 0 %"):
        assert "the run of small before" in trained.expect(assertion)
    assert "the run of small before" in expect_when_measured(trained, "step <= 10 x last")
    train(trained, more="dist.all_reduce(torch.ones(100))")
    with pytest.raises(ExpectationError, match=r"makes 2 all_reduce, and .* it made 1 all_reduce"):
        trained.expect("collectives == last")
    with pytest.raises(ExpectationError, match=r"\(\+62\.1 %\)"):
        trained.expect("bytes 1 %")
    with pytest.raises(ExpectationError, match=r"layout\.explain"):
        trained.expect("bytes 1 % of explain")


def test_the_first_comparison_stores_a_baseline_and_says_so(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JPY_SESSION_NAME", "train.ipynb")
    train(session, name="stored")
    monkeypatch.setenv("NBDIST_BASELINE", "require")
    with pytest.raises(ExpectationError, match=r"\.baseline\.json has no run stored on 2 ranks"):
        session.expect("collectives == baseline")
    monkeypatch.delenv("NBDIST_BASELINE")
    assert "this run is the baseline" in session.expect("collectives == baseline")
    monkeypatch.setenv("NBDIST_BASELINE", "require")
    assert "this run is the baseline" in session.expect("step <= 1.1 x baseline")
    train(session, more="dist.barrier()", name="stored")
    with pytest.raises(ExpectationError, match="1 barrier"):
        session.expect("collectives == baseline")


def test_a_run_without_a_name_has_none_to_compare_with(session: Session) -> None:
    session.run(MODEL + TRAIN.format(more=""), track=False)
    with pytest.raises(UsageError, match="%%distributed --run NAME"):
        session.expect("collectives == last")


def test_alarms_of_the_training_stay_when_other_cells_have_run(session: Session) -> None:
    apart = MODEL.replace('layout = nbdist.parallelize(net, "ddp")', "")
    session.run(apart + TRAIN.format(more=""), run_name="apart", track=False)
    session.run("1 + 1")
    with pytest.raises(ExpectationError, match="Each rank trains a model of its own"):
        session.expect("no alarms")


def test_a_training_that_failed_is_an_alarm_no_baseline_and_named_with_all_that_is_found(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NBDIST_BASELINE", raising=False)
    train(session, name="failed")
    with pytest.raises(RankError):
        session.run(MODEL + TRAIN.format(more="") + "1 / 0", run_name="failed", track=False)
    assert "; of a run that failed after 30 steps." in session.expect("collectives == last")
    with pytest.raises(ExpectationError, match="that failed after 30 steps becomes no baseline"):
        session.expect("collectives == baseline")
    assert not list(tmp_path.glob("*.baseline.json"))
    with pytest.raises(ExpectationError, match="The run failed after 30 steps"):
        session.expect("no alarms")
    assert "of a run that failed after 30 steps" in session.expect("loss < 100")


def test_parity_fails_where_the_layout_differs(session: Session) -> None:
    train(session, name="wrong")
    session.run("net[2].bias.register_hook(lambda gradient: gradient * 1.01)")
    with pytest.raises(ExpectationError, match=r"DIFFERS: the gradient of 2\.bias"):
        session.expect("parity")


def test_the_magic_prints_the_line_and_shows_the_error_alone(notebook: Kernel) -> None:
    notebook.cell(MODEL + TRAIN.format(more=""))
    held = notebook.run("limit = 5\n%dist expect loss < {limit}  # as ever")
    assert held.error is None
    assert held.text.startswith("loss < 5 holds: loss is ")
    failed = notebook.run("%dist expect loss < 0")
    assert failed.error is not None
    assert failed.error[0] == "ExpectationError"
    assert len(failed.error[2].splitlines()) <= 3
    assert "nbdist/" not in failed.error[2]
