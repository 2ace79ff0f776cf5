"""What crosses between notebook and ranks survives JSON."""

import json
import math
from dataclasses import asdict

from nbdist.wire import Batch, Record, Summary


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


def test_a_batch_of_facts_alone_travels() -> None:
    batch = Batch(3, (), {"model": "GPT"})
    assert Batch.from_wire(json.loads(json.dumps(batch.to_wire()))) == batch


def test_a_summary_arrives_as_it_was() -> None:
    summary = Summary(
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
    assert Summary.from_wire(json.loads(json.dumps(asdict(summary)))) == summary
