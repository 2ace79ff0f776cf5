"""Where a pipeline cannot run is said before the model changes."""

import pytest
import torch

from nbdist.engine.layout import spread
from nbdist.engine.layout.axes.registry import axes_of
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.policies import Policies
from nbdist.shared.errors import LayoutError


@pytest.mark.parametrize("shape", [MeshShape(pp=2), MeshShape(pp=2, dp=2)])
def test_stages_on_gpus_over_gloo_are_refused_and_the_model_stays_as_it_was(
    shape: MeshShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "_device_type", lambda _: ("cuda", "gloo"))
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LayoutError) as refused:
        spread.spread(model, shape, Policies())
    said, why, do = str(refused.value).splitlines()
    assert said == (
        f'The layout "{shape.name}" cannot run on a GPU over gloo; the model is as it was.'
    )
    assert why.startswith("Why: stages send each other messages, and gloo sends a message from")
    assert do.startswith('Do:  leave out pp, as in "zero3"; or keep the model on the CPU; or')
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("shape", "device", "backend"),
    [
        (MeshShape(pp=2, dp=2), "cuda", "nccl"),
        (MeshShape(pp=2, dp=2), "cpu", "gloo"),
        (MeshShape(dp=2, fsdp=2), "cuda", "gloo"),
        (MeshShape(cp=2, tp=2), "cuda", "gloo"),
    ],
)
def test_other_axes_and_other_ways_to_send_are_not_refused(
    shape: MeshShape, device: str, backend: str
) -> None:
    for axis in axes_of(shape):
        axis.check_device(shape, device, backend)
