"""What a cell on virtual devices says at its end."""

from dataclasses import replace

from nbdist.client.metrics.analysis.values import CollectiveRow
from nbdist.client.metrics.emulated import kept_up

MACHINE = "2 GFLOP/s, 80 Mbit/s"  # 10 MB/s


def all_reduces(transfer_ms: float | None) -> CollectiveRow:
    """Of a megabyte on two ranks, each of which sends a megabyte: 100 ms."""
    said = ("all_reduce", "", (0, 1), "", "float32", 1_000_000, 1, 0, 0, 0)
    return CollectiveRow(*said, transfer_ms, None, None, None)


def test_a_cell_that_kept_up_says_what_it_stood_for() -> None:
    told = {0: {"virtual_s": 2.0, "late_s": 0.01}, 1: {"virtual_s": 2.0, "late_s": 0.05}}
    assert kept_up(MACHINE, told, [all_reduces(104)]) == [f"Emulated: {MACHINE}, not this machine."]


def test_a_cell_that_did_not_keep_up_says_how_much_and_what_to_do() -> None:
    told = {0: {"virtual_s": 2.0, "late_s": 0.01}, 3: {"virtual_s": 2.0, "late_s": 0.5}}
    (said,) = kept_up(MACHINE, told, [])
    assert said == (
        f"Emulated: {MACHINE}. This machine kept up with 80 % of the virtual time (rank 3): "
        "times are too long. Choose a slower device, or fewer ranks."
    )


def test_collectives_that_took_longer_than_the_links_ask_for_tell_this_machines_latency() -> None:
    told = {0: {"virtual_s": 2.0, "late_s": 0.0}}
    *_, said = kept_up(MACHINE, told, [all_reduces(150), all_reduces(None)])
    assert said.startswith("Collectives took 1.50 times what the emulated links ask for")
    assert "latency of 25.0 ms a round" in said
    slow = f"{MACHINE} 20 ms"  # two rounds of it, and 100 ms of bytes
    assert len(kept_up(slow, told, [all_reduces(150)])) == 1


def test_a_latency_below_this_machines_own_is_told_also_of_short_collectives() -> None:
    told = {0: {"virtual_s": 2.0, "late_s": 0.0}}
    short = replace(all_reduces(0.6), bytes=4)
    assert len(kept_up(MACHINE, told, [short])) == 1
    *_, said = kept_up(f"{MACHINE} 10 us", told, [short])
    assert "latency of 0.290 ms a round" in said


def test_nothing_is_said_of_ranks_that_stand_for_this_machine() -> None:
    assert kept_up("", {}, [all_reduces(150)]) == []
    assert kept_up(MACHINE, {}, []) == []
