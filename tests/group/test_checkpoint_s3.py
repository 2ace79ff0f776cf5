"""Checkpoints in S3, spoken with a server that others have written."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.group import checkpoint_trouble, s3_server
from tests.group.engines import Cluster, cluster
from tests.group.parity_cases import Case
from tests.group.s3_server import Server
from tests.group.test_checkpoint import equal

URL = "s3://bucket/run"
CASE = Case(2, "zero3", model="dropping")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_server.serve(tmp_path_factory.mktemp("s3") / "served") as running:
        yield running


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def test_a_training_goes_on_from_s3_bit_for_bit(ranks: Cluster, server: Server) -> None:
    how = {"storage_options": server.options}
    unbroken = ranks.run(checkpoint_trouble.save_often_and_go_on, URL, CASE, [4, 6, 8], 3, how)
    run = server.folder / "bucket" / "run"
    kept = sorted(path.name for path in run.iterdir())
    assert kept == ["latest", "step-00000006", "step-00000008"]
    assert (run / "latest").read_text() == "step-00000008"

    resumed = ranks.run(checkpoint_trouble.restore_and_go_on, URL, CASE, 3, how)
    for before, after in zip(unbroken, resumed, strict=True):
        assert after["step"] == 8
        assert equal(before, after)


def test_a_file_that_is_gone_from_s3_is_named(ranks: Cluster, server: Server) -> None:
    ranks.engines[0].post(
        checkpoint_trouble.delete, f"{URL}/step-00000008/__1_0.distcp", server.options
    )
    ranks.engines[0].result()
    said = ranks.run(
        checkpoint_trouble.error_of_restore, URL, CASE, {"storage_options": server.options}
    )
    for told in said:
        assert told["error"] == (
            f"CheckpointError: {URL}/step-00000008 is damaged, and nothing was restored from it: "
            "__1_0.distcp is missing (on rank 0).\n"
            "Do:  restore the last good one before it: nbdist.restore(which=6)"
        )
        assert told["is_unchanged"]


def test_a_server_that_does_not_answer_is_told_of(ranks: Cluster) -> None:
    nobody = s3_server.options(s3_server.free_port())
    for what in (checkpoint_trouble.error_of_restore, checkpoint_trouble.error_of_save):
        for told in ranks.run(what, URL, CASE, {"storage_options": nobody}):
            assert told["error"].startswith(f"CheckpointError: {URL} could not be reached or used")
            assert "Could not connect to the endpoint URL" in told["error"]
            assert told["is_unchanged"]


@pytest.mark.slow
def test_a_server_that_dies_in_a_save_has_the_checkpoint_before(
    ranks: Cluster, tmp_path: Path
) -> None:
    with s3_server.serve(tmp_path / "served") as server:
        how = {"storage_options": server.options}
        ranks.run(checkpoint_trouble.save_at, URL, CASE, [1], how)
        said = ranks.run(checkpoint_trouble.error_of_dying_server, URL, CASE, how, server.pid)
    assert said[0] == said[1]
    assert said[0]["error"].startswith(f"CheckpointError: {URL}/step-00000001-2 could not be reac")
    run = server.folder / "bucket" / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000001-2",
    ]
    with s3_server.serve(tmp_path / "served", server.port):
        resumed = ranks.run(checkpoint_trouble.restore_and_go_on, URL, CASE, 1, how)
        assert [one["step"] for one in resumed] == [1, 1]
        ranks.run(checkpoint_trouble.save_at, URL, CASE, [2], how)
    assert sorted(path.name for path in run.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000002",
    ]


@pytest.mark.slow
def test_two_notebooks_that_save_one_step_at_once_never_mix_their_files(server: Server) -> None:
    url, case, how = "s3://bucket/shared", Case(1, "ddp", model="dropping"), server.options
    with cluster(1) as one, cluster(1) as other:
        for notebook, seed in ((one, 1), (other, 2)):
            notebook.run(checkpoint_trouble.hold, case, seed)
        for turn in range(4):
            for notebook in (one, other):
                notebook.post(checkpoint_trouble.save_what_is_held, f"{url}-{turn}", how)
            told = [notebook.results()[0] for notebook in (one, other)]
            refused = [said["error"] for said in told if not said["folder"]]
            saved = [said["folder"] for said in told if said["folder"]]
            assert saved
            assert len(set(saved)) == len(saved)
            for error in refused:
                assert error == (
                    f"CheckpointError: {url}-{turn}/step-00000001 was begun by another process a "
                    "moment ago.\nWhy: another notebook saves to the same name\n"
                    "Do:  give each training a name of its own"
                )
            for notebook, said in zip((one, other), told, strict=True):
                if said["folder"]:
                    (is_whole,) = notebook.run(
                        checkpoint_trouble.is_what_was_held, said["folder"], how
                    )
                    assert is_whole


def test_no_secret_is_in_what_was_said(ranks: Cluster, server: Server) -> None:
    wrong = {**server.options, "secret": "another-secret-that-nobody-may-see"}
    said = ranks.run(checkpoint_trouble.error_of_restore, URL, CASE, {"storage_options": wrong})
    assert all("CheckpointError" in told["error"] for told in said)
    heard = [str(told) for told in said]
    heard += [Path(engine.words.path).read_text() for engine in ranks.engines]
    assert not any("that-nobody-may-see" in text for text in heard)
