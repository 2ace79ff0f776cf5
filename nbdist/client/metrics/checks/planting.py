"""Short ways to write a rule's planted records and its example."""

from collections.abc import Iterable, Mapping

from nbdist.shared.wire import Record

_CELL = """torch.manual_seed(0)
data = {data}
{model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for {x} in {loader}:
    {backward}
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = """model = torch.nn.Linear(4, 4)
nbdist.parallelize(model, "ddp")"""


def rows(
    kind: str, zero: Mapping[str, float], one: Mapping[str, float], steps: Iterable[int]
) -> list[Record]:
    """Return what ranks 0 and 1 report at each of these steps."""
    return [
        Record(rank, 0, kind, step, 0, dict(values))
        for step in steps
        for rank, values in enumerate((zero, one))
    ]


def both(kind: str, steps: Iterable[int], **values: float) -> list[Record]:
    """Return the same report of both ranks, at each of these steps."""
    return rows(kind, values, values, steps)


def training(
    model: str = DDP,
    *,
    backward: str = "model(x).square().mean().backward()",
    loader: str = "nbdist.loader(data, global_batch=8)",
    data: str = "torch.utils.data.TensorDataset(torch.randn(64, 4))",
    x: str = "(x,)",
) -> str:
    """Return a cell that trains.

    Args:
        model: The lines that make `model`.
        backward: Those of its loop, until the optimizer steps.
        loader: What gives batches.
        data: What it gives them of.
        x: What a batch is called.
    """
    inner = backward.replace("\n", "\n    ")
    return _CELL.format(model=model, backward=inner, loader=loader, data=data, x=x)
