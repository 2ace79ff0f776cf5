"""The axes of a mesh, and the facts of each that others ask for. Pure: no torch.

    axis    what it does                                 outermost first: the order of the mesh,
    pp      stages of a pipeline                         so that tp, which talks most, joins
    dp      replicas of the model                        the nearest ranks
    fsdp    shards of parameters, gradients and optimizer states
    ep      some of the experts of each mixture; it averages gradients by itself
    cp      parts of the sequence
    tp      parts of each weight

The words and their order are those of torchtitan, Accelerate and Megatron. What an axis does to a
model is in `layout/axes`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AxisFacts:
    """The properties of an axis of any size.

    Attributes:
        shares_batch: Its ranks have different samples; those of other axes have the same.
        averages: Gradients are averaged over its ranks, which count among the shards of fsdp, or
            without fsdp among the replicas of dp.
        draws_same: Its ranks draw the same random numbers.
        cuts_model: A rank holds a part of the parameters.
        changes_forward: Blocks run otherwise than they are written, which is tried on the whole
            model first.
        sends_in_blocks: Each block sends activations over it; policies change how much.
        can_offload: It goes with `Offload`.
    """

    shares_batch: bool = False
    averages: bool = False
    draws_same: bool = False
    cuts_model: bool = False
    changes_forward: bool = False
    sends_in_blocks: bool = False
    can_offload: bool = True


FACTS = {
    "pp": AxisFacts(cuts_model=True, changes_forward=True, can_offload=False),
    "dp": AxisFacts(shares_batch=True, averages=True),
    "fsdp": AxisFacts(shares_batch=True, averages=True, cuts_model=True),
    "ep": AxisFacts(
        shares_batch=True,
        cuts_model=True,
        changes_forward=True,
        sends_in_blocks=True,
        can_offload=False,
    ),
    "cp": AxisFacts(averages=True, draws_same=True, changes_forward=True, sends_in_blocks=True),
    "tp": AxisFacts(
        draws_same=True,
        cuts_model=True,
        changes_forward=True,
        sends_in_blocks=True,
        can_offload=False,
    ),
}
AXES = tuple(FACTS)
