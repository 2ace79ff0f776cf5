"""What crosses between notebook and ranks survives JSON."""

import json
import math
from dataclasses import asdict

from nbdist.shared.wire import (
    Batch,
    CellEnd,
    CellStart,
    CheckpointEvery,
    ProfileSteps,
    Record,
    Repeat,
    Script,
)


def test_a_batch_arrives_as_it_was() -> None:
    records = tuple(Record(1, 7 + i, "step", i, 10**18 + i, {"loss": i / 3}) for i in range(3))
    batch = Batch(1, records, {"layout": "ddp"})
    assert Batch.from_wire(json.loads(json.dumps(batch.to_wire()))) == batch


def test_a_loss_that_has_become_nan_or_infinite_is_seen() -> None:
    record = Record(0, 0, "log", 0, 0, {"a": math.nan, "b": math.inf, "c": -math.inf})
    (arrived,) = Batch.from_wire(json.loads(json.dumps(Batch(0, (record,)).to_wire()))).records
    assert math.isnan(arrived.values["a"])
    assert arrived.values["b"] == math.inf
    assert arrived.values["c"] == -math.inf


def test_records_that_are_alike_share_a_row_and_arrive_one_by_one() -> None:
    kinds = [("step", {"loss": 0.1, "step_s": 1e-3})] * 200 + [("log", {"a": 1.5})]
    kinds += [("step", {"loss": math.inf, "step_s": 2e-3, "comm_s": 0.0})] * 3
    records = tuple(Record(1, 7 + i, k, i, 10**18 + i, dict(v)) for i, (k, v) in enumerate(kinds))
    sent = Batch(1, records).to_wire()
    assert len(sent["rows"]) == 3
    assert Batch.from_wire(json.loads(json.dumps(sent, allow_nan=False))).records == records


def test_a_loss_among_alike_ones_may_become_nan() -> None:
    records = tuple(Record(0, i, "step", i, i, {"loss": v}) for i, v in enumerate((1.0, math.nan)))
    arrived = Batch.from_wire(json.loads(json.dumps(Batch(0, records).to_wire()))).records
    assert arrived[0].values == {"loss": 1.0}
    assert math.isnan(arrived[1].values["loss"])


def test_a_batch_of_facts_alone_travels() -> None:
    batch = Batch(3, (), {"model": "GPT"})
    assert Batch.from_wire(json.loads(json.dumps(batch.to_wire()))) == batch


def test_the_end_of_a_cell_arrives_as_it_was() -> None:
    summary = CellEnd(
        first_seq=3,
        next_seq=9,
        collectives={"0": 4},
        sent={"0/1": 2},
        steps=2,
        value={"tuple": [1]},
        notices=("once",),
        cut_bytes=5,
        output_file="/x",
        seconds=0.25,
    )
    assert CellEnd.from_wire(json.loads(json.dumps(asdict(summary)))) == summary


def test_the_start_of_a_cell_arrives_as_it_was() -> None:
    start = CellStart(
        number=7,
        ranks=(0, 2),
        prompt=4,
        params={"lr": 0.1},
        failed=6,
        repeat=Repeat.CONTINUE,
        profile=ProfileSteps(3, 5, "folder"),
        saves=CheckpointEvery(100, 1e9, faults=1, session_s=60.0),
        script=Script("train.py", "pkg.train", ("--lr", "0.1")),
        keep=True,
    )
    assert CellStart.from_wire(json.loads(json.dumps(start.to_wire()))) == start


def test_a_cell_of_which_nothing_was_asked_arrives_as_it_was() -> None:
    start = CellStart(number=1, ranks=(0,), prompt=1)
    assert CellStart.from_wire(json.loads(json.dumps(start.to_wire()))) == start
