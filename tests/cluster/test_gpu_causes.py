"""Errors of CUDA and NCCL are told by their cause; on the CPU their texts stand for them."""

import re

from nbdist import Session
from tests.cluster.test_faults import assert_usable, fail
from tests.unit.shared.test_gpu_errors import ASSERT, EMBEDDING

SAID = "Assertion `srcIndex < srcSelectDimSize` failed"
MEANS = "An index is out of range in an embedding, index_select or gather (Indexing.cu:1422)."
FRAMES = "".join(f"frame #{i}: <unknown function> + 0x1 (0x7f in /x/libc.so)\n" for i in range(12))
THROWN = (
    f"terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  {ASSERT}"
)
# As a GPU's threads tell it, and what C++ prints before it ends the process.
TELL = f"""import os
def tell():
    for thread in range(3000):
        os.write(2, {EMBEDDING!r}.replace("[0,0,0]", f"[{{thread}},0,0]").encode() + b"\\n")
"""
ABORT = f"{TELL}    os.write(2, {THROWN + FRAMES!r}.encode())\n    os.abort()\n"


def test_a_rank_that_aborts_on_its_gpu_names_the_assertion_its_meaning_and_the_cells_line(
    session: Session,
) -> None:
    session.scale(3)
    told = fail(session, f"{ABORT}if rank == 1:\n    tell()\ndist.barrier()")
    assert re.search(
        rf"rank 1 \(localhost, cpu\) died: killed by SIGABRT in cell \d+, line 6: {SAID}\n", told
    )
    assert "ranks 0, 2 were released while waiting in barrier" in told
    assert f"Why: {MEANS}" in told
    assert "Do:  fix the cell and run it again." in told
    assert "what():  CUDA error: device-side assert triggered\n" in told
    assert "frame #" not in told
    assert "CUDA_LAUNCH_BLOCKING" not in told
    assert len(told.splitlines()) < 20
    session.scale(2)
    assert_usable(session)


def test_a_call_of_an_earlier_cell_that_aborts_is_named_by_its_line_here(session: Session) -> None:
    session.run(ABORT)
    told = fail(session, "if rank:\n    1 + 1\n    tell()\ndist.barrier()")
    assert re.search(rf"killed by SIGABRT in cell \d+, line 3: {SAID}", told)
    assert "  cell, line 6 in tell" in told
    assert_usable(session)


def test_threads_that_fail_the_same_assertion_take_one_line_of_the_cells_output(
    session: Session,
) -> None:
    result = session.run(f"{TELL}if rank == 1: tell()")
    shown = result[1].text
    assert SAID in shown
    assert shown.count("Assertion `") < 300  # each piece that is read says it once


def test_a_rank_that_raises_it_is_told_with_what_to_do_and_lives(session: Session) -> None:
    raising = f"if rank == 1:\n    tell()\n    raise RuntimeError({ASSERT!r})\n"
    pid = session.status().ranks[1].pid
    told = fail(session, f"text = {ASSERT!r}\n{TELL}{raising}dist.barrier()")
    assert f"RuntimeError: CUDA error: device-side assert triggered: {SAID}\n" in told
    assert f"Why: {MEANS}" in told
    assert "Do:  %dist restart -r 1    (every CUDA call of the old process fails)" in told
    assert "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING" not in told
    assert session.status().ranks[1].pid == pid
    session.restart("1")
    assert session.status().ranks[1].pid != pid
    assert_usable(session)


def test_a_rank_that_can_take_no_part_in_a_recovery_is_replaced(session: Session) -> None:
    pid = session.status().ranks[1].pid
    spoil = f"""
from nbdist.engine.recovery import reset
if rank == 1:
    def fail(*_):
        raise torch.AcceleratorError({ASSERT!r})
    reset.reset_state = fail
    raise torch.AcceleratorError({ASSERT!r})
"""
    told = fail(session, spoil)
    assert "Rank 1 could make no CUDA call any more." in told
    assert "Rank 1 was replaced by a new process" in told
    assert "Do:  fix the cell and run it again." in told
    assert session.status().ranks[1].pid != pid
    assert_usable(session)
