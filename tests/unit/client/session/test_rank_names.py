"""What rank 0 told of its names is remembered when it is silent."""

from typing import Any, cast

from nbdist.client.cluster.requests import PendingReply, Requests
from nbdist.client.session.rank_names import RankNames
from nbdist.shared.errors import ClusterError


class Rank:
    """Answers a request, is silent, or is gone."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.is_gone = False
        self.asked: list[PendingReply] = []

    def ask(self, rank: int, call: str, *, busy: bool, path: str) -> PendingReply:
        if self.is_gone:
            raise ClusterError("The cluster is not running.")
        self.asked.append(PendingReply())
        if self.answer is not None:
            self.asked[-1].set_result(self.answer)
        return self.asked[-1]


def test_the_last_answer_stands_in_for_a_silent_or_gone_rank() -> None:
    rank = Rank()
    names = RankNames(cast(Requests, rank))
    rank.answer = {"model": "instance"}
    assert names.members("") == {"model": "instance"}

    rank.answer = None
    assert names.members("", 0.0) == {"model": "instance"}
    assert rank.asked[-1].cancelled()  # nobody waits for it any more
    assert names.members("model", 0.0) == {}

    rank.is_gone = True
    assert names.members("") == {"model": "instance"}


def test_a_name_that_is_gone_is_forgotten() -> None:
    rank = Rank()
    names = RankNames(cast(Requests, rank))
    for answer in ("Signature: f(x)", ""):
        rank.answer = answer
        assert names.describe("f") == answer
    rank.is_gone = True
    assert names.describe("f") == ""
