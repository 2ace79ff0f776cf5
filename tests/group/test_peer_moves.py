"""Where ranks have moved to other hosts, those that stay keep their snapshots with other peers."""

from nbdist.shared.placement import peer_of
from tests.group import peer_ranks
from tests.group.engines import cluster

BEFORE = {0: "a", 1: "a", 2: "b", 3: "c"}
AFTER = {0: "a", 1: "a", 2: "b", 3: "a"}  # c is lost, and a has room


def peers(hosts: dict[int, str]) -> peer_ranks.Peers:
    return {rank: peer_of(rank, hosts) for rank in hosts}


def test_a_living_rank_moves_its_snapshots_to_another_host_and_has_one_copy_at_any_time() -> None:
    assert (peers(BEFORE)[1], peers(AFTER)[1]) == (3, 2)
    with cluster(4) as ranks:
        ranks.run(peer_ranks.begin, peers(BEFORE))
        ranks.run(peer_ranks.send, 1)
        assert ranks.run(peer_ranks.held) == [
            {3: (1, 1)},
            {},
            {0: (1, 1)},
            {1: (1, 1), 2: (1, 1)},
        ]

        ranks.run(peer_ranks.move, peers(AFTER))
        assert ranks.run(peer_ranks.held)[3][1] == (1, 1), "its older peer has one still"
        ranks.run(peer_ranks.send, 2)
        assert ranks.run(peer_ranks.newest, 1) == [(2, 2)] * 4, "of two the newer one counts"
        ranks.run(peer_ranks.send, 3)
        ranks.run(peer_ranks.send, 4)
        after = ranks.run(peer_ranks.held)
        assert sorted(rank for held in after for rank in held) == [0, 1, 2, 3], "none twice"
        for rank, peer in peers(AFTER).items():
            assert after[peer or 0][rank] == (4, 4)
            assert AFTER[rank] != AFTER[peer or 0], "a host's loss takes no rank and its copy"
        ranks.run(peer_ranks.end)
