"""The folders of a cluster's logs, and what of a log stands in an error."""

from pathlib import Path

from nbdist.client.folders import last_lines


def test_of_a_log_only_lines_that_tell_something_stand_in_an_error(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("Not using CurveZMQ security\nMemoryError\ndebugpy_stream undefined\n")
    assert last_lines(log) == "MemoryError"
    log.write_text("Not using CurveZMQ security\n")
    assert last_lines(log) == f"its log {log} tells nothing"
