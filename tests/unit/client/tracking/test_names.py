"""Names that MLflow takes and people can compare."""

import pytest

from nbdist.client.tracking.hiding import HIDDEN
from nbdist.client.tracking.names import (
    merge_facts,
    metric_name,
    params_of,
    rank_metric,
    run_name,
)


def test_a_run_is_named_by_what_differs() -> None:
    assert run_name("MLP", "ddp", 2, {"lr": 0.03}) == "MLP-ddp-w2-lr0.03"
    assert run_name("MLP, Judge", "fsdp=2 tp=2", 4, {}) == "MLP-Judge-fsdp2-tp2-w4"
    assert run_name("", "", 1, {"note": "x" * 50}) == "w1"


def test_ranks_are_padded_so_that_they_sort() -> None:
    assert rank_metric("loss", 3) == "rank_loss/03"


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("loss", "loss"),
        ("top-5 acc", "top-5 acc"),
        ("größe", "gr__e"),
        ("a//b", "a/b"),
        ("/x/", "x"),
        ("../x", "_/x"),
        ("", "_"),
        (".", "_"),
        ("k" * 300, "k" * 250),
    ],
)
def test_a_metrics_name_becomes_one_mlflow_takes(name: str, clean: str) -> None:
    assert metric_name(name) == clean


@pytest.mark.parametrize(
    "key", ["api_key", "HF_TOKEN", "token", "db_password", "aws_secret", "github_token_x"]
)
def test_a_param_that_is_called_a_secret_is_hidden(key: str) -> None:
    assert params_of({key: "value"}) == {key: HIDDEN}


@pytest.mark.parametrize("key", ["tokens", "max_tokens", "author_weight", "tokenizer", "lr"])
def test_a_param_that_only_sounds_like_one_is_shown(key: str) -> None:
    assert params_of({key: 5}) == {key: "5"}


def test_facts_that_differ_name_every_answer_once() -> None:
    facts = merge_facts([{"layout": "ddp", "host": "a"}, {"layout": "ddp", "host": "b"}])
    assert facts == {"layout": "ddp", "host": "a, b"}
