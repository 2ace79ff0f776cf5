"""`nbdist.publish`: one consolidated model, from sharded training to MLflow's registry.

    every rank   its parts, one weight at a time ─▶ rank 0
    rank 0       plain model ─▶ one program (torch.export) and an example, in a folder
    notebook     moves the folder into the cell's run; the process that sends runs registers it

mlflow is never imported here. Main thread, all ranks.
"""

import copy
import json
import platform
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import torch_modules
from nbdist.engine.kernel.agreement import each
from nbdist.engine.layout.layout import Layout, layout_of
from nbdist.engine.layout.weights import exported, full_tensors, meta_copy
from nbdist.shared.error_text import named
from nbdist.shared.errors import PublishError

_NAME = re.compile(r"[^/:@'\"\s][^/:@'\"\n]{0,200}")
_ALIAS = re.compile(r"(?!latest$)(?!v\d+$)[\w-]{1,200}", re.IGNORECASE)  # what MLflow takes


@dataclass(frozen=True, slots=True)
class Published:
    """A model that will be in MLflow's registry.

    Attributes:
        name: In the registry.
        alias: That the new version gets; None for none.
        version: MLflow sets it when the cell's run is sent, so it is not known yet.
        uri: Under which MLflow finds it then: by the alias, else the newest version.
    """

    name: str
    alias: str | None
    version: int | None = None

    @property
    def uri(self) -> str:
        """Under which MLflow finds it, once the run of this cell was sent."""
        return f"models:/{self.name}@{self.alias}" if self.alias else f"models:/{self.name}/latest"

    def __repr__(self) -> str:
        return (
            f'Model "{self.name}" is sent with the run of this cell, and becomes a new version: '
            f"{self.uri}"
        )


@dataclass(slots=True)
class PublishTarget:
    """The destination of models that a rank publishes.

    Attributes:
        folder: The folder of models until the notebook takes them.
        report: Called with a model's facts for the notebook.
        is_tracked: Returns whether the cell that runs is tracked.
    """

    folder: Path
    report: Callable[[dict[str, Any]], None]
    is_tracked: Callable[[], bool]


class Publishing:
    """How a process publishes: through the notebook, once its rank has joined."""

    def __init__(self) -> None:
        self.place: PublishTarget | None = None


def publish(
    model: nn.Module | Layout, name: str, *, example: Any = None, alias: str | None = None
) -> Published:
    """Publish one consolidated model in MLflow's registry, in any layout. Collective.

        nbdist.publish(model, "small-gpt", example=x, alias="candidate")  # on all ranks

    Rank 0 gets the whole weights, on the CPU, and makes one program of them (`torch.export`, in
    evaluation mode) that needs no class of the notebook. It goes into the run of this cell, and
    becomes a new version in the registry once that was sent, after the cell. Then
    `mlflow models serve -m models:/small-gpt@candidate --env-manager local` serves it.

    Args:
        model: A model that has a layout, or the layout; or a plain module: rank 0's counts.
        name: Of the registered model; a further one of that name is its next version.
        example: A batch as in `model(example)`: one tensor, or a dict of one keyword; rank 0's
            counts. By default the `x` of the last `layout.step`.
        alias: That the version gets, such as "champion": it names the newest that got it.

    Returns:
        Its name, and the URI by which MLflow will have it.

    Raises:
        PublishError: Nothing is tracked here, the model cannot be exported, with the reason, or the
            example does not fit; the same on all ranks, and nothing was published.
    """
    place = each(lambda: _checked(name, alias), kind=PublishError)
    if not isinstance(model, nn.Module | Layout):
        raise PublishError(f"nbdist.publish takes a model or its layout, not {model!r}.")
    layout = model if isinstance(model, Layout) else layout_of(model)
    if isinstance(model, Layout):
        model = model.model
    plain = _plain_on_rank_0(layout, model)

    def write() -> dict[str, Any] | None:
        if plain is None:
            return None
        return _write(place.folder, name, alias, plain, _example(layout, example))

    facts = each(write, kind=PublishError)
    if facts is not None:
        place.report(facts)
    return Published(name, alias)


def _checked(name: str, alias: str | None) -> PublishTarget:
    place = here.place
    if place is None:
        raise PublishError(
            "There is no notebook here that a model could be published through.",
            do="call it in a %%distributed cell; elsewhere layout.save_pretrained(folder) writes "
            "the weights",
        )
    if not place.is_tracked():
        raise PublishError(
            "This cell is not tracked, so there is no run that a model could be published with.",
            do="run the cell without --no-track",
        )
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise PublishError(
            f"{name!r} is no name of a registered model.",
            do='give a short text without quotes, "/", ":" and "@", such as "small-gpt"',
        )
    if alias is not None and not (isinstance(alias, str) and _ALIAS.fullmatch(alias)):
        raise PublishError(
            f"{alias!r} is no alias of a registered model.",
            do='give letters, digits, "_" and "-", such as "champion", and neither "latest" nor '
            '"v1", which MLflow keeps for itself',
        )
    return place


@torch.no_grad()
def _plain_on_rank_0(layout: Layout | None, model: nn.Module) -> nn.Module | None:
    """Return the plain model with the whole weights on rank 0, on the CPU; None on others.

    Collective. One weight at a time: rank 0 has room for the model and one weight more.
    """

    def bare() -> nn.Module | None:
        if dist.get_rank():
            return None
        if layout is None:
            return copy.deepcopy(torch_modules.uncompiled(model)).to("cpu")
        if layout.skeleton is None:
            raise PublishError(f"The plain model cannot be put together: {layout.no_skeleton}.")
        plain = copy.deepcopy(layout.skeleton)
        meta_copy.materialise(plain, "cpu")
        return plain

    plain = each(bare, kind=PublishError)
    if layout is not None:
        held = full_tensors.names(plain, duplicates=True) if plain is not None else {}
        for name, full in full_tensors.tensors(layout):
            if name in held:
                held[name].copy_(full)
    return plain


def _example(layout: Layout | None, example: Any) -> Any:
    if example is None and layout is not None and layout.last_step is not None:
        example = layout.last_step[0]
    if example is None:
        raise PublishError(
            "publish needs a batch to follow through the model.",
            do="publish(model, name, example=x), x as in model(x)",
        )
    return example


def _write(
    home: Path, name: str, alias: str | None, plain: nn.Module, example: Any
) -> dict[str, Any]:
    """Write the program and a request to try into a folder of their own; return its facts."""
    program, sample = exported.export(plain, example)
    folder = home / f"{time.time_ns()}"
    try:
        (folder / "data").mkdir(mode=0o700, parents=True)
        torch.export.save(program.exported, folder / "data" / "model.pt2")
        request = json.dumps({"inputs": sample.tolist()})
        (folder / "example.json").write_text(request + "\n", encoding="utf-8")
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)  # a disk that is full should not stay so
        raise PublishError(f"The model was not written to {folder}: {named(error)}.") from error
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "folder": str(folder),
        "name": name,
        "alias": alias,
        "inputs": program.inputs,
        "outputs": program.outputs,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "size_bytes": size,
    }


here = Publishing()
