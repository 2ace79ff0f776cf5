"""Which messages are refused before they end the process: decided on plain values."""

import pytest

from nbdist.engine.tap.ops import refuse_message
from nbdist.shared.errors import ClusterError


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_message_from_a_gpu_over_gloo_is_refused_with_the_cause_and_a_way_out(kind: str) -> None:
    with pytest.raises(ClusterError) as refused:
        refuse_message(kind, "cuda", over_gloo=True)
    said, why, do = str(refused.value).splitlines()
    assert said == (
        f"A {kind} of a tensor on the GPU was refused, for this group's backend is gloo."
    )
    assert why.endswith("cannot read or write a GPU's: torch would end this rank")
    assert do.startswith("Do:  send and receive tensors on the CPU (tensor.cpu()), or use a")


@pytest.mark.parametrize(("device", "over_gloo"), [("cpu", True), ("cuda", False), ("cpu", False)])
def test_every_other_message_passes(device: str, over_gloo: bool) -> None:
    refuse_message("send", device, over_gloo=over_gloo)
