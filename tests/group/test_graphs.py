"""Steps in a CUDA graph, without a GPU: nothing is done in a capture, a replay is a step."""

from tests.group.graph_ranks import REPLAYS, WARM, train
from tests.group.harness import run_ranks


def test_a_capture_is_left_alone_and_each_replay_is_a_step_with_its_loss() -> None:
    (found,) = run_ranks(1, train)
    assert found["was_left_alone"]
    assert found["steps"] == len(found["rows"]) == WARM + REPLAYS
    plain, replayed = found["rows"][:WARM], found["rows"][WARM:]
    assert all("compute_s" in row and "replays" not in row for row in plain[1:])
    losses = [found["captured"] * 0.5**n for n in range(1, REPLAYS + 1)]
    assert [row["loss"] for row in replayed] == losses
    for row in replayed:
        assert row["replays"] == 1
        assert row["step_s"] > 0
        assert not {"compute_s", "comm_s", "bytes", "collectives"} & row.keys()
