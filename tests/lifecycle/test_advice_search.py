"""The advised layout beside the best of all layouts, each measured on four virtual devices.

`NBDIST_WRITE_ADVICE_TABLE=1 python -m pytest -m slow tests/lifecycle/test_advice_search.py` writes
`advice_table.md` anew: an hour of two free cores. With `-k` a case's row alone is written.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import nbdist
from nbdist import Session
from nbdist.client.advice.advise import advise
from nbdist.client.advice.facts import Training, policies_of, training
from nbdist.client.advice.here import machine_of, measured_s
from nbdist.shared.errors import LayoutError, RankError
from nbdist.study.advice import Candidate, Spread, room_of, schedule_of
from nbdist.study.machine import Machine
from nbdist.study.step_time import StepTime
from tests.lifecycle.searched import CASES, Case

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("advice_table.md")
WRITES = bool(os.environ.get("NBDIST_WRITE_ADVICE_TABLE"))
NEAR = 1.10  # times the best
AGAIN = 1.25  # times the best: what one step found so near is measured by three
LEAST_KEPT = 90  # per cent: below it a cell says that its times are too long
RANKS = 4
HEAD = """\
# Advice beside an exhaustive search

Of four virtual devices: a step as advised, and the fastest of all layouts that fit. Kept up: the
share of the virtual time, of these two the lower. Made by `test_advice_search.py`.

| case | device | advised | step | best | step | ratio | tried | refused | too large | kept up |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

Measured = tuple[float, int]  # seconds of a step, per cent of the virtual time kept up with


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Session, Machine]]:
    """Four ranks that know the models, and what a probe finds of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("searched"))
        with nbdist.start(
            n=RANKS, device="cpu", virtual=request.param, say=lambda line: None
        ) as session:
            session.run(f"import sys; sys.path.insert(0, {str(ROOT)!r})", track=False)
            yield session, machine_of(session)


def write(case: Case, row: str) -> None:
    """Put a case's row into the table, in the order of the cases; other rows stay."""
    old = TABLE.read_text().splitlines(keepends=True) if TABLE.exists() else []
    rows = {line.split(" | ")[0][2:]: line for line in old} | {case.name: row}
    TABLE.write_text(HEAD + "".join(rows[one.name] for one in CASES if one.name in rows))


def spreads() -> Iterator[Spread]:
    """Yield one device, and whatever axes four ranks can have; experts need a model with some."""
    yield Spread()
    yield Spread(dp=RANKS, stage=1)
    yield Spread(fsdp=RANKS, stage=2)
    axes = ("pp", "dp", "fsdp", "cp", "tp")
    for sizes in itertools.product((1, 2, 4), repeat=len(axes)):
        one = Spread(**dict(zip(axes, sizes, strict=True)))
        if one.world_size == RANKS:
            yield replace(one, stage=3 if one.fsdp > 1 else 0)


def every(samples: int, blocks: int, is_short_of_memory: bool) -> Iterator[Candidate]:
    """Yield each layout with its micro-batches; what only saves memory where that is short."""
    for its in spreads():
        share, left = divmod(samples, its.apart)
        if left or not share:
            continue
        counts = [n for n in (1, 2, 4, 8, 16) if share % n == 0 and n >= its.pp]
        if its.pp == 1 and not is_short_of_memory:
            counts = [1]
        for parts, checkpoint in itertools.product(counts, sorted({False, is_short_of_memory})):
            sizes = (share // parts, parts, checkpoint, its.fsdp == 1)
            schedule = schedule_of(its.pp, parts, blocks)
            yield Candidate(its, *sizes, 0.0, StepTime(1.0), schedule)


def fits(what: Training, machine: Machine, one: Candidate) -> bool:
    """Return whether an estimate of the model's own code has room on a device.

    Raises:
        LayoutError: The layout refuses the model.
    """
    its = one.spread
    at_once = one.micro_batch * (one.parts if its.pp > 1 else 1)
    found = what.estimate(its.layout, machine, its.world_size, at_once, *policies_of(one))
    waits = found.gradients if one.parts > 1 and its.pp == 1 else 0
    return found.peak + waits <= room_of(machine)


def search(
    advised: Candidate,
    others: Iterable[Candidate],
    step: Callable[[Candidate, int], Measured],
    fit: Callable[[Candidate], bool],
) -> tuple[dict[Candidate, Measured], int, int]:
    """Return what the advised layout and others that fit take; how many are refused, or large."""
    every_one = {_key(one): one for one in others} | {_key(advised): advised}
    found: dict[Candidate, Measured] = {}
    refused = large = 0
    with ThreadPoolExecutor() as pool:
        has_room = [(one, pool.submit(fit, one)) for one in every_one.values()]
    for one, fitting in has_room:
        try:
            if not fitting.result():
                large += 1
                continue
            found[one] = step(one, 1)
        except (LayoutError, RankError) as error:
            if isinstance(error, RankError) and "LayoutError" not in str(error):
                raise
            print(f"{one.words} is refused: {error}")
            refused += 1
    least = min(seconds for seconds, _ in found.values())
    near = [one for one in found if one is advised or found[one][0] <= AGAIN * least]
    return found | {one: step(one, 3) for one in near}, refused, large


def _key(one: Candidate) -> tuple[object, ...]:
    return (one.spread, one.micro_batch, one.parts, one.checkpoint)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "case"),
    [(case.machine, case) for case in CASES],
    indirect=["ranks"],
    ids=[case.name for case in CASES],
)
def test_the_advised_layout_is_nearly_as_fast_as_the_best_of_all(
    ranks: tuple[Session, Machine], case: Case,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    session, machine = ranks
    if case.memory:
        chip = replace(machine.accelerator, memory_bytes=case.memory)
        machine = replace(machine, accelerator=chip)
    what = training(case.model, case.batch, case.loss, None, None)
    monkeypatch.setattr(session, "run", partial(session.run, show=True))

    def step(one: Candidate, steps: int) -> Measured:
        capsys.readouterr()
        seconds = measured_s(session, machine, one, what, steps)
        late = re.search(r"kept up with (\d+) %", capsys.readouterr().out)
        return seconds, int(late[1]) if late else 100

    advised = advise(case.model, case.batch, machine, loss=case.loss).best
    assert advised is not None
    layouts = every(what.samples, case.blocks, bool(case.memory))
    fit = partial(fits, what, machine) if case.memory else lambda one: True
    with what.pool:
        found, refused, large = search(advised, layouts, step, fit)
    best = min(found, key=lambda one: found[one][0])
    measured, least = found[advised], found[best]
    ratio = measured[0] / least[0]
    kept = min(measured[1], least[1])
    row = (
        f"| {case.name} | {case.machine} | {', '.join(advised.words)} | {measured[0]:.2f} s | "
        f"{', '.join(best.words)} | {least[0]:.2f} s | {ratio:.2f} | {len(found)} | {refused} | "
        f"{large} | {kept} % |\n"
    )
    print(row)
    if kept < LEAST_KEPT:
        pytest.skip(f"no measurement: the cores kept up with {kept} % of the virtual time. {row}")
    if WRITES:
        write(case, row)
    assert ratio <= NEAR
