"""The time of a step from its parts."""

import pytest

from nbdist.shared.collectives import rounds
from nbdist.study.estimate import Traffic
from nbdist.study.links import Link
from nbdist.study.step_time import StepTime, split_communication


def test_three_ranks_reduce_in_four_messages_one_after_another() -> None:
    """Measured: T = 4 latency + 4/3 n / bandwidth for gloo's ring of three."""
    assert rounds("all_reduce", 3, "gloo") == 4


def test_gloo_scatters_a_reduction_as_an_all_reduce() -> None:
    assert rounds("reduce_scatter", 4, "gloo") == rounds("all_reduce", 4, "gloo")
    assert rounds("reduce_scatter", 4, "nccl") == 3


def test_one_rank_sends_nothing() -> None:
    assert {rounds(kind, 1, "gloo") for kind in ("all_reduce", "broadcast", "send")} == {0}


def test_a_link_adds_its_latency_per_round_to_its_bytes() -> None:
    sent = Traffic(count=1, payload=1000, nbytes=2000.0, rounds=4, ranks=3)
    assert Link(0.001, 1e6).time_s(sent) == pytest.approx(0.006)


def test_gradients_hide_behind_the_backward_and_no_further() -> None:
    exposed, hidden = split_communication(3.0, {"dp": 5.0})
    assert (exposed, hidden) == (pytest.approx(3.0), pytest.approx(2.0))


def test_what_tensor_parallel_ranks_send_is_waited_for() -> None:
    assert split_communication(3.0, {"tp": 1.0}) == (pytest.approx(1.0), 0.0)


def test_axes_share_what_can_hide_them() -> None:
    exposed, hidden = split_communication(3.0, {"dp": 2.0, "fsdp": 2.0})
    assert (exposed, hidden) == (pytest.approx(1.0), pytest.approx(3.0))


def test_hidden_communication_is_no_part_of_a_step() -> None:
    assert StepTime(compute_s=1.0, exposed_s=0.5, hidden_s=9.0).total_s == 1.5
