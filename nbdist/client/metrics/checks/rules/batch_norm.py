"""A rule on batch norm, whose running statistics no gradient keeps equal."""

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Uses, where_told


@where_told("statistics")
def _keeps_own_statistics(seen: Seen) -> str:
    apart = [len(set(step.of("statistics").values())) > 1 for step in seen.steps]
    if len(apart) < 2 or not all(apart[-2:]):
        return ""
    return (
        "Batch norm keeps other running statistics on each rank, so a model evaluates differently "
        'on each. nbdist.parallelize(model, "ddp") keeps rank 0\'s on all; '
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) computes them over all ranks."
    )


_MODEL = """net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = torch.nn.parallel.DistributedDataParallel(net{})"""

UNEQUAL_STATISTICS = Rule(
    "unequal-statistics",
    "batch norm's running statistics are each rank's own",
    Uses,
    _keeps_own_statistics,
    remedy="Leave broadcast_buffers on, use a layout, or convert to SyncBatchNorm.",
    planted=rows("use", {"statistics": 7}, {"statistics": 8}, (1, 2)),
    sound=both("use", (1, 2), statistics=7),
    example=training(_MODEL.format(", broadcast_buffers=False")),
    mended=training(_MODEL.format("")),
    sources=(
        "https://github.com/open-mmlab/mmdetection/issues/2539",
        "https://github.com/pytorch/pytorch/issues/30718",
    ),
)
