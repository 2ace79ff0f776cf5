"""What stands for torch's private parts in a world without numbers."""

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.fsdp._fully_shard import _fsdp_common  # noqa: E402

from nbdist.engine.compat.torch_dry import Chunks, check  # noqa: E402


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize(("shape", "dim"), [((7, 2), 0), ((4, 6), 1), ((1,), 0), ((0, 3), 0)])
def test_chunks_are_those_of_fsdp(shape: tuple[int, ...], dim: int, count: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    ours, theirs = Chunks(whole, count, dim), _fsdp_common._chunk_with_empty(whole, count, dim)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert one.tolist() == other.tolist()


def test_this_torch_has_what_is_used_of_it() -> None:
    assert check() == []
