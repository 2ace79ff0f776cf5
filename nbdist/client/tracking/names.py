"""Name things the way MLflow accepts and people can compare: metrics, params, runs.

Ranks are padded (`rank_loss/00`), for MLflow's cards sort as text. Units ride in the names.
Limits of MLflow 3 (mlflow/utils/validation.py): keys of 250 characters, params of 6000.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping

from nbdist.client.tracking.hiding import HIDDEN, hide_secrets, sounds_secret

KEY_LENGTH = 250
VALUE_LENGTH = 1000
RUN_NAME_LENGTH = 80

_ILLEGAL = re.compile(r"[^\w.\-/ :]", re.ASCII)


def metric_name(name: str) -> str:
    """Return `name` as MLflow takes it: illegal characters become `_`, at most 250 of them."""
    clean = _ILLEGAL.sub("_", name).strip().strip("/")[:KEY_LENGTH].rstrip()
    # MLflow refuses names that a path would read differently, such as "a//b" or "../a".
    clean = posixpath.normpath(clean) if clean else "_"
    return clean.replace("..", "_") if clean != "." else "_"


def rank_metric(quantity: str, rank: int) -> str:
    """Return the name of a rank's series: `rank_metric("loss", 3)` is `rank_loss/03`."""
    return f"rank_{quantity}/{rank:02d}"


def asked_name(name: str) -> str:
    """Return a run's name that people gave: one line, not too long, without secrets."""
    return hide_secrets(" ".join(name.split()))[:RUN_NAME_LENGTH].strip()


def params_of(values: Mapping[str, object]) -> dict[str, str]:
    """Return `values` as MLflow params: text, cut to 1000 characters, secrets hidden."""
    return {
        metric_name(key): HIDDEN if sounds_secret(key) else _short(value)
        for key, value in values.items()
    }


def _short(value: object) -> str:
    text = hide_secrets(f"{value:g}" if isinstance(value, float) else str(value))
    return text if len(text) <= VALUE_LENGTH else text[: VALUE_LENGTH - 1] + "…"


def merge_facts(facts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return one value a fact: what all ranks say, or their different answers in rank order."""
    answers: dict[str, list[str]] = {}
    for of_rank in facts:
        for key, value in of_rank.items():
            known = answers.setdefault(key, [])
            if value not in known:
                known.append(value)
    return {key: ", ".join(values) for key, values in answers.items()}


def run_name(model: str, layout: str, world_size: int, params: Mapping[str, object]) -> str:
    """Return a name that says what differs from other runs, as `MLP-ddp-w2-lr0.03`.

    The name is the text of the legend in MLflow's charts, so it stays short and has no spaces.
    """
    parts = [model, layout.replace("=", ""), f"w{world_size}", run_name_of(params)]
    return "-".join(_plain(part) for part in parts if part)[:RUN_NAME_LENGTH].strip("-")


def run_name_of(params: Mapping[str, object]) -> str:
    """Return a run's name that tells its params alone, as `lr0.001`; for one of a sweep's runs."""
    texts = params_of(params).items()
    parts = [f"{key}{value}" for key, value in texts if value != HIDDEN and len(value) <= 20]
    return _plain("-".join(parts))[:RUN_NAME_LENGTH].strip("-")


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+]+", "-", text).strip("-")
