"""Advice meets what the field does, on 32 jobs."""

from dataclasses import replace

import pytest

from nbdist.study.accelerators import STEP_SHARE, Accelerator
from nbdist.study.advice import (
    Choice,
    Job,
    Spread,
    candidates,
    choose,
    precision_of,
    rule_of,
    time_of,
    traffic_of,
)
from nbdist.study.estimate import Traffic
from nbdist.study.links import Link
from nbdist.study.machine import Machine, parse_machine
from tests.unit.study.advice_cases import CASES, NOTHING_FITS, Case


def machine_of(case: Case) -> Machine:
    its = case.machine
    half = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[its["dtype"]]
    flops = {"float32": its["flops"] / 8, half: its["flops"]}
    device = Accelerator(case.name, flops, int(its["memory"]), 1e12, "", "")
    between = Link(*its["between"]) if its["hosts"] > 1 else None
    return Machine(device, its["devices"], its["hosts"], Link(*its["inside"]), between)


def advised(case: Case) -> tuple[Choice, set[str]]:
    job, machine = Job(**case.job), machine_of(case)
    overlap = 0.0 if "CPU" in case.name else 1.0
    choice = choose(job, machine, candidates(job, machine, overlap))
    words = {precision_of(machine), rule_of(job)}
    if choice.best is not None:
        words |= {word.split()[0] for word in choice.best.words}
    return choice, words


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_advice_is_what_the_field_does(case: Case) -> None:
    choice, words = advised(case)
    family = choice.best.spread.family if choice.best else NOTHING_FITS
    assert not case.families or family in case.families
    assert set(case.uses) <= set(family.split())
    assert set(case.also) <= words


JOB = Job(1e9, 6e12, 2e9, 256, kept=1e8, blocks=24, tokens=1024)


def test_a_step_takes_as_long_as_the_share_of_the_peak_that_it_reaches() -> None:
    machine = parse_machine("1 a100-80")
    whole = replace(machine, accelerator=replace(machine.accelerator, step_share=1.0))
    (usual,), (fast,) = candidates(JOB, machine)[:1], candidates(JOB, whole)[:1]
    assert usual.time.total_s == pytest.approx(fast.time.total_s / STEP_SHARE)


def test_every_layout_divides_the_ranks_and_the_batch() -> None:
    machine = parse_machine("6 a100-80, 2 hosts ib400")
    for one in candidates(JOB, machine):
        assert one.spread.world_size in (1, 6, 12)
        assert one.micro_batch * one.parts * one.spread.apart == JOB.global_batch


def test_shards_hold_a_part_and_send_as_much_as_replicas() -> None:
    machine = parse_machine("8 a100-80")
    best = {one.spread.family: one for one in candidates(JOB, machine) if one.checkpoint}
    assert best["zero3"].peak < best["zero2"].peak < best["ddp"].peak
    sent = {name: traffic_of(JOB, best[name], 2) for name in ("ddp", "zero3")}
    whole = {name: sum(one.nbytes for one in axes.values()) for name, axes in sent.items()}
    # In fp32 an all_reduce sends 2 x 4 bytes a parameter; in 16 bits two gathers and one reduction
    # in fp32 send as many.
    assert whole["zero3"] == pytest.approx(whole["ddp"])


def test_tp_sends_what_the_model_sums_and_else_a_transformers_sums() -> None:
    one = next(c for c in candidates(JOB, parse_machine("4 a100-80")) if c.spread == Spread(tp=4))
    usual, measured = traffic_of(JOB, one, 2), traffic_of(replace(JOB, summed=JOB.kept), one, 2)
    factor = 1.5 if one.checkpoint else 1.0
    assert measured["tp"].nbytes == pytest.approx(factor * 2 * 3 / 4 * JOB.kept * JOB.global_batch)
    assert usual["tp"].nbytes == pytest.approx(4 * measured["tp"].nbytes)


MIXTURE = replace(JOB, experts=12, in_experts=8e8, exchanged=4e8)


def test_ep_sends_tokens_there_and_back_and_averages_what_is_no_expert() -> None:
    every = candidates(MIXTURE, parse_machine("4 a100-80"))
    one = next(c for c in every if c.spread == Spread(ep=4) and not c.checkpoint)
    tokens = 3 / 4 * MIXTURE.exchanged * MIXTURE.global_batch / 4
    averages = 2 * 3 / 4 * 4 * (MIXTURE.parameters - MIXTURE.in_experts) * one.parts
    assert traffic_of(MIXTURE, one, 2)["ep"].nbytes == pytest.approx(tokens + averages)


def test_ep_divides_the_experts_and_the_ranks_and_goes_without_cp() -> None:
    machine = parse_machine("8 h100, 2 hosts ib400")
    its = [one.spread for one in candidates(replace(MIXTURE, tokens=65_536), machine)]
    assert {one.ep for one in its} == {1, 2, 4}
    assert any(one.cp > 1 for one in its)
    assert not any(one.ep > 1 and one.cp > 1 for one in its)
    assert {one.ep for one in (c.spread for c in candidates(JOB, machine))} == {1}


def test_short_sequences_are_cut_only_where_a_host_has_more_ranks_than_samples() -> None:
    machine = parse_machine("8 h100, 2 hosts ib400")
    for batch, largest in ((4, 16), (8, 1)):
        every = candidates(replace(JOB, global_batch=batch), machine)
        assert max(one.spread.cp for one in every) == largest


def test_tokens_that_cross_hosts_take_longer_than_those_that_stay_inside() -> None:
    machine = parse_machine("8 h100, 2 hosts ethernet10")
    inside, across = (
        time_of(machine, its, 1.0, {"ep": Traffic(nbytes=1e9, rounds=10)}, 1, "1f1b").exposed_s
        for its in (Spread(dp=2, ep=8), Spread(ep=16))
    )
    assert across > 10 * inside > 0


def test_what_does_not_fit_is_dropped_with_what_it_needs() -> None:
    machine = parse_machine("8 t4")
    choice = choose(JOB, machine, candidates(JOB, machine))
    dropped = {one.name: one for one in choice.dropped}
    assert dropped["one device"].kind == "memory"
    assert dropped["one device"].needs > dropped["one device"].has


def test_more_micro_batches_shorten_the_bubble_of_a_pipeline() -> None:
    machine = parse_machine("4 a100-80")
    pipelines = [one for one in candidates(JOB, machine) if one.spread == Spread(pp=4)]
    bubbles = {one.parts: one.time.bubble_s / one.time.compute_s for one in pipelines}
    assert bubbles[8] == pytest.approx(3 / 16)
    assert bubbles[8] == pytest.approx(2 * bubbles[16])
