"""Whether a wait may yet end by itself when a rank has failed, from what a rank says."""

import pytest

from nbdist.client.faults.rank_state import RankState, Wait, awaits_bytes

WORLD = frozenset({0, 1, 2})


@pytest.mark.parametrize(
    ("seconds", "quiet_s", "expected"),
    [
        (0.1, 0.13, True),  # between two lumps of a slow link
        (5.0, 0.004, True),
        (0.3, 0.3, False),
        (60.0, 60.0, False),
        (8.0, 0.6, True),  # a packet was lost, and is sent again
        (60.0, 3.0, False),
        (60.0, None, False),  # nobody counts
    ],
)
def test_a_wait_for_one_that_failed_may_end_while_bytes_flow(
    seconds: float, quiet_s: float | None, expected: bool
) -> None:
    doing = RankState("waiting", Wait("broadcast", seconds=seconds), quiet_s=quiet_s)
    assert awaits_bytes(doing, {0}, WORLD) is expected


@pytest.mark.parametrize("seconds", [0.01, 5.0])
@pytest.mark.parametrize(
    "wait", [{"kind": "all_reduce", "group": "3", "ranks": (1, 2)}, {"kind": "recv", "peer": 2}]
)
def test_of_ranks_that_go_on_among_themselves_only_a_long_wait_counts(
    wait: dict[str, object], seconds: float
) -> None:
    doing = RankState("waiting", Wait(**wait, seconds=seconds), quiet_s=0.0)  # type: ignore[arg-type]
    assert awaits_bytes(doing, {0}, WORLD) is (seconds == 5.0)


def test_bytes_say_nothing_of_a_rank_that_computes_or_serves() -> None:
    serves = RankState("waiting", Wait("barrier", seconds=5.0), quiet_s=0.0, serves=True)
    for doing in (RankState("computing", quiet_s=0.0), serves):
        assert not awaits_bytes(doing, {0}, WORLD)
