"""What a cell puts in the place of torch's functions is no answer for nbdist's own parts."""

import re
from pathlib import Path

import torch.distributed as dist

from nbdist.engine.compat import torch_dist

ENGINE = Path(__file__).parents[4] / "nbdist" / "engine"
# Puts functions of its own into torch.distributed; compat/ has the others that do.
PATCHES = ENGINE / "rank" / "script.py"


def test_names_lead_to_what_torch_has_made() -> None:
    torchs = dist.is_initialized
    try:
        dist.is_initialized = lambda: True
        assert torch_dist.is_initialized is torchs
        assert not torch_dist.is_initialized()
    finally:
        dist.is_initialized = torchs


def test_no_part_of_a_rank_asks_where_a_cell_may_have_put_its_own() -> None:
    asks = re.compile(
        r"^\s*import torch\.distributed as|^from torch import .*distributed|"
        r"\btorch\.distributed\.[a-z_]+\(",
        re.MULTILINE,
    )
    found = [
        path.relative_to(ENGINE)
        for path in sorted(ENGINE.rglob("*.py"))
        if path != PATCHES and path.parent.name != "compat" and asks.search(path.read_text())
    ]
    assert found == []
