"""`%dist probe` between live ranks."""

import sys

import pytest

from nbdist import Session
from tests.cluster.conftest import Kernel
from tests.cluster.test_faults import assert_usable

RATE = 20e6  # bytes/s
TRAINING = """
import torch
model = torch.nn.Linear(64, 64)
nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(4, 64)).sum().backward()
    opt.step()
    opt.zero_grad()
"""


def test_a_probe_measures_each_link_and_changes_nothing(session: Session) -> None:
    session.run("kept = [rank]")
    found = session.probe()
    (link,) = found
    assert link.ranks == (0, 1)
    assert 0 < link.latency_s < 1
    assert link.bandwidth > 1e6
    assert [one.name for one in found.classes] == ["inside a host"]
    assert found.rates.keys() == {0, 1}
    assert all(of_rank.keys() == {"float32", "bfloat16"} for of_rank in found.rates.values())
    assert found.all_reduce is not None
    assert session.run("kept").value_list == [[0], [1]]
    assert_usable(session)


def test_a_probe_knows_what_the_newest_training_sends(session: Session) -> None:
    session.run(TRAINING)
    found = session.probe()
    assert found.traffic is not None
    assert found.traffic.nbytes == 4 * (64 * 64 + 64)  # a ring of two sends each byte once
    assert sum(found.traffic.collectives.values()) == 1
    assert "A step of the newest training sends 17 kB a rank in 1 collective" in str(found)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces connections")
def test_a_probe_sees_an_emulated_link_and_who_sends_so_slowly(
    session: Session,
) -> None:
    session.run(f"nbdist.emulate_link({RATE})", ranks="1")
    try:
        found = session.probe()
    finally:
        session.run("nbdist.emulate_link(None)", ranks="1")
    assert found[0].bandwidth < 1.15 * RATE  # a machine that is busy may give less
    assert found[0].sender == 1
    assert found.ring is not None
    assert found.ring.bandwidth < 1.15 * RATE


def test_the_magic_shows_a_table(notebook: Kernel) -> None:
    shown = notebook.run("%dist probe").text
    assert shown.split("\n")[0].split() == ["ranks", "hosts", "latency", "bandwidth"]
    assert "0 - 1  localhost" in shown


def test_a_preset_is_compared_with_the_ranks_here(notebook: Kernel) -> None:
    shown = notebook.run("%dist probe --on 8 h100, 2 hosts ib400").text
    assert "2 hosts of 8 NVIDIA H100 SXM on NVLink 4, 1 x 400 Gbit InfiniBand a host" in shown
    assert "From presets: nothing of it was measured." in shown
    assert "a rank here" in shown


def test_one_rank_is_told_how_fast_it_computes(session: Session) -> None:
    session.scale(1)
    try:
        found = session.probe()
        assert len(found) == 0
        assert found.rates[0]["float32"] > 1e8
    finally:
        session.scale(2)
