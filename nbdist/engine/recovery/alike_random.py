"""Have replacement ranks draw the random numbers that their neighbours draw.

Ranks along tp and cp work on the same samples and must drop the same in dropout
(`layout/plan/random_numbers`). A new rank gets the generators of such a neighbour; where all of
these died, the new ones begin one stream together. Main thread of every rank, at the same time.
"""

from collections.abc import Collection, Sequence

import torch.distributed as dist

from nbdist.engine.group import rendezvous
from nbdist.engine.layout.layout import live_layouts
from nbdist.engine.recovery import send_tensors
from nbdist.engine.steps import step_state


def choose(
    replacements: Sequence[int], own: Collection[int], same_samples: int
) -> dict[int, tuple[int, int | None]]:
    """Return, by new rank, the first of those that draw the same, and whom it gets its stream from.

    Pure. None: no rank has that stream any more.

    Args:
        replacements: The new ranks.
        own: Those of them that have their predecessor's stream.
        same_samples: How many neighbours work on the same samples, and draw the same numbers.
    """
    chosen = {}
    for replacement in replacements:
        if replacement not in own:
            first = replacement // same_samples * same_samples
            neighbours = range(first, first + same_samples)
            having = [r for r in neighbours if r not in replacements or r in own]
            chosen[replacement] = first, having[0] if having else None
    return chosen


def settle(replacements: Sequence[int], own: Collection[int]) -> dict[int, tuple[int, int | None]]:
    """Give new ranks their neighbours' streams; returns what `choose` does, {} where none has any.

    Raises:
        ClusterError: A rank did not answer in time.
    """
    # One that is left from before the number of ranks changed spreads nothing any more.
    shapes = [layout.shape for layout in live_layouts()]
    world_size = dist.get_world_size()
    mine = max(
        (shape.same_samples for shape in shapes if shape.world_size == world_size), default=1
    )
    heard = rendezvous.exchange("draw alike", str(mine), rendezvous.FORM_TIMEOUT_S)
    same_samples = max(int(text) for text in heard.values())
    if same_samples == 1:
        return {}
    chosen, here = choose(replacements, own, same_samples), dist.get_rank()
    for replacement, (_, source) in chosen.items():
        if here == source:
            send_tensors.send(step_state.here().random_numbers(), [], replacement)
        elif here == replacement and source is not None:
            mark, _ = send_tensors.receive(source)
            step_state.here().go_on_from(mark)
    return chosen
