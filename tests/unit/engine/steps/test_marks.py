"""What a mark of an object cannot show is known: writes through `.data` on a device."""

import torch
from torch import nn

from nbdist.engine.steps.followers.marks import hides_writes


class Average:
    def __init__(self, device: str) -> None:
        self.kept = {"weight": torch.zeros(3, device=device)}


def test_tensors_on_a_device_may_be_written_unseen_and_those_on_the_cpu_not() -> None:
    for device, hides in (("meta", True), ("cpu", False)):
        assert hides_writes(Average(device)) is hides
        assert hides_writes(nn.Linear(2, 2, device=device)) is hides
        assert hides_writes([torch.zeros(3, device=device)]) is hides
