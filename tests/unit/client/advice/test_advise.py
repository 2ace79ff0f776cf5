"""Advice as users read it, and in a terminal."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbdist import cli
from nbdist.client.advice import advise as module
from nbdist.client.advice.answer import Advice
from nbdist.client.advice.estimate import EstimatePool, EstimateProcess
from nbdist.client.advice.facts import Training, estimated, job_of, training
from nbdist.shared.errors import UsageError
from nbdist.study.advice import (
    LAUNCH_S,
    Candidate,
    Choice,
    Dropped,
    Job,
    Spread,
    candidates,
    choose,
    compute_rate,
    traffic_of,
)
from nbdist.study.estimate import Estimate, RankEstimate, TensorShape, Traffic
from nbdist.study.machine import Machine, parse_machine
from nbdist.study.prices import PRICES
from nbdist.study.step_time import StepTime

JOB = Job(1e9, 6e12, 2e9, 256, kept=1e8, blocks=24, tokens=1024, samples=10_000_000)
MODEL = """
import numpy

def make():
    from torch import nn
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))

batch = numpy.zeros((8, 64), "float32")
def pair():
    return batch, batch
def loss(outputs, y):
    return (outputs - y).square().mean()
"""


def advice_on(text: str, job: Job = JOB, **other: Any) -> Advice:
    machine = parse_machine(text)
    choice = choose(job, machine, candidates(job, machine))
    names = ("make", "loss", "torch.optim.AdamW")
    return Advice(choice, job, machine, PRICES["a100-40"], names, 32, **other)


def test_the_answer_names_layout_reason_price_and_what_it_rests_on() -> None:
    said = str(advice_on("8 a100-40"))
    assert said.startswith("Train with ddp, accumulate 4 on 8 ranks: the fastest that fits")
    assert "times as fast as one device (predicted)." in said
    assert "All figures are predicted." in said
    assert "USD per 1k" in said
    assert "The run costs" in said
    assert "list prices change" in said
    assert "by the square root rule, from 32 to 256 samples" in said
    assert 'nbdist.parallelize(make, "ddp", nbdist.Precision("bf16")' in said


def test_a_short_run_needs_no_distributed_training() -> None:
    said = str(advice_on("8 a100-40", replace(JOB, samples=1000)))
    assert said.startswith("You do not need distributed training: one device ends the run in")


def test_where_nothing_fits_the_leanest_says_how_much_is_missing() -> None:
    found = advice_on("2 t4", replace(JOB, parameters=1e10))
    assert found.best is None
    assert found.code == ""
    assert "times the memory" in str(found)
    assert "ddp: needs" in str(found)


def test_a_measured_step_stands_beside_the_predicted_one() -> None:
    found = replace(advice_on("8 a100-40"), measured_s=2.0)
    assert "measured here: 2.00 s, predicted" in str(found)


def test_a_measured_best_that_is_slower_than_one_device_is_said_below_the_verdict() -> None:
    said = str(replace(advice_on("8 a100-40"), measured_s=1000.0)).splitlines()
    assert said[1].startswith("Measured, it is slower than one device is predicted to be: 16.7 min")
    faster = str(replace(advice_on("8 a100-40"), measured_s=0.001))
    assert "Measured, it is slower" not in faster


def test_a_step_of_emulated_devices_says_so() -> None:
    found = replace(advice_on("8 a100-40"), measured_s=2.0)
    name = "CPU (emulated: 2 GFLOP/s, 100 Mbit/s)"
    chip = replace(found.machine.accelerator, name=name, step_share=1.0)
    said = str(replace(found, machine=replace(found.machine, accelerator=chip)))
    assert f"reach 100% of the peak of {name}" in said
    assert "8 CPU (emulated: 2 GFLOP/s, 100 Mbit/s) on" in said
    assert "measured here, emulated: 2.00 s" in said


def test_a_run_that_ends_before_its_first_checkpoint_has_no_interval() -> None:
    assert "Save every" in str(advice_on("8 a100-40", replace(JOB, samples=0)))
    short = advice_on("8 a100-40", replace(JOB, samples=100_000))
    assert "Save every" not in str(short)


def test_names_that_ranks_do_not_have_stand_above_the_code() -> None:
    found = advice_on("8 a100-40")
    assert "on 8 ranks, in which make, loss, dataset and lr are defined (this" in str(found)
    found = replace(found, names=("make", "torch.nn.functional.mse_loss", "Own"))
    assert "in which make, Own, dataset and lr are defined" in str(found)
    assert "layout.step(x, y, lambda outputs, y: torch.nn.functional.mse_loss(" in found.code


def test_a_loss_of_torch_is_written_with_its_module() -> None:
    import torch

    assert module._loss(torch.nn.functional.mse_loss) == "torch.nn.functional.mse_loss"

    def mse_loss(outputs: float, y: float) -> float:
        return outputs - y

    assert module._loss(mse_loss) == "mse_loss"


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (TensorShape((2, 3), "float32"), "a tensor"),
        ({"x": 1, "y": 2}, "a dict"),
        ((1, 2, 3), "a tuple of 3"),
    ],
)
def test_a_loss_with_a_batch_that_is_no_pair_is_refused_at_once(batch: object, said: str) -> None:
    with pytest.raises(UsageError, match=f"pair of inputs and targets, and here it is {said}"):
        training(lambda: None, batch, lambda outputs, _y: outputs, None, None)


def test_a_model_that_waits_for_python_needs_one_device() -> None:
    small = replace(JOB, flops=1e6, parameters=1e5, activations=1e4, launches=500.0, samples=0)
    found = advice_on("8 h100", small)
    assert found.best is not None
    assert found.best.time.total_s == pytest.approx(500 * LAUNCH_S)
    assert str(found).startswith(
        "You do not need distributed training: 8 devices would be only 1.00"
    )
    assert "Python 100%" in str(found) or "Python 9" in str(found)


def test_each_stage_of_a_pipeline_has_a_micro_batch() -> None:
    found = candidates(replace(JOB, global_batch=8), parse_machine("8 h100"))
    assert all(one.parts >= one.spread.pp for one in found)


def test_a_refused_layout_is_replaced_by_the_next_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusing(
        _what: object, _machine: Machine, some: list[Candidate]
    ) -> list[Candidate | Dropped]:
        return [
            Dropped("ddp", "refused", said="it draws")
            if one.spread.family == "ddp"
            else replace(one, is_estimated=True)
            for one in some
        ]

    monkeypatch.setattr(module, "estimated", refusing)
    choice: Choice = module._chosen(
        training(lambda: None, (), None, None, None), JOB, parse_machine("8 h100")
    )
    assert choice.best is not None
    assert choice.best.spread.family == "zero1"
    assert choice.best.is_estimated
    assert any(one.said == "it draws" for one in choice.dropped)
    slower = [one for one in choice.dropped if one.kind == "slower"]
    assert slower
    assert all(one.needs >= 1 for one in slower)


def test_an_estimated_pipeline_takes_its_longest_stage_and_the_bubble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = (RankEstimate(0, flops=10**12), RankEstimate(1, flops=2 * 10**12))
    monkeypatch.setattr(Training, "estimate", lambda *_: Estimate("pp=2", 2, stages))
    what = training(lambda: None, TensorShape((4, 3), "int64"), None, None, None)
    machine = parse_machine("2 h100")
    one = Candidate(Spread(pp=2), 1, 4, False, True, 0.0, StepTime(1.0))
    (found,) = estimated(what, machine, [one])
    assert isinstance(found, Candidate)
    assert found.time.total_s == pytest.approx(2e12 / compute_rate(machine) * (1 + 1 / 4))


def test_a_job_learns_its_experts_from_an_estimate_on_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others, experts, tokens = 400, 800, 5000  # bytes of parameters, and of two samples' rows

    def estimate(_what: object, layout: str, *_: object) -> Estimate:
        if layout == "ep=2":  # half of the experts here, half of the rows there
            held = others + experts // 2
            sent = {"ep": Traffic(nbytes=tokens / 2 + others, ranks=2)}
            rank = RankEstimate(0, parameters=held, gradients=held, traffic=sent)
            return Estimate(layout, 2, (rank,), experts=4)
        held = others + experts
        return Estimate(layout, 1, (RankEstimate(0, parameters=held, gradients=held),))

    monkeypatch.setattr(Training, "estimate", estimate)
    what = training(lambda: None, TensorShape((2, 3), "int64"), None, None, None)
    found = job_of(what, parse_machine("2 h100"), 4, 0)
    assert (found.experts, found.in_experts, found.exchanged) == (4, experts / 4, tokens / 2)
    assert found.no_experts == ""


@pytest.mark.slow
def test_experts_of_a_model_are_measured_and_formulas_send_what_its_layouts_do() -> None:
    from tests.unit.client.advice import mixture

    what = training(mixture.make, TensorShape((4, 16), "int64"), None, None, None)
    machine = parse_machine("4 h100")
    # In one precision: shards compute all of it in 16 bits, replicas what autocast does.
    chip = replace(machine.accelerator, flops={"float32": 1e13})
    machine = replace(machine, accelerator=chip)
    with what.pool:
        found = job_of(what, machine, 16, 0)
        # All in the processes that have estimated other layouts of the same experts.
        for its in (Spread(ep=4), Spread(fsdp=2, ep=2, stage=3), Spread(dp=2, ep=2)):
            estimate = what.estimate(its.layout, machine, 4, 4)
            one = Candidate(its, 4, 1, False, True, 0.0, StepTime(1.0))
            sent = traffic_of(found, one, 2)["ep"].nbytes
            assert sent == pytest.approx(estimate.traffic["ep"].nbytes, rel=0.02)
    assert found.experts == mixture.E
    assert found.in_experts == 2 * 2 * mixture.E * mixture.D * mixture.INSIDE


@pytest.mark.slow
def test_each_stage_of_a_pipeline_of_mixtures_is_estimated() -> None:
    from tests.unit.client.advice import mixture

    with EstimateProcess() as process:  # the second in the world of another rank
        found = process.estimate(mixture.make, TensorShape((8, 16), "int64"), "pp=2 ep=2", 4)
    assert [one.traffic["ep"].ranks for one in found.ranks] == [2, 2]


def make_once_crashed(marker: str, crashes: int) -> object:
    """Make a model, but end the process the first times."""
    import os

    from tests.unit.client.advice import mixture

    with open(marker, "a") as file:
        file.write("x")
        file.flush()
        if os.fstat(file.fileno()).st_size <= crashes:
            os.abort()
    return mixture.make()


@pytest.mark.slow
def test_an_estimate_that_crashes_behind_others_is_made_in_a_new_process(tmp_path: Path) -> None:
    batch = TensorShape((4, 16), "int64")
    marker = str(tmp_path / "made")
    with EstimatePool(1) as pool:
        pool.estimate(functools.partial(make_once_crashed, marker, 0), batch, "ddp", 1)
        Path(marker).unlink()
        once = functools.partial(make_once_crashed, marker, 1)
        assert pool.estimate(once, batch, "ep=2", 2).experts == 8
    with EstimatePool(1) as pool, pytest.raises(UsageError, match="ended without one"):
        pool.estimate(functools.partial(make_once_crashed, marker, 9), batch, "ddp", 1)


def test_a_model_without_experts_says_in_one_line_why_ep_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def estimated(_what: object, _machine: Machine, some: list[Candidate]) -> list[Candidate]:
        return [replace(one, is_estimated=True) for one in some]

    monkeypatch.setattr(module, "estimated", estimated)
    what = training(lambda: None, (), None, None, None)
    job = replace(JOB, no_experts="Net has no experts that ep can share out")
    for text, is_said in (("8 h100", True), ("1 h100", False)):
        choice = module._chosen(what, job, parse_machine(text))
        said = str(replace(advice_on(text), choice=choice))
        assert ("  ep: refused: Net has no experts that ep can share out\n" in said) == is_said


def test_experts_that_are_shared_out_are_said_to_get_as_many_tokens() -> None:
    mixture = replace(JOB, parameters=8e9, experts=8, in_experts=7e9, exchanged=2e8)
    found = advice_on("8 a100-40", mixture)
    shared = next(one for one in found.choice.others if one.spread.ep > 1)
    said = str(replace(found, choice=replace(found.choice, best=shared)))
    assert "Experts: each is taken to get as many tokens." in said
    assert "Experts: " not in str(found)


def test_layouts_that_were_not_estimated_say_how_much_slower_they_are() -> None:
    found = advice_on("8 a100-40")
    dropped = (Dropped("tp", "slower", 1.3), Dropped("pp", "slower", 1.2))
    said = str(replace(found, choice=replace(found.choice, dropped=dropped)))
    assert "times as long as the fastest by formulas: pp (1.2), tp (1.3)" in said


def test_a_batch_is_resized_along_its_samples_only() -> None:
    what = Training(lambda: None, {"x": TensorShape((8, 3), "int64"), "n": 8}, None, None, {})
    assert what.of(2) == {"x": TensorShape((2, 3), "int64"), "n": 8}
    assert (what.samples, what.tokens) == (8, 3)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensor with samples"):
        _ = training(lambda: None, {"n": 8}, None, None, None).samples


def test_a_terminal_advises_a_model_that_a_module_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "advised_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["advised_model:make", "--batch", "advised_model:pair", "--loss", "advised_model:loss"]
    assert cli.main(["advise", *words, "--on", "1 t4", "--global-batch", "16"]) == 0
    said, passing = capsys.readouterr()
    assert passing.startswith("Estimating layouts: ")
    assert "You do not need distributed training: there is one device" in said
    assert "by formulas alone" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "mymodel", "--batch", "a:b"], "module:function"),
        (["estimate", "no_such_module:make", "--batch", "a:b"], "cannot be imported"),
        (["estimate", "math:make", "--batch", "a:b"], 'math has no "make"'),
        (["advise", "math:sin", "--batch", "math:pi"], '--on "8 h100 nvlink4'),
    ],
)
def test_a_terminal_says_what_is_wrong_in_one_error(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 1
    assert said in capsys.readouterr().err
