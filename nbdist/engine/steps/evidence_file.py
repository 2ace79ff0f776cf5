"""What a rank keeps of steps as a file of its own, and the folder of such files.

    .nbdist/evidence/TIME-PID-CELL/      0700; goes after 7 days, or as the 9th
      rank0.pt, rank1.pt, ...            0600; each whole or not there

A file says by itself of how many ranks it is, so what is complete is seen at reading: ranks agree
on nothing while they train, and one that dies has kept what it had. It holds tensors and plain
values alone, and is read without unpickling anything else (`weights_only`).

Any thread; no collectives.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from weakref import ref

import torch
from torch import nn
from torch.utils._pytree import tree_map

from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.steps import random_states
from nbdist.engine.steps.forwards import Forward, GivenBatch, MadeLoss, tensors_in
from nbdist.engine.steps.kept_step import KeptStep, Weights
from nbdist.engine.steps.optimizer_states import States
from nbdist.engine.steps.sound_steps import Norms, SoundStep, Training, to_plain
from nbdist.engine.steps.step_state import StepState
from nbdist.shared.errors import UsageError

FORMAT: Final = 2
DAYS: Final = 7
MOST_FOLDERS: Final = 8
LAST: Final = "last"

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


# ---- The folder ---------------------------------------------------------------------------------


def write(folder: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Write a rank's file, in place of the one before.

    Raises:
        OSError: It cannot be written; the one before is as it was.
    """
    if not folder.is_dir():
        for part in (folder.parent.parent, folder.parent, folder):
            part.mkdir(mode=0o700, exist_ok=True)
        expire(folder.parent)
    beside = folder / f"rank{rank}.pt.tmp"
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    try:
        private = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(private, "wb") as stream:
            torch.save(content, stream)
        beside.replace(folder / f"rank{rank}.pt")
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what `write` was given; None where this rank has no file there.

    Raises:
        UsageError: It is damaged, or none of these files.
    """
    file = folder / f"rank{rank}.pt"
    try:
        content = torch.load(file, map_location=_place, weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, and this nbdist reads {FORMAT}")
    except FileNotFoundError:
        return None
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{file} cannot be read as the evidence of a step.",
            why=f"{type(error).__name__}: {first}",
            do="%dist replay --from another folder, or train with --keep again",
        ) from error
    return dict(content)


def find(place: Path) -> Path:
    """Return the folder at a place: `last` in the folder of them is the one written last.

    What is too old there is removed first.

    Raises:
        UsageError: There is none.
    """
    evidence = place.parent
    if (evidence.parent.name, evidence.name) == (".nbdist", "evidence"):
        expire(evidence)
    found = _by_age(evidence)[-1:] if place.name == LAST else [place]
    if not found or not any(found[0].glob("rank*.pt")):
        raise UsageError(
            f"No evidence is kept in {evidence if place.name == LAST else place}.",
            why="%%distributed --keep writes it as a step is left out, and as its cell ends with "
            f"an error; it goes after {DAYS} days",
            do="train with --keep, then %dist replay --from last",
        )
    return found[0]


def expire(evidence: Path) -> None:
    """Remove what is older than `DAYS`, and of newer ones the oldest beyond `MOST_FOLDERS`."""
    oldest = time.time() - DAYS * 86400
    folders = _by_age(evidence)
    for at, folder in enumerate(folders):
        with contextlib.suppress(OSError):  # another rank removes it, too
            if at < len(folders) - MOST_FOLDERS or folder.stat().st_mtime < oldest:
                for file in folder.glob("rank*.pt*"):
                    file.unlink(missing_ok=True)
                folder.rmdir()


def _by_age(evidence: Path) -> list[Path]:
    """Return the folders, the one that was written last at the end."""
    found = []
    for folder in evidence.glob("*"):
        with contextlib.suppress(OSError):  # another rank removes it
            if folder.is_dir() and not folder.is_symlink():
                found.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(found)]


def _place(storage: Any, location: str) -> Any:
    # Of a rank that may have another GPU by now.
    on_gpu = location.startswith("cuda") and torch.cuda.is_available()
    return storage.cuda() if on_gpu else storage


# ---- What is in a file --------------------------------------------------------------------------


def form_of(model: nn.Module) -> dict[str, list[list[Any]]]:
    """Return what a model must be again: its modules by name and class, its tensors by shape."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "modules": [[name, type(module).__name__] for name, module in model.named_modules()],
        "tensors": [
            [name, list(local_part(tensor).shape), str(tensor.dtype)] for name, tensor in tensors
        ],
    }


def misfit(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in what a model's `form_of` is another one now; "" where it is the same."""
    for part in ("modules", "tensors"):
        before, after = ({name: rest for name, *rest in one[part]} for one in (was, now))
        for name in [*before, *after]:
            if before.get(name) != after.get(name):
                said = [_said(one[name]) if name in one else "not there" for one in (after, before)]
                return f"{name or 'the model itself'} is {said[0]} now, and was {said[1]}"
    return ""


def pack(step: KeptStep) -> dict[str, Any]:
    """Return a step as plain values and tensors, none of which holds more than it shows."""
    model, why_not, forwards = step.model(), step.why_not, []
    if any(one.is_changed for one in step.forwards):
        why_not = "its inputs had been changed in place before they were written"
    try:
        forwards = [] if why_not else [_pack_forward(one, _Own()) for one in step.forwards]
    except TypeError as error:
        why_not = f"its inputs hold {error}, which evidence on disk does not"
    return {
        "cell": step.cell,
        "step": step.step,
        "loss": step.loss,
        "gradients": step.norms(),
        "is_of_all": step.is_of_all,
        "form": None if model is None else form_of(model),
        "modes": list(step.modes),
        "weights": None if step.weights is None else step.weights.copies,
        "forwards": forwards,
        "unkept": step.unkept,
        "why_not": why_not,
        "sound": None if step.sound is None else _pack_sound(step.sound),
    }


def unpack(
    kept: Mapping[str, Any],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    layout: Any = None,
) -> KeptStep:
    """Return the step that was packed.

    Args:
        kept: As `pack` returned it.
        model: The same again; None where there is none.
        optimizer: Its.
        layout: Its, whose newest step says what makes the loss: code is not on disk.
    """
    weights = kept["weights"]
    newest = None if layout is None else layout.last_step
    loss_fn = None if newest is None else newest[2]
    sound = kept["sound"] and _unpack_sound(kept["sound"], Training(optimizer, model))
    if sound and loss_fn is None and any(one["loss"] for one in kept["forwards"]):
        sound.why_not = (
            "what made its loss is code, which is not on disk: call layout.step with it once, as "
            "under torch.no_grad()"
        )
    return KeptStep(
        kept["cell"],
        kept["step"],
        kept["loss"],
        kept["gradients"],
        kept["is_of_all"],
        (lambda: None) if model is None else ref(model),
        tuple(kept["modes"]),
        None if weights is None else Weights(weights),
        [_unpack_forward(one, layout, loss_fn) for one in kept["forwards"]],
        kept["unkept"],
        kept["why_not"],
        sound,
    )


def _pack_sound(sound: SoundStep) -> dict[str, Any]:
    why_not, clips = sound.why_not or sound.of.why_not, []
    try:
        clips = [_plain(one, _Own()) for one in sound.clips]
    except TypeError as error:
        why_not = why_not or f"its gradients were clipped with {error}"
    states = sound.states
    return {
        "number": sound.number,
        "options": to_plain(sound.options),
        "numbers": list(sound.norms.numbers),
        "norms": sound.norms.values,
        "clips": clips,
        "why_not": why_not,
        "states": None if states is None else (states.entries, states.copies),
    }


def _unpack_sound(kept: Mapping[str, Any], of: Training) -> SoundStep:
    norms = Norms(tuple(kept["numbers"]), kept["norms"])
    states = None if kept["states"] is None else States(*kept["states"])
    clips = tuple((tuple(args), dict(keywords)) for args, keywords in kept["clips"])
    return SoundStep(of, kept["number"], kept["options"], norms, clips, kept["why_not"], states)


class _Own:
    """Makes of each tensor one without the rest of its storage, which may be a whole dataset."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            kind = type(tensor).__name__
            raise TypeError(f"a {kind if kind != 'Tensor' else 'sparse Tensor'}")
        if tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return self._made.setdefault(key, tensor.clone())


def _plain(tree: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree of plain values and tensors.

    Raises:
        TypeError: It holds something else; the text is its kind.
    """
    if isinstance(tree, torch.Tensor):
        return own(tree)
    if isinstance(tree, _PLAIN) and type(tree) in _PLAIN:
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_plain(one, own) for one in tree)
    if type(tree) is dict:
        return {_plain(key, own): _plain(one, own) for key, one in tree.items()}
    raise TypeError(f"a {type(tree).__name__}")


def _pack_forward(forward: Forward, own: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    random, given = forward.random, forward.given
    # Of numpy's state the words are an array.
    states = tree_map(lambda one: one.tolist() if hasattr(one, "tolist") else one, random.plain_rng)
    batch = [] if given is None else tensors_in(given.batch)
    return {
        "args": _plain(forward.args, own),
        "keywords": _plain(forward.keywords, own),
        "random": (random.rng, random.cuda_rng, _plain(tuple(states), own)),
        "autocast": forward.autocast,
        "loss": forward.loss and _pack_loss(forward.loss, own),
        "given": given
        and {
            "batch": [_plain(tensor.detach(), own) for tensor in batch],
            "epoch": given.epoch,
            "positions": (given.positions.start, given.positions.stop),
            "samples": given.samples() if given.positions else None,
        },
    }


def _pack_loss(
    made: MadeLoss, own: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any] | None:
    """Return what is known of a loss, but for what makes it; None where that is not on disk."""
    if made.is_changed:
        return None
    try:
        y, weight = _plain((made.y, made.weight), own)
    except TypeError:
        return None
    facts = {"samples": made.samples, "averages": made.averages, "value": made.value}
    return {"y": y, "weight": weight, **facts}


def _unpack_loss(
    kept: Mapping[str, Any] | None, layout: Any, loss_fn: Callable[..., Any] | None
) -> MadeLoss | None:
    if kept is None or loss_fn is None:
        return None
    of_it = (layout, kept["y"], loss_fn, kept["weight"], kept["samples"])
    made = MadeLoss.of(*of_it, averages=kept["averages"])
    made.value = kept["value"]
    return made


def _unpack_forward(
    kept: Mapping[str, Any], layout: Any, loss_fn: Callable[..., Any] | None
) -> Forward:
    rng, cuda_rng, states = kept["random"]
    args, keywords, given = kept["args"], kept["keywords"], kept["given"]
    tensors = tuple(tensors_in((args, keywords)))
    return Forward(
        args,
        keywords,
        StepState(
            rng.cpu(), None if cuda_rng is None else cuda_rng.cpu(), random_states.States(*states)
        ),
        kept["autocast"],
        given
        and GivenBatch(
            given["batch"], given["epoch"], range(*given["positions"]), lambda: given["samples"]
        ),
        tensors,
        tuple(tensor._version for tensor in tensors),
        _unpack_loss(kept["loss"], layout, loss_fn),
    )


def _said(facts: list[Any]) -> str:
    return " ".join(map(str, facts))
