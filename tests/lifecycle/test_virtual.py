"""A cluster whose ranks stand for other devices and links."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbdist
from nbdist import CellResult, Session
from nbdist.client.export.cells import NotebookCell
from nbdist.client.notebook.arguments import parse_dist
from nbdist.client.notebook.scaling_command import scale_out
from nbdist.shared.collectives import rounds, sent_bytes
from nbdist.shared.options import choose_options
from nbdist.shared.virtual import VirtualMachine
from nbdist.study import forecast
from nbdist.study.debt import MOST_CREDIT_S
from nbdist.study.scaling import traffic
from nbdist.study.scaling_report import Scaling
from tests.export.torchrun import ROOT

MACHINE, LATENCY_S = "400 MFLOP/s, 40 Mbit/s 5 ms", 5e-3
WIDTH, BATCH, LAYERS = 128, 128, 3
TRAIN = f"""
import time
model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))
layout = nbdist.parallelize(model, "{{layout}}")
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn({BATCH}, {WIDTH})
y, took = torch.zeros(1), []
for _ in range(8):
    dist.all_reduce(y)
began = time.perf_counter()
for _ in range(8):
    dist.all_reduce(y)
latency_s = (time.perf_counter() - began) / 8 / max(1, 2 * (world_size - 1))
for _ in range({{steps}}):
    began = time.perf_counter()
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    took.append(time.perf_counter() - began)
[latency_s, *took]
"""


FLOPS = 2 * BATCH * WIDTH**2 * (3 * LAYERS - 1)  # of a step; the first input has no gradient
BYTES = 4 * LAYERS * (WIDTH**2 + WIDTH)
# What a layout sends in a step, all of which is waited for: gradients are in one bucket of DDP's,
# and FSDP2 waits for each collective on CPUs.
SENT = {"ddp": [("all_reduce", 1)], "zero3": [("all_gather", 0), ("reduce_scatter", 1)]}


def modelled_s(layout: str, n: int, machine: str, latency_s: float) -> float:
    """Return the seconds of a step: its operations, and latency and bytes of its collectives."""
    here = VirtualMachine.read(machine)
    step_s = FLOPS / here.flops_here
    for kind, is_whole in SENT[layout]:
        nbytes = sent_bytes(kind, BYTES if is_whole else BYTES // n, n, "gloo")
        step_s += rounds(kind, n, "gloo") * latency_s + nbytes / here.bytes_here
    return step_s


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("virtual")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with nbdist.start(n=4, device="cpu", virtual=MACHINE, say=lambda line: None) as session:
            yield session


@pytest.fixture(scope="module")
def trained(virtual: Session) -> CellResult:
    return virtual.run(TRAIN.format(layout="ddp", steps=3))


@pytest.mark.slow
def test_steps_take_at_least_the_time_of_the_virtual_devices(trained: CellResult) -> None:
    for rank in range(4):
        _, *took = trained[rank].value
        assert sum(took) >= len(took) * FLOPS / 400e6 - MOST_CREDIT_S


def test_collectives_wait_the_links_latency_in_each_round(virtual: Session) -> None:
    code = """
import time
y, took = torch.ones(1), []
for is_async in (False, True):
    began = time.perf_counter()
    work = dist.all_reduce(y, async_op=is_async)
    if is_async: work.wait()
    took.append(time.perf_counter() - began)
[y.item(), *took]
"""
    for result in virtual.run(code).value_list:
        assert result[0] == 16
        assert min(result[1:]) >= rounds("all_reduce", 4, "gloo") * LATENCY_S


def test_all_that_is_shown_says_that_it_is_emulated(
    virtual: Session, trained: CellResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"emulated: {MACHINE}" in str(virtual.status()).splitlines()[0]
    past = virtual._showing.board()
    assert past.caption("overview").endswith(f"Emulated: {MACHINE}.")
    virtual.run("torch.ones(64, 64) @ torch.ones(64, 64); None", show=True)
    assert f"Emulated: {MACHINE}" in capsys.readouterr().out


def test_a_cell_without_computation_says_nothing(
    virtual: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    virtual.run("1 + 1", show=True)
    assert "Emulated" not in capsys.readouterr().out


def test_a_rank_in_the_place_of_a_killed_one_is_as_slow(virtual: Session) -> None:
    virtual.restart("1")
    code = "import time; a = torch.ones(256, 256); t = time.perf_counter(); a @ a; "
    took = virtual.run(f"{code}time.perf_counter() - t").value_list
    assert min(took) >= 0.99 * 2 * 256**3 / 400e6


# Slow enough for two loaded cores: what ranks do beside their device's work is little of a step.
FORECAST_ON = "60 MFLOP/s, 10 Mbit/s 20 ms"
FORECAST = """\
%%distributed
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
model = nbdist.parallelize(model, "ddp").model
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4096, 256))
for (x,) in nbdist.loader(data, global_batch={batch}):
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()"""


def scaling_of(words: str, batch: int) -> Scaling:
    """Return what `%dist scaling` tells of virtual ranks, beside what no session runs."""
    asked = parse_dist(f"scaling {words}")
    assert asked is not None
    running = choose_options(0, n=2, device="cpu", backend=None, threads=1, virtual=FORECAST_ON)
    return scale_out(
        asked, [NotebookCell(1, FORECAST.format(batch=batch), losses={0: 1.0})], running
    )


@pytest.mark.slow
def test_scaling_measures_ranks_that_stand_for_the_same_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = scaling_of("-n 1,2 --steps 4", 16)
    machine = VirtualMachine.read(FORECAST_ON)
    one, two = found.worlds
    flops = 2 * 16 * 256**2 * (3 * 4 - 1)
    assert one.time.compute_s >= flops / machine.flops_here - MOST_CREDIT_S
    assert two.latency_s >= machine.latency_here
    sent_s = traffic(two.calls, "gloo").nbytes / machine.bytes_here
    assert two.time.exposed_s + two.time.hidden_s >= 0.9 * sent_s  # a pace lets a burst through
    assert f"Emulated: {FORECAST_ON}. This machine kept up with" in str(found)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a bound: where other work loads the cores, starts of 15 ranks take most
@pytest.mark.parametrize(("words", "batch"), [("", 128), ("--weak", 32)], ids=["strong", "weak"])
def test_one_and_two_virtual_ranks_forecast_four_and_eight_within_a_tenth(
    words: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = scaling_of(f"-n 1,2,4,8 --steps 6 {words}", batch)
    assert found.kind == (words.strip("-") or "strong")
    print(found, *found.worlds, sep="\n")
    model = forecast.fit(found.worlds[:2], found.kind)
    for world in found.worlds[2:]:
        predicted_s = model.predict(world.n).step_s
        print(f"{world.n} ranks: {world.step_s:.3f} s, forecast {predicted_s:.3f} s")
        assert predicted_s == pytest.approx(world.step_s, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize(
    ("n", "machine"),
    [
        (8, "30 MFLOP/s, 8 Mbit/s"),
        (16, "15 MFLOP/s, 4 Mbit/s"),
        (64, "5 MFLOP/s, 2 Mbit/s"),
    ],
)
def test_steps_of_many_devices_take_what_their_model_says_or_the_cell_says_that_they_do_not(
    n: int, machine: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with nbdist.start(n=n, device="cpu", virtual=machine, say=lambda line: None) as session:
        result = session.run(TRAIN.format(layout=layout, steps=4), show=True, track=False)
    told = [result[rank].value for rank in range(n)]
    measured_s = statistics.median(took for _, *all_took in told for took in all_took[1:])
    asked_s = modelled_s(layout, n, machine, statistics.median(one[0] for one in told))
    said = capsys.readouterr().out
    print(f"{n} x {machine}, {layout}: {measured_s:.3f} s, modelled {asked_s:.3f} s")
    is_right = measured_s == pytest.approx(asked_s, rel=0.1)
    assert is_right or "kept up with" in said or "Collectives took" in said
