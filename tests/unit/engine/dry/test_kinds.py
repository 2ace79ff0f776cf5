"""Ranks are of one kind where nothing in a cell can tell them apart; all else keeps them apart."""

import pytest

from nbdist.engine.dry.kinds import kinds_of


def kinds(*codes: str, n: int = 8) -> list[list[int]]:
    return kinds_of(codes, range(n), n, 4)


def test_a_branch_for_one_rank_makes_it_a_kind_of_its_own() -> None:
    assert kinds("x = 1\nif rank == 5:\n    dist.barrier()") == [[0, 1, 2, 3, 4, 6, 7], [5]]
    assert kinds("x = [a, b] if rank else [b, a]") == [[0], [1, 2, 3, 4, 5, 6, 7]]
    assert kinds("if rank in (2, 3): pass") == [[0, 1, 4, 5, 6, 7], [2, 3]]
    assert kinds("main = local_rank == 0", "x = rank % 2") == [[0, 4], [1, 3, 5, 7], [2, 6]]
    assert kinds("if dist.get_rank() < dist.get_world_size() // 2: pass") == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()\nloss.backward()",
        "print(f'[{rank}] {loss.item():.3f}', 'rank', rank)",
        "torch.manual_seed(seed + rank)",
        "sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)",
        "rank = dist.get_rank()\nworld_size = dist.get_world_size()",
        "from torch.distributed import get_rank",
        "import torch.nn.functional as F\nfrom torch import nn, distributed as dist",
        "import torch, torch.distributed as dist\nfrom torch.utils.data import *",
        "from torch.utils.data.distributed import DistributedSampler",
        "from torch import manual_seed\nmanual_seed(rank)",
        "f(print=1, dist='torch')\nx.dist = print",
    ],
)
def test_ranks_that_are_printed_or_seed_are_of_one_kind(code: str) -> None:
    assert len(kinds(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "x = torch.ones(rank)",
        "x = torch.ones(3) * rank",
        "mine = groups[rank]",
        "for step in range(9):\n    if step % world_size == rank: dist.barrier()",
        "name = f'{rank}'",
        "for rank in range(3): pass",
        "rank = rank % 2",
        "def main(rank): pass",
        "world_size = 3",
        "i = int(os.environ['X'])",
        "f = getattr(dist, 'get_rank')",
        "print(f(rank))",
        "print(1, file=files[rank])",
        "torch.manual_seed(rank * seed)",
        "x = np.random.rand()",
        "import random",
        "import mine as dist",
        "import mine as torch",
        "from mine import dist",
        "from mine import *",
        "from mine import DistributedSampler",
        "print = log",
        "def print(*what): ...",
        "class Loader:\n    def manual_seed(self, seed): ...\nLoader().manual_seed(rank)",
        "from mine import manual_seed",
        "def f(dist): ...",
        "for torch in modules: ...",
        "with log as print: ...",
        "try: ...\nexcept E as dist: ...",
        "torch.manual_seed = f",
        "del dist",
        "eval('r' + 'ank')",
        "globals()['x']",
        "g = dist.new_group([2, 3])",
        "mesh.get_coordinate()",
        "if rank == 0 / 0: pass",
        "if (:",
    ],
)
def test_what_is_not_understood_keeps_all_ranks_apart(code: str) -> None:
    assert kinds(code) == [[rank] for rank in range(8)]
