"""Interactive distributed PyTorch training in notebooks.

In a notebook: `%load_ext nbdist`, then `%dist start` and `%%distributed` cells. The same names
from Python: `nbdist.start(n=4)` returns a `Session`. On a rank, this package holds what a cell
uses: `nbdist.parallelize`, `nbdist.loader`, `nbdist.log`.

Names are fetched when they are first used: importing nbdist costs milliseconds and brings in
neither torch nor mlflow nor matplotlib.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    # in the notebook
    "start": "nbdist.client.notebook.current",
    "attach": "nbdist.client.notebook.attach",
    "current": "nbdist.client.notebook.current",
    "Session": "nbdist.client.session.session",
    "CellResult": "nbdist.client.output.result",
    "estimate": "nbdist.client.advice.estimate",
    "advise": "nbdist.client.advice.advise",
    "dry": "nbdist.client.advice.dry",
    # on a rank
    "init": "nbdist.engine.rank.standalone",
    "parallelize": "nbdist.engine.layout.parallelize",
    "from_pretrained": "nbdist.engine.layout.from_pretrained",
    "Layout": "nbdist.engine.layout.layout",
    "TensorParallel": "nbdist.engine.layout.policies.policies",
    "LocalSGD": "nbdist.engine.averaging.local_sgd",
    "DiLoCo": "nbdist.engine.averaging.diloco",
    "Pipeline": "nbdist.engine.layout.policies.policies",
    "AsyncSGD": "nbdist.engine.averaging.async_sgd",
    "ContextParallel": "nbdist.engine.layout.policies.policies",
    "ExpertParallel": "nbdist.engine.layout.policies.policies",
    "Precision": "nbdist.engine.layout.policies.efficiency",
    "ActivationCheckpoint": "nbdist.engine.layout.policies.efficiency",
    "Compress": "nbdist.engine.layout.policies.efficiency",
    "Offload": "nbdist.engine.layout.policies.efficiency",
    "publish": "nbdist.engine.layout.publish",
    "loader": "nbdist.engine.data.make",
    "coverage": "nbdist.engine.data.coverage",
    "log": "nbdist.engine.training.training",
    "mean": "nbdist.engine.training.mean",
    "same": "nbdist.engine.checks.same",
    "scale_lr": "nbdist.engine.data.lr_scaling",
    "keep": "nbdist.engine.steps.keep",
    "save": "nbdist.engine.checkpoint.save",
    "restore": "nbdist.engine.checkpoint.restore",
    "emulate_link": "nbdist.engine.group.links.throttle",
    "received_bytes": "nbdist.engine.group.links.link_stats",
    # on both sides
    "saved": "nbdist.engine.checkpoint.saved",
    "NBDistError": "nbdist.shared.errors",
    "ClusterError": "nbdist.shared.errors",
    "StartError": "nbdist.shared.errors",
    "UsageError": "nbdist.shared.errors",
    "CellSyntaxError": "nbdist.shared.errors",
    "LayoutError": "nbdist.shared.errors",
    "MismatchError": "nbdist.shared.errors",
    "DataError": "nbdist.shared.errors",
    "CheckpointError": "nbdist.shared.errors",
    "PublishError": "nbdist.shared.errors",
    "TransferError": "nbdist.shared.errors",
    "CheckError": "nbdist.shared.errors",
    "ExpectationError": "nbdist.shared.errors",
    "RankError": "nbdist.shared.errors",
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Register `%dist` and `%%distributed`; called by `%load_ext nbdist`. Starts nothing."""
    from nbdist.client.notebook.imported import require_new_enough

    require_new_enough()
    from nbdist.client.notebook.magics import register
    from nbdist.shared import side

    side.settle("notebook")
    register(shell)
