"""Put the ranks together again after a fault or a death: the order of what is done, on all ranks.

    re-form ─▶ reset ─▶ sync ─▶ clone

Every rank's main thread runs this at the same time, idle otherwise: survivors call `recover`, and a
*new rank*, which has just joined with the same generation, goes on with `settle`. A fault in the
midst of it raises and leaves the group aborted: it is begun again with a higher generation.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from nbdist.engine.averaging import async_sgd
from nbdist.engine.compat import torch_hooks, torch_pipeline, torch_sharded
from nbdist.engine.compat.libraries import third_parties
from nbdist.engine.data.position import resume
from nbdist.engine.group import ddp_hook_state, group, identity
from nbdist.engine.kernel import location
from nbdist.engine.layout.plan import device_mesh
from nbdist.engine.recovery import (
    alike_random,
    follow,
    reset,
    resize,
    small_values,
    sync_state,
    wrapped_models,
)
from nbdist.engine.recovery.clone import clone
from nbdist.engine.recovery.decide import Decision
from nbdist.engine.recovery.snapshots import peer_state, peers, snapshot
from nbdist.engine.steps import defer_interrupt, keep, step_state
from nbdist.engine.tap import tap
from nbdist.engine.training import training


def install() -> None:
    """Begin to keep what a recovery needs, when the rank has joined its group; once is enough."""
    if step_state.here().is_installed:
        return
    step_state.install(
        wrapped_models.buffers_of, snapshot.here.at_boundary, snapshot.here.before_any_step
    )
    step_state.here().followers.keep_by(follow.keep)
    # `reset` puts them back.
    torch_hooks.wrap_start_workers(defer_interrupt.here.start_workers_whole)
    step_state.also(ddp_hook_state.here.snapshot, lambda _: None)


def _beside_names() -> tuple[clone.Part, ...]:
    """Return what new ranks get beside the namespace, in the order in which they take it over."""
    steps = step_state.here()
    return (
        clone.Part("pipelines", torch_pipeline.here.hand_over, torch_pipeline.here.take_over),
        clone.Part("identities", wrapped_models.hand_over, identity.here.take_over),
        clone.Part("steps", steps.hand_over, steps.take_over),
        clone.Part("loaders", resume.here.hand_over, resume.here.take_over),
        clone.Part("kept", keep.here.kept, keep.here.take_over),
        clone.Part("meshes", device_mesh.here.hand_over, device_mesh.here.take_over),
        clone.Part("cells", location.here.hand_over, location.here.take_over),
        clone.Part("accelerate", third_parties.shared_states, lambda _: None),  # it fills itself
    )


def recover(
    generation: int, replacements: Iterable[int], peer_of: Mapping[int, int | None] | None = None
) -> dict[str, Any]:
    """Give every group a new backend and bring all ranks to the same boundary. A survivor's part.

    Args:
        generation: Higher than any before, the same on all ranks.
        replacements: Ranks whose processes are new; they `join` at the same time.
        peer_of: In whose memory each rank keeps its snapshots from now on; None: as before.

    Returns:
        `healed` (one line a module), `agreed` (lines for people), `is_half` (a step stays half
        done), `steps_lost` (made before, to be made again), `cloned` (what new ranks got, or
        None), `is_refused` (this new rank has a model without its contents, into which a
        checkpoint can be restored), `stale` (groups that could not be formed), `reforms_left`
        (None: no limit), `is_anew` (the program had destroyed the default group).

    Raises:
        ClusterError: A rank did not arrive in time.
        ReleasedError: `group.abort` was called meanwhile. After either the group is unusable until
            the next generation.
    """
    formed = group.reform(generation)
    resize.after_destroy(is_anew=formed["is_anew"])
    return {
        **settle(generation, replacements, peer_of),
        "stale": formed["stale"],
        "reforms_left": formed["reforms_left"],
        "is_anew": formed["is_anew"],
    }


def settle(
    generation: int, replacements: Iterable[int], peer_of: Mapping[int, int | None] | None = None
) -> dict[str, Any]:
    """Do what follows when the group stands: the replacement ranks' part too, after their `join`.

    Returns:
        `healed`, `agreed`, `is_half`, `steps_lost`, `cloned` and `is_refused`, as in `recover`.
    """
    try:
        replacements = sorted(replacements)
        if dist.get_rank() in replacements:
            sync_state.here.finish()  # what it holds since was given to it
        progress = sync_state.here.begin(step_state.here().progress)  # before anything is reset
        healed = reset.reset_state(progress)
        if replacements:
            peers.here.reconnect()
            peers.here.move(peer_of or {})
        decisions, lines, is_half = sync_state.here.sync(replacements)
        cloned, is_refused = None, False
        if replacements:
            cloned = clone.clone_each(
                replacements,
                step=training.here.current_step(),
                parts=[unit.copies for unit in wrapped_models.find() if unit.copies],
                beside=_beside_names(),
                arrived=lambda: peer_state.expect_others(decisions),
            )
            # A new rank remembers none: the groups of older meshes would meet those of newer ones.
            torch_sharded.forget_results()
            missing = peer_state.missing(decisions, replacements)
            decisions = sync_state.here.refuse_missing(decisions, missing)
            is_own = peer_state.restore(decisions)
            is_new = dist.get_rank() in replacements
            is_refused = sync_state.here.refuse_shapes(decisions, is_new=is_new)
            if cloned is not None and is_own:
                cloned["random"]["is_own"] = True
            _draw_alike(replacements, decisions, cloned)
            small_values.here.give_back(replacements, cloned, clone.namespace)
        async_sgd.here.restart()
        # What was sent in between is no cell's.
        tap.reset_counts()
        sync_state.here.finish()
        return {
            "healed": healed,
            "agreed": [*(decision.line for decision in decisions), *lines],
            "is_half": is_half,
            "steps_lost": max((decision.lost for decision in decisions), default=0),
            "cloned": cloned,
            "is_refused": is_refused,
        }
    except BaseException:
        # The peers must not wait for this rank, nor any cell use what is half agreed.
        group.abort(generation)
        raise


def _draw_alike(
    replacements: list[int], decisions: Iterable[Decision], cloned: dict[str, Any] | None
) -> None:
    """Have new ranks draw what their neighbours along tp and cp do."""
    own = {rank for decision in decisions for rank, _ in decision.given}
    first, source = alike_random.settle(replacements, own).get(dist.get_rank(), (0, -1))
    if cloned is None or source == -1:
        return
    if source is None:
        clone.seed_anew({**cloned["random"], "rank": first})
    cloned["random"]["alike"] = first if source is None else source
