"""Folders of weights: straight into shards, back to files that others load, or refused in words."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.group.harness import run_ranks

pytestmark = pytest.mark.timeout(600)

RANKS = "tests.group.pretrained_ranks"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("weights")
    for kind in ("gpt", "conv", "parallel", "stages"):
        run_ranks(1, f"{RANKS}:make_folder", kind, str(home / kind))
    return home


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("gpt", ["ddp", "zero2", "zero3"]),  # tied
        ("conv", ["ddp", "zero3", "pp=2"]),  # with running statistics
        ("parallel", ["tp=2"]),
        ("stages", ["zero1", "tp=2", "pp=2"]),
    ],
)
def test_every_layout_reads_what_the_folder_holds_and_trains(
    folders: Path, kind: str, layouts: list[str]
) -> None:
    for found in run_ranks(2, f"{RANKS}:loaded", kind, str(folders / kind), layouts):
        assert found == dict.fromkeys(found, True)


@pytest.mark.slow
def test_two_axes_read_their_own_parts(folders: Path) -> None:
    layouts = ["fsdp=2 tp=2", "pp=2 fsdp=2", "dp=2 fsdp=2", "dp=2 tp=2"]
    for found in run_ranks(4, f"{RANKS}:loaded", "stages", str(folders / "stages"), layouts):
        assert found == dict.fromkeys(found, True)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak")
def test_no_rank_needs_more_than_its_shard_and_a_third(folders: Path) -> None:
    run_ranks(1, f"{RANKS}:make_folder", "large", str(folders / "large"))
    shutil.copytree(folders / "stages", folders / "large-small")
    for layout in ("zero3", "zero2"):
        for most, shard, _ in run_ranks(
            4, f"{RANKS}:peak", "large", str(folders / "large"), layout
        ):
            assert shard > 20e6
            assert most <= 1.3, layout
    for layout in ("fsdp=2 tp=2", "pp=4"):  # a whole weight at a time, while the plan is proven
        for most, _, _ in run_ranks(4, f"{RANKS}:peak", "large", str(folders / "large"), layout):
            assert most <= 2, layout
    for most, _, _ in run_ranks(2, f"{RANKS}:peak", "large", str(folders / "large"), "ddp"):
        assert most <= 1.3, "each rank reads into its own replica"


@pytest.mark.parametrize("layout", ["zero3", "tp=2", "pp=2"])
def test_a_saved_folder_is_read_by_safetensors_own_library(
    folders: Path, tmp_path: Path, layout: str
) -> None:
    source, target = folders / "stages", tmp_path / "saved"
    names = run_ranks(2, f"{RANKS}:written", "stages", str(source), str(target), layout, 60_000)[0]
    assert names[-1] == "model.safetensors.index.json"
    assert names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
    assert same_as_expected(source, target, "stages")
    again = run_ranks(2, f"{RANKS}:written", "stages", str(target), str(target), "zero3", 1 << 30)
    assert again[0] == ["model.safetensors"], "the former files are gone"
    assert same_as_expected(source, target, "stages")


@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_tied_weights_and_buffers_come_back(folders: Path, tmp_path: Path, kind: str) -> None:
    source, target = folders / kind, tmp_path / "saved"
    run_ranks(2, f"{RANKS}:written", kind, str(source), str(target), "zero3", 1 << 30)
    assert same_as_expected(source, target, kind)


def same_as_expected(source: Path, target: Path, kind: str) -> bool:
    found: bool = run_ranks(1, f"{RANKS}:read_by_others", kind, str(source), str(target))[0]
    return found


def test_what_does_not_fit_is_one_error_in_words_on_every_rank(
    folders: Path, tmp_path: Path
) -> None:
    cases = {}
    for label in ("cut", "gone", "empty", "index", "no json"):
        cases[label] = tmp_path / label
        shutil.copytree(folders / "gpt", cases[label])
    whole = (cases["cut"] / "model.safetensors").read_bytes()
    (cases["cut"] / "model.safetensors").write_bytes(whole[:-100])
    (cases["empty"] / "model.safetensors").unlink()
    (cases["index"] / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"token.weight": "model-00002-of-00002.safetensors"}})
    )
    (cases["no json"] / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"not json!!")
    shutil.rmtree(cases["gone"])
    cases["other"] = folders / "stages"
    found = run_ranks(2, f"{RANKS}:refused", "gpt", {k: str(v) for k, v in cases.items()})
    assert found[0] == found[1]
    words = {
        "cut": "no whole file of safetensors: it has",
        "gone": "There is no folder",
        "empty": "holds neither model.safetensors nor model.safetensors.index.json",
        "index": "model-00002-of-00002.safetensors of 1 files",
        "no json": "its header cannot be read",
        "other": "do not fit the model",
        "two": "got two folders",
        "no weights": "and no folder of weights",
        "a model": "got a Stages where a folder or a function",
        "no config": "has no config.json",
    }
    for label, text in words.items():
        assert found[0][label].startswith("CheckpointError: "), label
        assert text in found[0][label]
    assert "missing" in found[0]["other"]
    assert "not the model's" in found[0]["other"]


def test_a_plan_that_would_compute_something_else_is_refused_before_weights_are_read(
    folders: Path,
) -> None:
    run_ranks(1, f"{RANKS}:make_folder", "normed", str(folders / "normed"))
    for text in run_ranks(2, f"{RANKS}:refused_plan", str(folders / "normed")):
        assert text.startswith("LayoutError: Cutting ")
        assert "changes what the model computes" in text


def test_a_disk_that_fails_is_one_error_and_leaves_what_was_there(
    folders: Path, tmp_path: Path
) -> None:
    target = tmp_path / "saved"
    found = run_ranks(2, f"{RANKS}:unreadable", str(folders / "stages"), str(target))
    assert found[0] == found[1]
    assert "model.safetensors cannot be read: Input/output error (on rank 1)." in found[0]["read"]
    for case in ("write", "index"):
        assert "The weights were not written to" in found[0][case]
        assert "what was there is as it was" in found[0][case]
    assert "The weights were written, but what describes them was not" in found[0]["describe"]
    assert "Not a directory" in found[0]["no folder"]
    assert "odd is torch.complex128, for which files of safetensors" in found[0]["dtype"]
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert same_as_expected(folders / "stages", target, "stages")


def test_stages_give_each_other_weights_of_any_dtype(tmp_path: Path) -> None:
    run_ranks(2, f"{RANKS}:with_an_int16_buffer", str(tmp_path))
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    place = json.loads(data[8 : 8 + length])["blocks.3.order"]
    assert (place["dtype"], place["shape"]) == ("I16", [3])
    first, end = (8 + length + offset for offset in place["data_offsets"])
    assert data[first:end] == bytes([0, 0, 1, 0, 2, 0])


def test_a_new_head_is_made_where_it_is_asked_for(folders: Path, tmp_path: Path) -> None:
    run_ranks(1, f"{RANKS}:without_head", str(folders / "stages"), str(tmp_path / "body"))
    for found in run_ranks(2, f"{RANKS}:new_head", str(tmp_path / "body")):
        assert found["body"]
        assert found["alike"]
        assert found["head"] > 0


@pytest.mark.slow
def test_names_of_an_older_folder_of_transformers_are_translated(tmp_path: Path) -> None:
    pytest.importorskip("transformers.conversion_mapping")
    run_ranks(1, f"{RANKS}:make_vit", str(tmp_path))
    assert run_ranks(2, f"{RANKS}:read_vit", str(tmp_path)) == [True, True]


@pytest.mark.slow
def test_a_folder_of_transformers_is_read_by_its_config_and_written_for_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    logits = run_ranks(1, f"{RANKS}:make_llama", str(tmp_path / "causal"), str(tmp_path / "body"))[
        0
    ]
    layouts = ["zero3", "fsdp=2", "tp=2"]
    every: list[dict[str, Any]] = run_ranks(
        2,
        f"{RANKS}:of_transformers",
        str(tmp_path / "causal"),
        str(tmp_path / "body"),
        str(tmp_path / "saved"),
        layouts,
    )
    for found in every:
        for layout in layouts:
            assert found[layout][0].endswith("LlamaForCausalLM")
            assert found[f"{layout} error"] < 1e-5
        assert found["head"][0] == (3, 32)
        assert found["head"][1] > 0
        assert found["body"] == "embed_tokens.weight"
    for saved, files in (("saved-zero3", 1), ("saved-tp=2", 4)):
        assert len(list((tmp_path / saved).glob("*.safetensors"))) >= files
        assert run_ranks(1, f"{RANKS}:logits_of", str(tmp_path / saved))[0] == logits
