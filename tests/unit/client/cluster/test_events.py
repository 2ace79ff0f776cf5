import json
import logging
import threading
from pathlib import Path

import pytest

from nbdist.client.cluster.events import EventLog, older_part, read_events


def test_a_line_tells_when_what_why_and_the_facts(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    log.note("rank failed", "ValueError", rank=1, place="cell 7, line 12")

    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert list(event) == ["time", "s", "event", "cause", "rank", "place"]
    assert event["event"] == "rank failed"
    assert event["place"] == "cell 7, line 12"


def test_an_event_without_a_cause_has_none(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    log.note("stopped")

    assert "cause" not in read_events(log.path)[0]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    log.note("stopped")

    assert log.path.stat().st_mode & 0o777 == 0o600


def test_no_value_of_the_user_gets_in_by_its_repr(tmp_path: Path) -> None:
    class Token:
        def __repr__(self) -> str:
            return "secret"

    log = EventLog(tmp_path / "events.jsonl")

    log.note("odd", value=Token())

    assert read_events(log.path)[0]["value"] == "Token"


def test_a_full_file_is_kept_once_and_no_more_is_lost_than_before_that(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", max_bytes=1000)

    for number in range(100):
        log.note("tick", number=number)

    numbers = [event["number"] for event in read_events(log.path)]
    assert numbers == list(range(numbers[0], 100))
    assert older_part(log.path).stat().st_size < 1200
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.1.jsonl", "events.jsonl"]


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def write(thread: int) -> None:
        for number in range(50):
            log.note("tick", thread=thread, number=number)

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    seen = [(event["thread"], event["number"]) for event in read_events(log.path)]
    assert sorted(seen) == [(thread, number) for thread in range(4) for number in range(50)]


def test_a_log_that_cannot_be_written_is_told_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path / "missing" / "events.jsonl")

    with caplog.at_level(logging.ERROR):
        log.note("one")
        log.note("two")

    assert [record.message for record in caplog.records] == [
        f"Events can no longer be written to {log.path}"
    ]


def test_a_line_cut_by_a_full_disk_is_passed_over(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.note("one")
    with log.path.open("a") as file:
        file.write('{"time": "2026-')

    assert [event["event"] for event in read_events(log.path)] == ["one"]


def test_events_can_be_read_from_a_moment_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.note("before")
    moment = log.seconds + 1

    assert read_events(log.path, since_s=moment) == []
