"""What Kubernetes is asked for, by its own schemas; and the shell that waits in its pods."""

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nbdist.client.cluster.launchers import kubernetes_manifest as manifest
from nbdist.client.cluster.launchers.base import LaunchOptions
from nbdist.client.cluster.launchers.kubernetes_manifest import Options
from nbdist.shared.errors import UsageError
from tests.groups import ROOT

EXAMPLES = ROOT / "docs" / "kubernetes"
TEMPLATE: dict[str, Any] = {
    "metadata": {"name": "mine", "labels": {"team": "vision"}},
    "spec": {
        "containers": [
            {
                "name": "train",
                "image": "registry/train:2",
                "command": ["jupyter", "lab"],
                "resources": {"requests": {"cpu": "6", "memory": "32Gi"}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
            {"name": "sidecar", "image": "registry/logs:1"},
        ],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
}
SMALL = manifest.read_request(LaunchOptions(Options(image="a:1"), n=2), {})
LARGE = manifest.read_request(
    LaunchOptions(Options(nodes=3, gpus_per_node=4, time="1-12", image="b:1")), TEMPLATE
)


@pytest.mark.parametrize("version", ["1.28", "1.33", "1.36"])
@pytest.mark.parametrize("request_", [SMALL, LARGE], ids=["small", "large"])
def test_the_job_is_valid_by_the_schemas_of_kubernetes(
    request_: manifest.PodRequest, version: str
) -> None:
    job = manifest.job(manifest.job_name("Mein Notebook", "0a1b2c"), request_)
    kubernetes_validate.validate(job, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job | {"spec": {"completion": 2}}, version, strict=True)


def test_ranks_without_nodes_share_one_pod_and_gpus_are_ranks() -> None:
    assert (SMALL.pods, SMALL.slots, SMALL.gpus) == (1, 2, 0)
    assert (LARGE.pods, LARGE.slots, LARGE.gpus) == (3, 4, 4)
    assert manifest.read_request(LaunchOptions(Options(image="a", nodes=2), n=5), {}).slots == 3


def test_the_persons_pod_keeps_what_it_says_but_its_command_and_name() -> None:
    spec = manifest.job("nbdist-a-1", LARGE)["spec"]
    assert spec["activeDeadlineSeconds"] == 129_600
    pod = spec["template"]
    first, sidecar = pod["spec"]["containers"]
    assert "name" not in pod["metadata"]
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert first["image"] == "b:1"
    assert first["command"] == ["sh", "-c", manifest.WAIT]
    assert first["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert first["resources"]["requests"] == {"cpu": "6", "memory": "32Gi"}
    assert [mount["mountPath"] for mount in first["volumeMounts"]] == ["/data", "/dev/shm"]
    assert pod["spec"]["tolerations"] == TEMPLATE["spec"]["tolerations"]
    assert sidecar == TEMPLATE["spec"]["containers"][1]
    assert TEMPLATE["spec"]["containers"][0]["command"] == ["jupyter", "lab"]  # not changed


def test_the_name_tells_the_notebook_and_is_one_of_dns() -> None:
    assert manifest.job_name("Mein Notebook (2)", "0a1b2c") == "nbdist-mein-notebook-2-0a1b2c"
    assert manifest.job_name("…", "0a1b2c") == "nbdist-notebook-0a1b2c"
    assert len(manifest.job_name("x" * 99, "0a1b2c")) < 50


@pytest.mark.parametrize(
    ("asked", "template", "says"),
    [
        ({}, {}, "needs an image"),
        ({}, {"spec": {"containers": [{"name": "a"}]}}, "needs an image"),
        ({"image": "a:1", "nodes": 0}, {}, "nodes must be at least 1, not 0"),
        ({"image": "a:1", "time": "never"}, {}, "2:00:00, not 'never'"),
        ({"image": "a:1"}, {"containers": []}, "`spec:` is missing"),
    ],
)
def test_options_without_sense_are_refused(
    asked: dict[str, Any], template: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        manifest.read_request(LaunchOptions(Options(**asked)), template)


def test_a_pod_that_no_parent_comes_to_ends_by_itself(tmp_path: Path) -> None:
    wait = manifest.WAIT.replace(str(manifest.LEASE_S), "1")
    done = subprocess.run(["sh", "-c", wait], env={"TMPDIR": str(tmp_path)}, timeout=30)
    assert done.returncode == 0


def test_a_pod_passes_the_notice_on_and_ends_after_its_parent(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        ["sh", "-c", 'trap "touch $TMPDIR/noticed; exit" TERM; echo; while :; do sleep 0.1; done'],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    parent.stdout.readline()  # its trap is set
    (tmp_path / "nbdist-parent").write_text(str(parent.pid))
    pod = subprocess.Popen(
        ["sh", "-c", f"{manifest.WAIT.replace('left=', 'echo; left=', 1)}"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert pod.stdout is not None
    pod.stdout.readline()
    pod.terminate()
    assert parent.wait(30) == 0
    assert (tmp_path / "noticed").exists()
    assert pod.wait(30) == 143
    parent.stdout.close()
    pod.stdout.close()


@pytest.mark.parametrize("name", ["role.yaml", "notebook.yaml"])
def test_the_manifests_of_the_documentation_are_valid(name: str) -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_the_pod_of_the_documentation_is_one_that_a_job_can_have() -> None:
    template = yaml.safe_load((EXAMPLES / "pod.yaml").read_text())
    job = manifest.job(
        "nbdist-a-1", manifest.read_request(LaunchOptions(Options(nodes=2)), template)
    )
    kubernetes_validate.validate(job, "1.33", strict=True)


def test_a_parent_that_could_not_be_found_by_its_pod_does_not_begin() -> None:
    shell = ["sh", "-c", manifest.PARENT.replace("exec $p", "echo begun; exec $p")]
    done = subprocess.run(shell, env={"TMPDIR": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "/nowhere/nbdist-parent" in done.stderr
