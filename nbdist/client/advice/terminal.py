"""`nbdist estimate | advise` in a terminal: models are named `module:function`."""

import importlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from nbdist.client.advice.advise import advise
from nbdist.client.advice.estimate import estimate
from nbdist.client.advice.facts import policy
from nbdist.client.advice.options import PASSING, add_options, options_of
from nbdist.shared.error_text import named
from nbdist.shared.errors import UsageError
from nbdist.shared.options import Parser
from nbdist.study.machine import parse_machine


def run_estimate(words: Sequence[str]) -> None:
    """Print an estimate.

    Raises:
        NBDistError: A word is wrong, or there is no estimate.
    """
    parser = _parser("estimate", "What each rank of a layout would hold and send in a step.")
    parser.add_argument("--layout", default="ddp", help='such as zero3 or "fsdp=8 tp=2" (ddp)')
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="world size (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(cuda)")
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="of the computation")
    parser.add_argument("--checkpoint", action="store_true", help="blocks compute again")
    asked = parser.parse_args(words)
    policies: list[object] = [policy("Precision", asked.precision)] if asked.precision else []
    policies += [policy("ActivationCheckpoint")] if asked.checkpoint else []
    how = {"loss": _loss(asked), "device": asked.device}
    print(estimate(_model(asked), _batch(asked), asked.layout, asked.ranks, *policies, **how))


def run_advise(words: Sequence[str]) -> None:
    """Print advice.

    Raises:
        NBDistError: A word is wrong, or the model's step cannot run without numbers.
    """
    parser = _parser("advise", "Which layout trains a model best on a machine, and why.")
    add_options(parser)
    asked = parser.parse_args(words)
    if asked.on is None:
        raise UsageError(
            "nbdist advise needs a machine.", do='--on "8 h100 nvlink4, 2 hosts ib400"'
        )
    model, batch, loss = _model(asked), _batch(asked), _loss(asked)
    machine = parse_machine(asked.on)
    print(PASSING, file=sys.stderr, flush=True)
    print(advise(model, batch, machine, loss=loss, **options_of(asked)))


def _parser(name: str, about: str) -> ArgumentParser:
    parser = Parser(prog=f"nbdist {name}", description=about)
    parser.add_argument("model", metavar="MODEL", help="module:function that makes the model")
    parser.add_argument(
        "--batch",
        required=True,
        metavar="BATCH",
        help="module:name of a rank's batch, or of a function that makes it",
    )
    parser.add_argument("--loss", metavar="LOSS", help="module:function of (outputs, targets)")
    return parser


def _model(asked: Namespace) -> Any:
    return _load(asked.model)


def _batch(asked: Namespace) -> Any:
    batch = _load(asked.batch)
    if not callable(batch):
        return batch
    try:
        return batch()
    except Exception as error:
        raise UsageError(f"{asked.batch} made no batch: {named(error)}.") from error


def _loss(asked: Namespace) -> Any:
    return _load(asked.loss) if asked.loss else None


def _load(place: str) -> Any:
    """Return what `module:name` names; modules of the current folder are found.

    Raises:
        UsageError: There is none.
    """
    module, colon, name = place.partition(":")
    if not (colon and module and name):
        raise UsageError(
            f'"{place}" names nothing in a module.', do="module:function, such as mymodel:make"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise UsageError(f"The module {module} cannot be imported: {named(error)}.") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f'{module} has no "{name}".')
        found = getattr(found, part)
    return found
