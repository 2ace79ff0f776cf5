"""What changes make of a step whose parts are planted."""

from dataclasses import replace

import pytest

from nbdist.study.links import Link
from nbdist.study.scaling import Call, World, traffic
from nbdist.study.step_time import StepTime
from nbdist.study.what_if import Outcome, table, what_if
from tests.unit.study.planted import planted

# 4 ranks, 100 MB of gradients in four buckets, of which nothing is hidden: 60 ms of 170.
SENDS = World(
    4,
    StepTime(0.1, 0.06, skew_s=0.01),
    calls=(Call("all_reduce", 25_000_000, 4, 4, dtype="float32"),),
    own_s=(0.1, 0.1, 0.1, 0.113),
)


def outcomes(world: World) -> dict[str, Outcome]:
    return {one.change.partition(":")[0]: one for one in what_if(world)}


def test_twice_the_bandwidth_halves_what_bytes_take() -> None:
    assert outcomes(SENDS)["twice the bandwidth"].step_s == pytest.approx(0.14)
    assert "at best" in outcomes(SENDS)["twice the bandwidth"].basis


def test_a_latency_stays_where_two_sizes_tell_it() -> None:
    """A call of 8 bytes takes 6 rounds of 2 ms, one of 25 MB the bytes' time more."""
    short = Call("all_reduce", 8, 4, 1, 0.012, "float32")
    long = Call("all_reduce", 25_000_000, 4, 1, 0.048, "float32")
    sent = traffic([long], "gloo").nbytes
    found = outcomes(replace(SENDS, calls=(short, long)))["twice the bandwidth"]
    assert found.step_s == pytest.approx(0.17 - 0.018, rel=0.01)
    assert f"latency 2000 us, {sent / 0.036 / 1e9:.2f} GB/s" in found.basis


def test_compression_halves_float32_and_leaves_what_is_16_bits() -> None:
    assert outcomes(SENDS)["bf16 compression"].step_s == pytest.approx(0.14)
    small = replace(SENDS, calls=(Call("all_reduce", 25_000_000, 4, 4, dtype="bfloat16"),))
    assert outcomes(small)["bf16 compression"].step_s is None
    assert "0.226" in outcomes(SENDS)["bf16 compression"].costs


def test_without_the_straggler_the_others_wait_less() -> None:
    found = outcomes(SENDS)["without the straggler"]
    assert found.step_s == pytest.approx(0.17 - 0.013)


def test_no_straggler_is_named_within_the_spread_of_the_steps() -> None:
    found = outcomes(replace(SENDS, spread_s=0.014))["without the straggler"]
    assert found.step_s is None
    assert "14.0 ms" in found.basis
    assert outcomes(replace(SENDS, spread_s=0.012))["without the straggler"].step_s is not None


def test_layouts_that_split_a_model_get_the_lines_that_hold() -> None:
    """Under tp, an all_reduce over all ranks is no gradient's."""
    for layout in ("tp=4", "dp=2 tp=2", "pp=2 fsdp=2 zero2"):
        straggler, faster, other = what_if(SENDS, layout)
        assert straggler.step_s is not None
        assert faster.change == "twice the bandwidth"
        assert faster.step_s is not None
        assert f"the layout is {layout}: the others are for layouts of replicas" in other.basis
    assert what_if(SENDS, "ddp") == what_if(SENDS, "zero1") == what_if(SENDS)


def test_gradients_that_are_reduce_scattered_are_not_taken_for_all_reduced() -> None:
    for layout in ("zero2", "zero3", "dp=2 fsdp=2"):
        found = {one.change: one for one in what_if(SENDS, layout)}
        none = found["compression, buckets, local SGD"]
        assert none.step_s is None
        assert none.basis.startswith("these are for gradients that are all_reduced")


def test_over_another_link_its_latency_and_bandwidth_decide() -> None:
    link = Link(0.001, 1e9, "a cable", "measured")
    over = what_if(SENDS, "", link)[1]
    sent = traffic(SENDS.calls, "gloo")
    assert over.step_s == pytest.approx(0.11 + sent.rounds * 0.001 + sent.nbytes / 1e9)
    assert (over.change, "1.00 GB/s (measured)" in over.basis) == ("over a cable", True)
    assert what_if(replace(SENDS, calls=()), "", link)[1].step_s is None


def test_where_a_step_was_recorded_is_told() -> None:
    found = what_if(SENDS)
    assert "170 ms on 4 ranks: measured here, the mean" in table(SENDS, found)
    assert "measured here" not in table(SENDS, found, "emulated (2 GFLOP/s)")


def test_seldom_is_sent_seldom() -> None:
    found = outcomes(SENDS)
    assert found["local SGD every 8"].step_s == pytest.approx(0.11 + 0.06 / 8)
    assert found["accumulate 4 batches a step"].step_s == pytest.approx(0.11 + 0.06 / 4)


def test_overlap_hides_at_most_two_thirds_of_the_computation() -> None:
    assert outcomes(SENDS)["overlap with the backward"].step_s == pytest.approx(0.11)
    hidden = replace(SENDS, time=StepTime(0.1, 0.02, 0.1))
    assert outcomes(hidden)["overlap with the backward"].step_s is None


def test_small_gradients_gain_nothing_by_larger_buckets() -> None:
    small = replace(SENDS, calls=(Call("all_reduce", 1000, 4, 1),))
    assert outcomes(small)["buckets of 50 MB"].step_s is None
    assert outcomes(SENDS)["buckets of 50 MB"].step_s is not None


def test_twice_the_ranks_take_half_the_time_and_what_more_ranks_send() -> None:
    """A ring of 8 sends 7/6 of what one of 4 does, and the last of 8 ranks is later."""
    found = outcomes(replace(SENDS, time=StepTime(0.1, 0.06)))["twice as many ranks"].step_s
    assert found == pytest.approx((0.1 + 0.06 * 7 / 6) / 2)


def test_a_step_that_sends_nothing_says_so() -> None:
    found = outcomes(planted(1, "weak"))
    assert found["any change of communication"].basis == "this step sends nothing"
    assert found["twice as many ranks"].step_s is None


def test_each_line_of_the_table_says_what_it_rests_on() -> None:
    text = table(SENDS, what_if(SENDS))
    assert text.startswith("The recorded step takes 170 ms on 4 ranks: measured here")
    assert text.count("rests on: ") == len(what_if(SENDS))
    assert all(one.basis for one in what_if(SENDS))
