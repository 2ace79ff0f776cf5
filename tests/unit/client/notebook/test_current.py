"""Wrong words of a start are refused before anything is started."""

import atexit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.client.cluster.launchers.base import LaunchOptions
from nbdist.client.cluster.launchers.shared_options import HostsOptions
from nbdist.client.notebook import current
from nbdist.client.notebook.start_options import read_options
from nbdist.shared import background
from nbdist.shared.errors import UsageError


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"n": 0}, "at least 1, not 0"),
        ({"device": "tpu"}, 'device is "cpu" or "cuda", not .tpu'),
        ({"n": 2, "device": "cpu", "backend": "nccl"}, "backend nccl needs device cuda"),
        ({"n": 10**6}, "use at most"),
    ],
)
def test_wrong_words_start_no_process(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], sentence: str
) -> None:
    def start_a_process(*_: object) -> None:
        raise AssertionError("a launcher was made")

    monkeypatch.setattr(current, "_warm_launcher", start_a_process)
    with pytest.raises(UsageError, match=sentence):
        current.start(**asked)


def test_a_start_says_what_each_rank_gets_where_they_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "cores", lambda: 2)
    said: list[str] = []
    for n in (2, 40):
        asked = read_options({"n": n, "device": "cpu"})
        current._options_for({"gpus": 0, "slots": 64}, asked, "127.0.0.1", said.append)
    assert said == ["40 ranks on 2 cores: each gets 1/20 of a core."]


def test_a_gpu_that_is_there_and_cannot_be_used_is_told_with_its_reason() -> None:
    too_old = "The NVIDIA driver on your system is too old (found version 11040)."
    assert current._on_cpu(too_old) == (
        "Ranks run on the CPU, though there is a GPU. The NVIDIA driver is too old for the CUDA "
        "that torch is built for."
    )
    assert current._on_cpu("CUDA did not answer").endswith("GPU. CUDA did not answer.")


def test_a_launcher_is_kept_for_later_starts_with_the_same_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(current, "_launcher", None)
    monkeypatch.setattr(current, "_launcher_for", ("", None))
    made: list[Any] = []

    def make(logs: Path, asked: LaunchOptions[Any]) -> Any:
        made.append(asked.own)
        return SimpleNamespace(alive=True, close=lambda: None, logs=logs)

    for hosts in ("a", "a", "b"):
        asked = LaunchOptions(HostsOptions(hosts=hosts))
        launcher = current._warm_launcher("mine", asked, make, tmp_path)
    atexit.unregister(launcher.close)

    assert [own.hosts for own in made] == ["a", "b"]
