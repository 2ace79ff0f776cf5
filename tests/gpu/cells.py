"""What the tests of sessions on a GPU share: cells, and what must hold after a fault."""

import pytest

import nbdist

MARKS = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("beside_the_notebook"),
    # Sockets of tornado and asyncio warn of each other's deprecations.
    *(
        pytest.mark.filterwarnings(f"ignore::{category}")
        for category in ("DeprecationWarning", "FutureWarning", "ResourceWarning")
    ),
]

STEP = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
layout = nbdist.parallelize(model.to(device), "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 16, device=device)
target = data.sum(1, keepdim=True)
losses = []
"""
LEARN = """
for _ in range(5):
    loss = torch.nn.functional.mse_loss(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
losses
"""
STEP += LEARN


def assert_usable(session: nbdist.Session) -> None:
    """Check that tensors on the GPU still add up, and that the model of `STEP` still learns."""
    n = session.world_size
    total = session.run("x = torch.ones(1, device=device); dist.all_reduce(x); x.item()")
    assert total.value_list == [float(n)] * n
    before, after = session.run(f"before = losses[-1]\n{LEARN}\nbefore, losses[-1]")[0].value
    assert after < before


def assert_equal_parameters(session: nbdist.Session) -> None:
    """Check that the model of `STEP` is the same on all ranks, to the bit."""
    sums = session.run("[p.double().sum().item() for p in model.parameters()]").value_list
    assert all(one == sums[0] for one in sums)
