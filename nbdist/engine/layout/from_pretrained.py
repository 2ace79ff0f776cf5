"""`nbdist.from_pretrained`: a folder of weights, read straight into each rank's shards.

    folder ─▶ headers ─▶ model on meta ─▶ names matched ─▶ spread ─▶ each rank reads its parts

All that can be refused is refused before the model is spread.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from nbdist.engine.kernel.agreement import each, from_rank_0
from nbdist.engine.layout import parallelize
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.weights import factory, full_tensors, pretrained_folder
from nbdist.engine.layout.weights.from_files import FromFiles, make_fresh
from nbdist.engine.layout.weights.pretrained_folder import Match
from nbdist.shared import side
from nbdist.shared.errors import CheckpointError

_SHOWN = 4  # names in a line


def from_pretrained(
    source: str | Path | Callable[[], nn.Module],
    layout: str,
    *policies: object,
    weights: str | Path | None = None,
    new: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> Layout:
    """Build a model, spread it, and read its weights from a folder; each rank reads its own parts.

    No rank ever holds the whole model: it is built without weights, and with shards a rank's memory
    grows by its shards alone. Every rank must see the folder. Collective.

        layout = nbdist.from_pretrained("models/Llama-3.2-1B", "zero3")
        layout = nbdist.from_pretrained(lambda: GPT(config), "fsdp=2 tp=2", weights="gpt")
        model = layout.model

    Args:
        source: A folder that transformers' `save_pretrained` has written, with `config.json`: the
            model is the class named there. Or a function that makes the model, and `weights`.
        layout: As `parallelize` takes it.
        policies: As `parallelize` takes them.
        weights: The folder of `model.safetensors`, or of several files and their index, as
            `layout.save_pretrained` writes it. For a `source` that is a function.
        new: Patterns of names of weights that the folder need not have, or has in another shape,
            such as `"head.*"`: they are initialised as when the model is built. The head of a
            transformers model need not be named.
        skip: Patterns of names in the folder that are left out.

    Returns:
        The layout; the model is `layout.model`, in training mode, of the dtypes it was built in.

    Raises:
        CheckpointError: The folder is missing, damaged, or does not fit the model; the same on all
            ranks.
        LayoutError: As `parallelize`.
        UsageError: This is the notebook.
    """
    side.require_rank("nbdist.from_pretrained")
    make, folder = each(lambda: _read_source(source, weights))

    def on_meta() -> tuple[nn.Module, FromFiles]:
        model, _ = factory.build(make, with_weights=False)
        stored = from_rank_0(lambda: pretrained_folder.stored_tensors(folder))
        match = each(lambda: _matched(model, stored, new, skip))
        fresh = each(lambda: _fresh_on_rank_0(model, match.new))
        facts = full_tensors.places(model, meta=True)
        _tell(match, folder)
        return model, FromFiles(match, fresh, {name: facts[name] for name in match.new})

    return parallelize.with_weights(on_meta, layout, policies)


def _read_source(source: Any, weights: str | Path | None) -> tuple[Callable[[], nn.Module], Path]:
    """Return a function that makes the model, and the folder of its weights.

    Raises:
        CheckpointError: There is no such folder, or the model is not specified.
    """
    if isinstance(source, str | Path):
        folder = Path(source).expanduser()
        if weights is not None:
            raise CheckpointError(
                "from_pretrained got two folders.",
                do="from_pretrained(folder, layout), or from_pretrained(lambda: Model(config), "
                "layout, weights=folder)",
            )
        return _model_of(folder), folder
    if isinstance(source, nn.Module) or not callable(source):
        raise CheckpointError(
            f"from_pretrained got a {type(source).__name__} where a folder or a function that "
            "makes a model should be.",
            do="from_pretrained(lambda: Model(config), layout, weights=folder)",
        )
    if weights is None:
        raise CheckpointError(
            "from_pretrained got a function that makes a model, and no folder of weights.",
            do="from_pretrained(lambda: Model(config), layout, weights=folder); without weights, "
            "nbdist.parallelize(lambda: Model(config), layout)",
        )
    return source, Path(weights).expanduser()


def _model_of(folder: Path) -> Callable[[], nn.Module]:
    """Return a function that makes the model of a folder's `config.json`.

    Raises:
        CheckpointError: transformers has no such model.
    """
    if not folder.is_dir():
        pretrained_folder.stored_tensors(folder)  # raises
    instead = "give the function: from_pretrained(lambda: Model(config), layout, weights=folder)"
    if not (folder / pretrained_folder.CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has no {pretrained_folder.CONFIG}, which would tell what the model is.",
            do=instead,
        )
    config = pretrained_folder.read_json(folder / pretrained_folder.CONFIG)
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise CheckpointError(
            f"transformers, which builds the model of {folder}, is not installed.",
            do="pip install transformers; or " + instead,
        ) from error
    names = config.get("architectures") or ["AutoModel"]
    kind = getattr(library, str(names[0]), None)
    if kind is None or "auto_map" in config:
        raise CheckpointError(
            f"{folder} holds a {names[0]}, which transformers {library.__version__} does not have.",
            why="code that comes with weights is not run",
            do=instead,
        )

    def make() -> nn.Module:
        read = library.AutoConfig.from_pretrained(folder)
        built = kind.from_config(read) if kind is library.AutoModel else kind._from_config(read)
        assert isinstance(built, nn.Module)
        return built

    return make


def _matched(model: nn.Module, stored: Any, new: Sequence[str], skip: Sequence[str]) -> Match:
    match = pretrained_folder.match(model, stored, new, skip)
    for path in {tensor.path for tensor in match.stored.values()}:
        path.stat()  # not every rank may see what rank 0 has read
    return match


def _fresh_on_rank_0(model: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    return make_fresh(model, names) if dist.get_rank() == 0 else {}


def _tell(match: Match, folder: Path) -> None:
    """Print the differences between the folder and the model; rank 0 only."""
    if dist.get_rank():
        return
    if match.new:
        print(
            f"New, and initialised: {_few(match.new)} (not in {folder}). Train before you use it."
        )
    if match.left:
        print(f"Left out of {folder}: {_few(match.left)}.")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
