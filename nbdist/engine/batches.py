"""Cut an epoch into global batches, and a global batch into the ranks' parts. Pure: no torch.

cut     positions 0 ... samples into global batches; a remainder smaller than the number of
ranks joins the batch before, so that no rank is ever without a sample
part    of a batch for each rank: contiguous, sizes differ by at most one
"""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of every batch is this rank's: `index` of `count`."""

    index: int
    count: int


def cut(samples: int, start: int, global_batch: int, ranks: int, drop_last: bool) -> list[int]:
    """Return the ends of the batches that cover `range(start, samples)`.

    Args:
        samples: How many samples an epoch has.
        start: How many are consumed already; not a multiple of `global_batch` when the epoch
            was begun with another size.
        global_batch: Samples in a batch, over all ranks.
        ranks: A last batch with fewer samples than this joins the one before. Where there is
            none before (only after a resume on more ranks) it is left out, and a warning says so.
        drop_last: Leave out a last batch that is not full.
    """
    ends = list(range(start + global_batch, samples + 1, global_batch))
    rest = samples - (ends[-1] if ends else start)
    if rest and not drop_last:
        if rest >= ranks:
            ends.append(samples)
        elif ends:
            ends[-1] = samples
    return ends


def part(start: int, end: int, shard: Shard) -> range:
    """Return the positions of one rank in the batch `range(start, end)`.

    The first `(end - start) % count` ranks have one sample more than the others.
    """
    base, extra = divmod(end - start, shard.count)
    first = start + shard.index * base + min(shard.index, extra)
    return range(first, first + base + (shard.index < extra))


def mix(*numbers: int) -> int:
    """Return a seed for torch (63 bits) from several numbers; all of them matter.

    A sum would not do: seed 0 in epoch 1 would be seed 1 in epoch 0.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
