"""What a step used of the processor, and what it waited for it."""

from pathlib import Path

import pytest

from nbdist.engine.training import resources


def test_a_wait_for_a_core_is_that_of_the_step_it_fell_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("100 1000 1\n")
    monkeypatch.setattr(resources, "_SCHEDSTAT", schedstat)
    processor = resources.Processor()
    waits = []
    for delay_ns in (6000, 9000, 9000):  # steps of microseconds
        schedstat.write_text(f"100 {delay_ns} 1\n")
        waits.append(processor.take()["starved_s"])
    assert processor._file is not None
    processor._file.close()
    assert waits == pytest.approx([5e-6, 3e-6, 0.0])
