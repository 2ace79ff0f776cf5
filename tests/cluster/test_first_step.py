"""A fault in the first step of a model that an earlier cell has made."""

from pathlib import Path

import pytest

from nbdist import RankError, Session

MAKE = """
import pathlib
from torch import nn
FLAG = pathlib.Path({flag!r})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
layout = nbdist.parallelize(model, {layout!r})
opt = torch.optim.Adam(model.parameters(), lr=0.02)
POINTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
"""
LOOP = """
for points in nbdist.loader(POINTS, global_batch=8, seed=3):
    if {place!r} == "before" and rank == 1 and not FLAG.exists():
        FLAG.touch(); raise ValueError("once")
    loss = model(points).pow(2).mean()
    if {place!r} == "forward" and rank == 1 and not FLAG.exists():
        FLAG.touch(); raise ValueError("once")
    loss.backward()
    if {place!r} == "backward" and rank == 1 and not FLAG.exists():
        FLAG.touch(); raise ValueError("once")
    opt.step(); opt.zero_grad()
"""
TOLD = """
whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
[whole(one).tolist() for one in (*model.parameters(), *model.buffers())]
"""


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize("place", ["before", "forward", "backward"])
def test_running_statistics_count_the_first_step_once_that_a_fault_has_lost(
    session: Session, tmp_path: Path, layout: str, place: str
) -> None:
    ends = []
    for flag in ("unbroken", "broken"):
        path = tmp_path / flag
        session.run(MAKE.format(flag=str(path), layout=layout), track=False)
        if flag == "unbroken":
            path.touch()
            session.run(LOOP.format(place=place), track=False)
        else:
            with pytest.raises(RankError, match="once"):
                session.run(LOOP.format(place=place), track=False, timeout_s=60)
            session.retry()
        ends.append(session.run(TOLD, track=False).value_list)
    assert ends[1] == ends[0]


def test_an_error_in_the_first_forward_of_a_sharded_model_is_told_as_it_is(
    session: Session, tmp_path: Path
) -> None:
    session.run(MAKE.format(flag=str(tmp_path / "flag"), layout="zero3"), track=False)
    with pytest.raises(RankError, match="shapes cannot be multiplied") as told:
        session.run("model(torch.ones(3, 5))", track=False)
    assert "OrderedDict" not in str(told.value)
    session.run("model(torch.ones(3, 6)).sum().backward()", track=False)
