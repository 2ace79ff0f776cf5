"""How ends that a person or a program asked for are named."""

import pytest

from nbdist import RankError, Session


def test_a_rank_ended_by_sigterm_says_so(session: Session) -> None:
    code = "import os, signal\nif rank: os.kill(os.getpid(), signal.SIGTERM)\ndist.barrier()"
    with pytest.raises(RankError, match=r"rank 1 .* died: killed by SIGTERM"):
        session.run(code)


def test_leaving_a_cell_by_sys_exit_gives_no_advice_to_use_what_is_refused(
    session: Session,
) -> None:
    with pytest.raises(RankError, match=r"called sys\.exit\(3\)"):
        session.run("import sys\nsys.exit(3)")
    assert session.last is not None
    assert "To exit" not in session.last[0].text
