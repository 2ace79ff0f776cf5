"""A rank that holds Python and sleeps for ever after another has failed is ended and replaced."""

import pytest

from nbdist import RankError, Session
from nbdist.client.faults import fault_handler

# What torch may do to a rank: a lock inside C++ that nobody will ever give, with the GIL held.
HELD = """
kept = rank + 1
dist.barrier()
if rank == 1:
    import ctypes
    ctypes.PyDLL(None).sleep(600)
if rank == 0:
    raise ValueError("rank 0 is unwell")
"""


def test_a_rank_that_neither_answers_nor_computes_is_ended_and_replaced(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_handler, "_STUCK_AFTER_S", 1.0)
    monkeypatch.setitem(fault_handler._PATIENCE_S, "failed", 1.0)
    with pytest.raises(RankError) as failed:
        session.run(HELD, timeout_s=60)
    said = str(failed.value)
    assert "ValueError: rank 0 is unwell" in said
    assert "rank 1 (localhost, cpu) died: killed by SIGKILL, because nothing could free it" in said
    assert session.run("kept").value_list == [1, 1]  # rank 1's came from rank 0
