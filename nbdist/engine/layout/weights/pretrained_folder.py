"""A folder of weights as Hugging Face has it, and which of its tensors a model's weights are.

`model.safetensors`, or `model.safetensors.index.json` and the files that it names; `config.json`
where the model is one of transformers. Names may differ by the prefix that transformers puts before
the body of a model with a head. Nothing is read here but headers. No collectives.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from nbdist.engine.compat.libraries import transformers_names
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.layout.weights.safetensors_file import StoredTensor, stored_in, unreadable
from nbdist.shared.errors import CheckpointError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_SHOWN = 3  # names in an error


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder, by name.

    Raises:
        CheckpointError: It, or a file of it, is missing or damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no folder {folder}.",
            why="from_pretrained reads a folder on disk, and downloads nothing",
            do="download it first, as with huggingface_hub.snapshot_download(name)",
        )
    if (folder / INDEX).is_file():
        return _of_index(folder, read_json(folder / INDEX))
    if (folder / SINGLE).is_file():
        return stored_in(folder / SINGLE)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    raise CheckpointError(
        f"{folder} holds neither {SINGLE} nor {INDEX}.",
        why=f"it holds {_few(others)}" if others else "there is no file of safetensors in it",
        do=f"name a single file {SINGLE}; weights of torch.save are converted by "
        "safetensors.torch.save_file(state, path)",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file of a folder.

    Raises:
        CheckpointError: It is missing, or not JSON.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", do="download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object.", do="download it again")
    return found


def _of_index(folder: Path, index: Mapping[str, Any]) -> dict[str, StoredTensor]:
    places = index.get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map.", do="download it again")
    files = sorted({str(name) for name in places.values()})
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{_few(missing)} of {len(files)} files that {folder / INDEX} names "
            f"{'is' if len(missing) == 1 else 'are'} missing.",
            do="download the folder again",
        )
    found: dict[str, StoredTensor] = {}
    for name in files:
        found |= stored_in(folder / name)
    if lost := [name for name in places if name not in found]:
        raise CheckpointError(
            f"{_few(lost)} is in {folder / INDEX} and in none of the files.",
            do="download the folder again",
        )
    return {name: found[name] for name in places}


@dataclass(frozen=True, slots=True)
class Match:
    """The source of each weight of a model.

    Attributes:
        stored: By the model's own name, of parameters and saved buffers; tied ones once.
        new: Names of parameters that the folder does not have.
        left: Names in the folder that the model does not have.
        aliases: All names of each of the model's weights, by the first: tied ones have several.
    """

    stored: dict[str, StoredTensor]
    new: tuple[str, ...]
    left: tuple[str, ...]
    aliases: dict[str, tuple[str, ...]]


def match(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    new: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> Match:
    """Return the stored tensor of each weight of a model.

    Of a transformers model a new head may be missing, and an old one may be left over: all that is
    beside its body.

    Args:
        model: The plain one; weights may be on meta.
        stored: The tensors in the folder.
        new: Patterns of names that the folder need not have, or not in this shape.
        skip: Patterns of names of the folder that are not wanted.

    Raises:
        CheckpointError: Names or shapes do not fit, with the first few of each kind.
    """
    skipped = [name for name in stored if _fits(name, skip)]
    stored = {name: tensor for name, tensor in stored.items() if name not in skipped}
    wanted = full_tensors.places(model, duplicates=True, meta=True)
    wanted = {name: place for name, place in wanted.items() if place.is_saved}
    body = str(getattr(model, "base_model_prefix", "") or "")
    renamed = _renamed(transformers_names.renamed(model, stored), wanted, body)
    held = full_tensors.names(model, duplicates=True)
    aliases: dict[int, list[str]] = {}
    for name in wanted:
        aliases.setdefault(id(held[name]), []).append(name)
    found, missing, misshaped = dict[str, StoredTensor](), list[str](), list[str]()
    for names in aliases.values():
        source = next((renamed[name] for name in names if name in renamed), None)
        shape = tuple(wanted[names[0]].shape)
        if source is not None and stored[source].shape == shape:
            found[names[0]] = stored[source]
        elif source is None or _fits(names[0], new):
            missing.append(names[0])
        else:
            misshaped.append(f"{names[0]} is {stored[source].shape} and must be {shape}")
    heads = bool(body) and any(name.startswith(f"{body}.") for name in wanted)
    fresh = [
        name
        for name in missing
        if not wanted[name].is_buffer
        and (_fits(name, new) or (heads and not name.startswith(f"{body}.")))
    ]
    own = {source: name for name, source in renamed.items()}
    left = [name for name in stored if own.get(name, name) not in wanted]
    extra = [
        name
        for name in left
        if own.get(name, name) not in held  # else a constant of the model, in older files
        and not (body and _is_beside(name, stored, body))
        and not _may_be_left(name, model)
    ]
    missing = [name for name in missing if name not in fresh]
    _refuse({"missing": missing, "not the model's": extra, "of another shape": misshaped}, body)
    return Match(
        found,
        tuple(fresh),
        (*skipped, *left),
        {names[0]: tuple(names) for names in aliases.values()},
    )


def _renamed(stored: Mapping[str, str], wanted: Iterable[str], body: str) -> dict[str, str]:
    """Return the stored name by the model's, under that way to see the prefix that fits most."""
    plain = {name: source for source, name in stored.items()}
    if not body:
        return plain
    start = f"{body}."
    shorter = {name.removeprefix(start): source for name, source in plain.items()}
    longer = {start + name: source for name, source in plain.items()}
    names = set(wanted)
    return max((plain, shorter, longer), key=lambda way: len(names & way.keys()))


def _is_beside(name: str, stored: Iterable[str], body: str) -> bool:
    """Return whether it is of the head of a model whose body is in the folder too."""
    return not name.startswith(f"{body}.") and any(n.startswith(f"{body}.") for n in stored)


def _may_be_left(name: str, model: nn.Module) -> bool:
    known = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in known)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse(kinds: Mapping[str, list[str]], body: str) -> None:
    found = [f"{len(those)} {kind} ({_few(those)})" for kind, those in kinds.items() if those]
    if found:
        raise CheckpointError(
            f"The folder's weights do not fit the model: {'; '.join(found)}.",
            why="they are read by name; nothing was loaded",
            do='name what is meant to differ: new=["head.*"] is initialised, skip=["old.*"] left '
            "out"
            + (
                ". Where transformers renames weights, load them there on rank 0, then "
                "layout.load_from(model)"
                if body
                else ""
            ),
        )


def _few(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
