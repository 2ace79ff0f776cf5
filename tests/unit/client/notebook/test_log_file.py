"""What nbdist logs goes to a private file, and to nobody's screen."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.client.notebook import log_file


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    ours = logging.getLogger("nbdist")
    before = ours.propagate
    yield ours.getChild("somewhere")
    ours.propagate = before
    (handler,) = (one for one in ours.handlers if isinstance(one, log_file._PrivateFile))
    ours.removeHandler(handler)
    handler.close()


def test_tracebacks_go_to_a_private_file_and_not_to_standard_error(
    logger: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log_file.log_to(tmp_path / "first.log")
    log_file.log_to(tmp_path / "notebook.log")
    try:
        raise ValueError("of ours")
    except ValueError:
        logger.exception("The recovery failed")
    told = (tmp_path / "notebook.log").read_text()
    assert "The recovery failed" in told
    assert "ValueError: of ours" in told
    assert (tmp_path / "notebook.log").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "first.log").exists()
    assert capfd.readouterr() == ("", "")


def test_a_log_that_cannot_be_written_stops_nothing_and_says_nothing(
    logger: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log_file.log_to(tmp_path / "gone" / "notebook.log")
    logger.error("lost")
    assert capfd.readouterr() == ("", "")
