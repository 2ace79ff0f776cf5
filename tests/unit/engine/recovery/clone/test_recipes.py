"""What torch makes travels as it is: shared storages, optimizers with their schedulers, hooks."""

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from nbdist.engine.recovery.clone import pickler, unpickler  # noqa: E402
from nbdist.engine.recovery.clone.p2p import over  # noqa: E402
from nbdist.engine.recovery.clone.recipes import recipes  # noqa: E402


def clone(**names: Any) -> dict[str, Any]:
    parcel = pickler.dump(names, {}, recipes(0, 1), user_globals={})
    buffers = [over(torch.tensor(list(part), dtype=torch.uint8)) for part in parcel.buffers]
    loaded = unpickler.load(parcel.names, parcel.streams, buffers, {}, {})
    assert (loaded.failures, parcel.placeholders, parcel.lost) == ([], {}, {})
    return loaded.values


def test_views_and_tied_weights_share_a_storage_that_travels_once() -> None:
    base = torch.arange(6.0)
    array = np.arange(4)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight = net[0].weight

    there = clone(base=base, view=base.view(2, 3)[1], net=net, empty=base[:0], array=array)

    there["base"][4] = 9
    assert there["view"].tolist() == [3, 9, 5]
    assert there["net"][0].weight is there["net"][1].weight
    assert there["empty"].untyped_storage().data_ptr() == there["base"].data_ptr()
    there["base"].resize_(100)  # its memory is torch's own
    there["array"][0] = 7
    assert there["array"].tolist() == [7, 1, 2, 3]


def test_gradients_and_hooks_of_parameters_travel_and_graphs_do_not() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.register_hook(_double)
    weight.mark = "mine"
    loss = (weight * 2).sum()
    loss.backward()

    there = clone(weight=weight, loss=loss)

    assert type(there["weight"]) is torch.nn.Parameter
    assert (there["weight"].grad.tolist(), there["weight"].mark) == ([4.0] * 3, "mine")
    (there["weight"] * 1).sum().backward()
    assert there["weight"].grad.tolist() == [6.0] * 3
    assert (float(there["loss"]), there["loss"].requires_grad) == (6.0, False)


def _double(gradient: Any) -> Any:
    return gradient * 2


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_an_optimizer_its_scheduler_and_its_model_go_on_together(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    _train(net, optimizer, schedule)

    there = clone(schedule=schedule, optimizer=optimizer, net=net)
    _train(net, optimizer, schedule)
    _train(there["net"], there["optimizer"], there["schedule"])

    assert torch.equal(net.weight, there["net"].weight)
    assert there["schedule"].optimizer is there["optimizer"]
    assert there["schedule"].get_last_lr() == schedule.get_last_lr()
    assert there["optimizer"].param_groups[0]["params"][0] is there["net"].weight


def _train(net: Any, optimizer: Any, schedule: Any) -> None:
    for i in range(3):
        optimizer.zero_grad()
        net(torch.full((2, 3), float(i))).square().sum().backward()
        optimizer.step()
        schedule.step()


def test_a_scaler_in_the_midst_of_a_step_travels_as_before_it() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)

    there = clone(scaler=scaler, optimizer=optimizer)

    assert there["scaler"].get_scale() == 8.0
    there["scaler"].unscale_(there["optimizer"])
