"""What a script reads of a cell."""

from nbdist.client.output.result import CellResult, RankResult


def test_a_result_is_a_mapping_by_rank() -> None:
    result = CellResult({0: RankResult(0, 5), 2: RankResult(2, None, error=("E", "why"))})
    assert result[0].value == 5
    assert result.ranks == (0, 2)
    assert result.value_list == [5, None]
    assert not result.ok
    assert len(result) == 2
    assert repr(result) == "rank 0: 5\nrank 2: E: why"


def test_an_empty_result_is_well() -> None:
    assert CellResult().ok
    interrupted = CellResult({0: RankResult(0, error=("KeyboardInterrupt", ""))})
    assert repr(interrupted) == "rank 0: KeyboardInterrupt"
    assert repr(CellResult()) == "no ranks"
