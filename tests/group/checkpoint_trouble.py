"""What ranks run in the tests of checkpoints that fail: what is said, and what has changed."""

from typing import Any

import torch

import nbdist
from nbdist.engine.compat.torch_hooks import local_part
from tests.group import checkpoint_ranks
from tests.group.checkpoint_ranks import Training
from tests.group.parity_cases import Case

Options = dict[str, Any]


def save_often_and_go_on(
    folder: str, case: Case, at: list[int], more: int, how: Options
) -> dict[str, Any]:
    """Save at these steps with keep=2, and train on from the last; returns the state at the end."""
    training = Training(case)
    for number, step in enumerate(at[:-1]):
        training.train(step - ([0, *at][number]))
        nbdist.save(folder, wait=True, keep=2, **how)
    made = at[-2] if len(at) > 1 else 0
    steps = at[-1] - made
    training.train(steps + more, steps, lambda: nbdist.save(folder, wait=True, keep=2, **how))
    found = training.state()
    training.end()
    return found


def restore_and_go_on(folder: str, case: Case, more: int, how: Options) -> dict[str, Any]:
    """As `checkpoint_ranks.restore_and_go_on`."""
    return checkpoint_ranks.restore_and_go_on(folder, case, more, **how)


def error_of_restore(
    folder: str, case: Case, options: Options | None = None, **how: Any
) -> dict[str, Any]:
    """Train a little, restore, and return what was raised, and whether anything has changed."""
    training = Training(case)
    training.train(2)
    before = fingerprint(training)
    said = checkpoint_ranks.error_of(nbdist.restore, folder, storage_options=options, **how)
    is_unchanged = fingerprint(training) == before
    training.end()
    return {"error": said, "is_unchanged": is_unchanged}


def error_of_save(
    folder: str, case: Case, options: Options | None = None, **how: Any
) -> dict[str, Any]:
    """Train a little, save, and return what was raised."""
    training = Training(case)
    training.train(1)
    before = fingerprint(training)
    said = checkpoint_ranks.error_of(nbdist.save, folder, wait=True, storage_options=options, **how)
    is_unchanged = fingerprint(training) == before
    training.end()
    return {"error": said, "is_unchanged": is_unchanged}


def delete(url: str, options: Options) -> None:
    """Delete one file behind a URL."""
    import fsspec  # type: ignore[import-untyped]

    files, path = fsspec.core.url_to_fs(url, **options)
    files.rm_file(path)


def fingerprint(training: Training) -> list[Any]:
    """Return all that a restore could change on this rank, as plain values."""
    optimizer = training.opt
    inner = getattr(optimizer, "optim", optimizer)
    states = [
        local_part(value).tolist() if isinstance(value, torch.Tensor) else value
        for group in inner.param_groups
        for parameter in group["params"]
        for _, value in sorted(inner.state[parameter].items())
    ]
    parameters = [local_part(p.detach()).tolist() for p in training.layout.model.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [
        parameters,
        states,
        groups,
        training.scheduler.state_dict(),
        training.loader.state_dict(),
        training.average.value,
        torch.get_rng_state().tolist(),
    ]
