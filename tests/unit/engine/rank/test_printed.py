"""Each name that `nbdist.log` is given is printed by one rank: asked of a real store."""

import pytest
import torch.distributed as dist

from nbdist.engine.rank.printed import PrintedNumbers

Ranks = list[PrintedNumbers]


@pytest.fixture
def ranks() -> Ranks:
    """Four ranks of one store."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return [PrintedNumbers(rank, 4, dist.PrefixStore("log", store)) for rank in range(4)]


def test_what_rank_0_logs_it_prints_at_once_and_alone(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        for rank in reversed(ranks[1:]):
            rank.log(step, {"loss": 9.0})
        assert capsys.readouterr().out == ""
        ranks[0].log(step, {"loss": 0.5})
        assert capsys.readouterr().out == f"step {step}: loss 0.500\n"
    for rank in ranks:
        rank.decide()
    assert capsys.readouterr().out == ""


def test_what_rank_0_has_not_the_lowest_that_has_it_prints_from_its_next_step_on(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks[3].log(1, {"loss": 3.0})
    ranks[2].log(1, {"loss": 2.0})
    for rank in (3, 2):
        ranks[rank].stepped(2)
    assert capsys.readouterr().out == "step 1: loss 2.00\n"
    ranks[3].log(2, {"loss": 3.0})
    ranks[2].log(2, {"loss": 2.5})
    assert capsys.readouterr().out == "step 2: loss 2.50\n"  # it is known now
    ranks[0].log(2, {"loss": 0.0, "rows": 8.0})
    assert capsys.readouterr().out == "step 2: rows 8.00\n"


def test_a_rank_that_logs_other_names_in_a_step_is_not_taken_for_one_that_rank_0_leaves_alone(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (1, 0):  # rank 1 is faster
        ranks[rank].log(1, {"loss": float(rank)})
        ranks[rank].log(1, {"accuracy": float(rank)})
    for rank in (1, 0):
        ranks[rank].stepped(2)
    assert capsys.readouterr().out == "step 1: loss 0\nstep 1: accuracy 0\n"


def test_without_steps_a_name_that_comes_again_is_printed(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks[1].log(0, {"loss": 3.0})
    ranks[1].log(0, {"loss": 2.0})
    assert capsys.readouterr().out == "loss 3.00\nloss 2.00\n"


def test_a_line_that_nothing_follows_comes_at_the_end(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks[1].stepped(7)
    ranks[1].log(0, {"accuracy": 0.25})
    assert capsys.readouterr().out == ""
    ranks[1].decide()
    assert capsys.readouterr().out == "step 7: accuracy 0.250\n"


def test_a_rank_that_is_alone_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    PrintedNumbers(0, 1, store).log(0, {"loss": 1.0})
    assert capsys.readouterr().out == "loss 1.00\n"
    assert store.num_keys() == 0
