"""Advice meets what the field does, on 30 jobs."""

import pytest

from nbdist.study.accelerators import Accelerator
from nbdist.study.advice import Choice, Job, candidates, choose, precision_of, rule_of
from nbdist.study.links import Link
from nbdist.study.machine import Machine
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
