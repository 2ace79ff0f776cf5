"""A number is the same wherever it is shown: board, runs, comparisons, expect and MLflow."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nbdist.client.board.drawn.plots import lines
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.tables import ViewTable
from nbdist.client.board.views import VIEWS
from nbdist.client.expect.expect import expect
from nbdist.client.metrics.analysis.parts import StepParts
from nbdist.client.metrics.analysis.values import RECENT, Analysis, ExplainedStep, RankStep
from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.client.tracking.begin import RunPlace
from nbdist.client.tracking.past import runs as run_list
from nbdist.client.tracking.series import Point
from nbdist.client.tracking.spool import SpooledRun, spool_of
from nbdist.client.tracking.writing import RunEnd, RunWriter
from nbdist.shared.wire import Batch, Record, is_measured

if TYPE_CHECKING:
    from nbdist.client.session.session import Session

STEPS, RANKS = 400, (0, 1)
WAITING = {0: 0.75, 1: 0.25}  # of the exposed communication


@dataclass(frozen=True)
class Shown:
    """What one training's numbers are, and everywhere they are shown."""

    records: list[Record]
    of_devices: list[Record]
    telemetry: Telemetry
    scene: Scene
    home: Path
    key: str

    @property
    def recent(self) -> dict[int, list[Record]]:
        """The steps that the numbers are about, counted by hand."""
        found = {}
        for rank in RANKS:
            own = [record for record in self.records if record.rank == rank]
            begin = [r.step for r in own if is_measured(r.values)][-RECENT]
            found[rank] = [record for record in own if record.step >= begin]
        return found

    @property
    def measured(self) -> list[Record]:
        return [r for own in self.recent.values() for r in own if is_measured(r.values)]

    @property
    def step_ms(self) -> float:
        return fmean(fmean(1e3 * r.values["step_s"] for r in own) for own in self.recent.values())

    @property
    def comm_pct(self) -> float:
        """Each rank's share, weighed with the time of its steps."""
        whole = part = 0.0
        for own in self.recent.values():
            told = [r.values for r in own if is_measured(r.values)]
            share = sum(v["comm_s"] for v in told) / sum(v["step_s"] for v in told)
            step_s = fmean(r.values["step_s"] for r in own)
            whole, part = whole + step_s, part + share * step_s
        return 100 * part / whole

    def making_ms(self, part: str) -> float:
        """Each rank's work on the batches of a step: measured steps stand for the others."""
        found = []
        for own in self.recent.values():
            told = [r.values for r in own if is_measured(r.values)]
            share = sum(v[f"{part}_s"] for v in told) / sum(v["step_s"] for v in told)
            found.append(1e3 * share * fmean(r.values["step_s"] for r in own))
        return fmean(found)

    @property
    def loss(self) -> float:
        return fmean(r.values["loss"] for r in self.records if r.step == STEPS)

    @property
    def recent_loss(self) -> float:
        return fmean(r.values["loss"] for r in self.records if r.step > STEPS - 50)

    def mlflow(self) -> dict[str, float]:
        """The metrics that MLflow shows: of each the one of the last step."""
        last: dict[str, tuple[int, int, float]] = {}
        entries = SpooledRun(spool_of(self.home) / self.key).read(0, 10**6).entries
        for point in (entry for entry in entries if isinstance(entry, Point)):
            for name, value in point.values.items():
                last[name] = max(last.get(name, (0, 0, 0.0)), (point.step, point.time_ms, value))
        return {name: value for name, (_, _, value) in last.items()}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A training of which every fourth step is measured, which takes longer than the others."""
    chance, records = random.Random(3), []
    for step in range(1, STEPS + 1):
        for rank in RANKS:
            is_slow = step == 1  # it connects
            parts = [chance.uniform(low, 2 * low) for low in (4e-3, 1e-3 * (1 + rank), 1e-4, 2e-4)]
            values = {"loss": 3 / step**0.5 + 0.1 * chance.random() + rank, "samples": 8.0}
            if step <= 16 or step % 4 == 0:
                names = ("compute_s", "comm_s", "data_s", "optimizer_s")
                values |= dict(zip(names, parts, strict=True)) | {"other_s": 1e-4}
                values["step_s"] = sum(parts) + 1e-4
                values |= {"fetch_s": chance.uniform(2e-3, 3e-3), "collate_s": 2e-4, "batches": 1.0}
            else:
                values["step_s"] = 0.8 * sum(parts)
            values["step_s"] += 2.0 * is_slow
            moment_ns = 10**15 + 9_000_000 * step + rank
            records.append(Record(rank, step - 1, "step", step, moment_ns, values))
    told = [of_device(rank, step) for step in range(20, STEPS, 20) for rank in RANKS]
    info = CellInfo(5, "train()", RANKS, 2, "gloo", ("cpu", "cpu"), run_name="one")
    telemetry, compared = Telemetry(), compared_steps(records)
    for record in records + told:
        telemetry.receive(Batch(record.rank, (record,)))
    home = tmp_path_factory.mktemp("notebook") / ".nbdist"
    place = RunPlace(home, f"sqlite:///{home}/mlflow.db", "numbers")
    writer = RunWriter(place, info, [info], telemetry, 10**9, lambda: compared)
    writer.add(records[: len(records) // 2])
    writer.tick()
    writer.add(records[len(records) // 2 :] + told)
    writer.end(RunEnd("finished", None, None, 2 * 10**9))
    writer.close()
    seen = look(telemetry, info, Analysis(compared))
    return Shown(records, told, telemetry, seen, home, writer.begin.key)


def of_device(rank: int, step: int) -> Record:
    chance = random.Random(STEPS * rank + step)
    told = {"cpu_pct": 100 * chance.random(), "device_pct": 100 * chance.random()}
    told |= {"device_bytes": 1e9 * chance.uniform(10, 70), "device_total_bytes": 80e9}
    told |= {"allocated_bytes": 9e9, "reserved_bytes": 1e10, "peak_bytes": 9.5e9}
    told |= {"device_c": chance.uniform(30, 80), "device_w": chance.uniform(100, 600)}
    return Record(rank, 10**6 + step, "device", step, 10**15 + 9_000_000 * step + rank, told)


def compared_steps(records: Sequence[Record]) -> tuple[RankStep, ...]:
    """Return what the analysis makes of steps of which some were put beside each other."""
    parts = StepParts()
    for record in records:
        parts.add_step(record.rank, record.step, record.values)
    for step in range(STEPS - 40, STEPS, 8):
        waits = {rank: 4.0 * share for rank, share in WAITING.items()}
        rest = {rank: 4.0 - waiting for rank, waiting in waits.items()}
        parts.add_explained(ExplainedStep(step, waits, rest), {0: {1: waits[0]}, 1: {0: waits[1]}})
    return parts.means()


def agrees(text: str, value: float) -> None:
    """Check that a text is this number, to the digits it shows."""
    (digits,) = re.findall(r"-?[\d,]+\.?\d*", text.partition("±")[0])
    decimals = len(digits.partition(".")[2])
    assert float(digits.replace(",", "")) == pytest.approx(value, abs=0.51 * 10**-decimals), text


def loss_of_expect(telemetry: Telemetry) -> str:
    """Return what `%dist expect` says of a training's loss."""
    trained = SimpleNamespace(telemetry=telemetry, cut_off="")
    return expect(cast("Session", SimpleNamespace(trained=trained)), "loss < 99")


def loss_in_picture(scene: Scene) -> str:
    """Return the number over the finished plot of the loss."""
    return found(r"^([\d.]+) in the last step$", lines._note(scene.panel("loss"), scene))


def column(table: ViewTable, name: str) -> list[float]:
    return [float(row[table.head.index(name)].replace(",", "")) for row in table.rows]


def test_the_tables_of_the_board_agree(shown: Shown) -> None:
    overview, step = VIEWS["overview"].table(shown.scene), VIEWS["step"].table(shown.scene)
    assert fmean(column(overview, "step ms")) == pytest.approx(shown.step_ms, abs=0.006)
    assert column(step, "step") == pytest.approx(column(overview, "step ms"), abs=0.006)
    comm_ms = [
        sum(pair) for pair in zip(*(column(step, n) for n in ("transfer", "waiting")), strict=True)
    ]
    steps_ms = column(step, "step")
    assert 100 * sum(comm_ms) / sum(steps_ms) == pytest.approx(shown.comm_pct, abs=0.2)
    shares = [100 * comm / whole for comm, whole in zip(comm_ms, steps_ms, strict=True)]
    assert shares == pytest.approx(column(overview, "comm %"), abs=0.6)
    assert fmean(column(overview, "loss")) == pytest.approx(shown.loss, abs=0.006)
    of_loss = VIEWS["loss"].table(shown.scene)
    assert fmean(column(of_loss, "mean of last 50")) == pytest.approx(shown.recent_loss, abs=0.006)


def test_the_sentences_of_the_board_agree(shown: Shown) -> None:
    said = VIEWS["overview"].sentence(shown.scene)
    agrees(found(r"loss ([\d.]+)", said), shown.loss)
    agrees(found(r"([\d.]+) % of a step in communication", said), shown.comm_pct)
    of_step = VIEWS["step"].sentence(shown.scene)
    agrees(found(r"A step takes ([\d.]+) ms", of_step), shown.step_ms)
    shares = [float(found(rf"([\d.]+) % {part}", of_step)) for part in ("transfer", "waiting")]
    assert sum(shares) == pytest.approx(shown.comm_pct, abs=1.0)
    agrees(found(r"([\d.]+) % waiting", of_step), shown.mlflow()["wait_pct"])
    agrees(found(r"loss ([\d.]+)", VIEWS["loss"].sentence(shown.scene)), shown.loss)


def test_the_last_loss_is_the_same_everywhere(shown: Shown) -> None:
    """Also in the picture, whose lines are smooth: a mean of steps would be another number."""
    agrees(loss_in_picture(shown.scene), shown.loss)
    said = found(
        rf"loss is ([\d.]+) at step {STEPS}, the mean of 2", loss_of_expect(shown.telemetry)
    )
    agrees(said, shown.loss)
    (row,) = run_list.runs(shown.home)
    assert row.values["loss"] == pytest.approx(shown.loss)
    assert "Last loss and other last values: of the last step" in str(run_list.RunsTable((row,)))
    assert abs(shown.recent_loss - shown.loss) > 0.01, "a mean of steps is not another number here"


def test_a_loss_that_one_rank_logs_is_the_loss_everywhere(tmp_path: Path) -> None:
    info = CellInfo(5, "train()", RANKS, 2, "gloo", ("cpu", "cpu"), run_name="logged")
    telemetry, home = Telemetry(), tmp_path / ".nbdist"
    place = RunPlace(home, f"sqlite:///{home}/mlflow.db", "numbers")
    writer = RunWriter(place, info, [info], telemetry, 10**9)
    for step in range(1, 31):
        for rank in RANKS:
            seen = {"loss": 7.0 + rank, "step_s": 0.01}
            records = [Record(rank, 2 * step, "step", step, 10**15 + 10**7 * step, seen)]
            if rank == 0:
                mine = {"loss": 1 / step}
                records.append(Record(0, 2 * step + 1, "log", step, 10**15 + 10**7 * step, mine))
            telemetry.receive(Batch(rank, tuple(records)))
            writer.add(records)
    writer.end(RunEnd("finished", None, None, 2 * 10**9))
    writer.close()
    scene = replace(look(telemetry, info), outcome="finished")
    (row,) = run_list.runs(home)
    said = found(r"loss is ([\d.]+) at step 30", loss_of_expect(telemetry))
    sentence = found(r"loss ([\d.]+)", VIEWS["overview"].sentence(scene))
    assert row.values["loss"] == pytest.approx(1 / 30)
    for text in (sentence, loss_in_picture(scene), said):
        agrees(text, 1 / 30)


def test_where_a_rank_was_killed_the_last_step_is_the_same_everywhere(tmp_path: Path) -> None:
    """Its last records went with it; the others told theirs."""
    info = CellInfo(5, "train()", RANKS, 2, "gloo", ("cpu", "cpu"), run_name="killed")
    telemetry = Telemetry()
    home = tmp_path / ".nbdist"
    place = RunPlace(home, f"sqlite:///{home}/mlflow.db", "numbers")
    writer = RunWriter(place, info, [info], telemetry, 10**9)
    for step in range(1, 31):
        for rank in RANKS[: 2 if step <= 20 else 1]:
            values = {"loss": 1 / step + rank, "step_s": 0.01}
            record = Record(rank, step - 1, "step", step, 10**15 + 10**7 * step, values)
            telemetry.receive(Batch(rank, (record,)))
            writer.add([record])
    running = look(telemetry, info)
    assert VIEWS["overview"].sentence(running).startswith("Step 20, loss 0.5")
    writer.end(RunEnd("failed", None, None, 2 * 10**9))
    writer.close()

    scene = replace(running, outcome="failed")
    (row,) = run_list.runs(home)
    for name in ("overview", "loss"):
        said = VIEWS[name].sentence(scene)
        assert found(r"Step (\d+)", said) == str(row.steps) == "30"
        agrees(found(r"loss ([\d.]+)", said), row.values["loss"])
    assert row.values["loss"] == pytest.approx(1 / 30)
    agrees(loss_in_picture(scene), 1 / 30)
    agrees(found(r"loss is ([\d.]+) at step 30, of rank 0", loss_of_expect(telemetry)), 1 / 30)


def test_what_making_batches_takes_agrees_and_waiting_for_data_with_it(shown: Shown) -> None:
    last, of_step = shown.mlflow(), VIEWS["step"].sentence(shown.scene)
    for part in ("fetch", "collate"):
        agrees(
            found(rf"Making its batches takes .*?{part} ([\d.]+)", of_step), last[f"make_{part}_ms"]
        )
        assert last[f"make_{part}_ms"] == pytest.approx(shown.making_ms(part))
    agrees(found(r"([\d.]+) % data", of_step), last["data_pct"])
    head, (row,) = run_list.cells(run_list.runs(shown.home))
    agrees(dict(zip(head, row, strict=True))["data %"], last["data_pct"])


def test_the_list_of_runs_agrees(shown: Shown) -> None:
    head, (row,) = run_list.cells(run_list.runs(shown.home))
    told = dict(zip(head, row, strict=True))
    agrees(told["step ms"], shown.step_ms)
    agrees(told["comm %"], shown.comm_pct)
    agrees(told["last loss"], shown.loss)


def test_a_comparison_agrees(shown: Shown) -> None:
    head, (row,) = run_list.compare(shown.home, run_list.runs(shown.home)).cells()
    told = dict(zip(head, row, strict=True))
    agrees(told["step ms"], shown.step_ms)
    agrees(told["comm %"], shown.comm_pct)
    agrees(told["mean loss"], shown.recent_loss)
    agrees(told["samples/s"], sum(row.samples_per_s or 0 for row in shown.scene.rows))


def test_mlflow_agrees(shown: Shown) -> None:
    last = shown.mlflow()
    assert last["step_ms"] == pytest.approx(shown.step_ms)
    assert last["comm_pct"] == pytest.approx(shown.comm_pct)
    assert last["comm_pct"] == pytest.approx(shown.scene.comm_pct)
    assert last["loss"] == pytest.approx(shown.loss)
    own = {r.rank: r.values for r in shown.records if r.step == STEPS}
    assert last["rank_step_ms/01"] == pytest.approx(1e3 * own[1]["step_s"])
    assert last["rank_comm_ms/00"] == pytest.approx(1e3 * own[0]["comm_s"])


def test_numbers_of_devices_agree_in_the_table_and_in_mlflow(shown: Shown) -> None:
    table, last = VIEWS["ranks"].table(shown.scene), shown.mlflow()
    for rank in RANKS:
        newest = next(r for r in reversed(shown.of_devices) if r.rank == rank)
        row = dict(zip(table.head, table.rows[rank], strict=True))
        for name, column_name in (("cpu_pct", "cpu %"), ("device_pct", "device %")):
            agrees(row[column_name], newest.values[name])
            assert last[f"rank_{name}/{rank:02d}"] == pytest.approx(newest.values[name])
        for name, column_name in (("device_c", "°C"), ("device_w", "W")):
            agrees(row[column_name], last[f"rank_{name}/{rank:02d}"])
        used, of, total = row["in use by all"].partition(" of ")
        agrees(used.removesuffix(" GB"), 1e-3 * last[f"rank_device_mb/{rank:02d}"])
        assert (of, total) == (" of ", "80 GB")
        held = [last[f"rank_device_{n}_mb/{rank:02d}"] for n in ("allocated", "reserved", "peak")]
        assert [*held, last[f"rank_device_total_mb/{rank:02d}"]] == [9e3, 1e4, 9.5e3, 8e4]


def test_what_was_measured_is_not_what_all_steps_took(shown: Shown) -> None:
    """The numbers above would agree by chance if measured steps were like the others."""
    of_measured = fmean(1e3 * record.values["step_s"] for record in shown.measured)
    assert of_measured > 1.1 * shown.step_ms


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]
