"""Find where two layouts of one model part: which module's output, or gradient, is another one.

Both take the same step on the batch of the newest layout's last one. One that the model has not is
made of the plain model, with the weights of now, and takes the room of another model meanwhile.
Each is held against one process on its own split, so what is found says which of the two is wrong,
and not only that they differ.

Main thread, in a cell on all ranks.
"""

import copy
import gc
from typing import Any

import torch.distributed as dist

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout import layout as layouts
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.plan import mesh
from nbdist.engine.layout.plan.inputs import Inputs, as_inputs, join, samples_in, split
from nbdist.engine.layout.policies import policies
from nbdist.engine.layout.verify.preconditions import moved
from nbdist.engine.layout.verify.report import Difference, Looked
from nbdist.engine.layout.verify_magic import Batch, batch_of, find_on_all
from nbdist.engine.layout.weights import full_tensors, meta_copy
from nbdist.engine.steps import step_state
from nbdist.engine.training import training
from nbdist.shared.error_text import named
from nbdist.shared.errors import LayoutError, NBDistError
from nbdist.shared.text import counted


def compare(one: str, other: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return how far each layout is from one process, or `{"error": (what, why, do)}`. Collective.

    Args:
        one: The text of a layout, as `parallelize` takes it.
        other: Another.
        names: The namespace of the rank's cells.
    """
    random = step_state.here().random_numbers()
    try:
        live = find_on_all(None, names)
        _refuse_equal(one, other)
        batch = batch_of(live)
        whole = _whole(live, batch)
        looked = [_look(live, text, whole, batch) for text in (one, other)]
    except NBDistError as error:
        return {"error": [error.what, error.why, error.do]}
    finally:
        step_state.here().start_over(random)
    return {"layouts": looked, "batch": batch.how, "samples": samples_in(whole)}


def _refuse_equal(one: str, other: str) -> None:
    world = dist.get_world_size()
    if mesh.parse(one, world, world) == mesh.parse(other, world, world):
        raise LayoutError(
            f'"{one}" and "{other}" are one layout on {counted(world, "rank")}.',
            do="%dist verify compares it with one process",
        )


def _whole(live: Layout, batch: Batch) -> Any:
    """Return the batch of all ranks, `(args, keywords, y)`, on each. Collective.

    Raises:
        LayoutError: Parts of it do not go together.
    """
    inputs = as_inputs(batch.x)
    mine = moved((inputs.args, inputs.keywords, batch.y), "cpu")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    parts: dict[int, Any] = {}
    for rank, part in enumerate(everyone):
        parts.setdefault(live.shape.data_part(rank)[0], part)
    try:
        return join([parts[number] for number in sorted(parts)])
    except (ValueError, RuntimeError) as error:
        raise LayoutError(
            "The batches of the ranks cannot be put together, so no other layout can have them.",
            why=named(error).splitlines()[0],
            do="layout.step with batches whose samples have the same shape on all ranks",
        ) from error


def _look(live: Layout, text: str, whole: Any, batch: Batch) -> dict[str, Any]:
    world = dist.get_world_size()
    is_live = mesh.parse(text, world, world) == live.shape
    layout = live if is_live else _made(live, text)
    try:
        part, count = layout.shape.data_part(dist.get_rank())
        samples = samples_in(whole)
        if not samples or samples % count:
            raise LayoutError(
                f"A batch of {samples} samples cannot be cut into the {count} equal parts of "
                f'"{layout.name}".',
                do=f"layout.step with a number of samples that {count} divides, over all ranks",
            )
        args, keywords, y = moved(split(whole, samples, count)[part], layout.mesh.device_type)
        with training.here.unseen(), torch_modules.as_written():
            return _plain(layout, layout.look_into((Inputs(args, keywords), y), batch.loss_fn))
    finally:
        if not is_live:
            layouts.here.forget(layout)
            del layout
            gc.collect()


def _made(live: Layout, text: str) -> Layout:
    """Return a layout of the live one's model, with its weights. Collective.

    Raises:
        LayoutError: It does not fit.
    """
    if live.skeleton is None:
        raise LayoutError("There is no plain model to spread again.", why=live.no_skeleton)
    world = dist.get_world_size()
    shape = mesh.parse(text, world, world)
    plain = copy.deepcopy(live.skeleton)
    meta_copy.materialise(plain, live.mesh.device_type)
    empty = full_tensors.names(plain)
    for name, full in full_tensors.tensors(live):
        full_tensors.put(empty[name], full)
    return parallelize(plain, text, *policies.that_fit(live.policies, shape))


def _plain(layout: Layout, looked: Looked) -> dict[str, Any]:
    """Return plain values, in the order of computation."""
    proof = looked.proof
    by_name = {(one.what, one.name): one for one in proof.worst}
    wrong = set[tuple[str, str]]().union(*looked.beyond)
    order = [
        *((one.what, one.name) for one in proof.worst if not one.step),
        *(("output", name) for name in looked.outputs),
        ("loss", ""),
        *(("gradient", name) for name in looked.backward),
        *((one.what, one.name) for one in proof.worst),
    ]
    return {
        "name": layout.name,
        "is_bit_equal": proof.is_bit_equal,
        "places": [_row(by_name[key]) for key in dict.fromkeys(order) if key in by_name],
        "ranks": _ranks_of(next((k for k in order if k in wrong), None), looked),
        "loss": list(proof.losses[0]) if proof.losses else None,
        "parts": sorted(looked.parts),
        "unkept": looked.unkept,
        "terms": list(proof.terms),
        "notes": list(proof.notes),
        "one_piece": None if proof.one_piece is None else proof.one_piece.verdict,
    }


def _ranks_of(place: tuple[str, str] | None, looked: Looked) -> list[int]:
    return [rank for rank, wrong in enumerate(looked.beyond) if place in wrong]


def _row(one: Difference) -> list[Any]:
    return [one.what, one.name, one.rank, one.by, one.allowed]
