"""A session on pods, by the official client against a small API server (`api_server.py`)."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lifecycle.api_server import NAMESPACE, ApiServer
from tests.lifecycle.kernels import Notebook, wait_for

START = "%dist start --launcher kubernetes --trust-network --device cpu "
TRAIN = """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.sum().item() for p in model.parameters())
import os
where = os.environ["GROUP_RANK"]
"""
FOR_EVER = """
import pathlib, time
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
while True:
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    pathlib.Path("is-training").touch()
    time.sleep(0.01)
"""
SUM = "x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    addresses = [one for nic in psutil.net_if_addrs().values() for one in nic]
    is_v4 = [a.family == socket.AF_INET and not a.address.startswith("127.") for a in addresses]
    if not any(is_v4):
        pytest.skip("pods meet at an address beside loopback, and this machine has none")
    server = ApiServer(tmp_path_factory.mktemp("api"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def notebook(server: ApiServer, tmp_path: Path) -> Iterator[Notebook]:
    with Notebook(tmp_path, KUBECONFIG=str(server.folder / "kubeconfig")) as kernel:
        kernel.run("%load_ext nbdist")
        yield kernel
    wait_for(lambda: not server.pods, "all pods to end")


@pytest.mark.slow
def test_two_pods_train_as_one_a_lost_one_comes_back_and_stop_leaves_none(
    server: ApiServer, notebook: Notebook
) -> None:
    said = notebook.run(START + "--image train:1 --nodes 2")
    assert "Started 2 ranks on cpu" in said, said
    assert [pod.document["spec"]["containers"][0]["image"] for pod in server.pods.values()] == [
        "train:1",
        "train:1",
    ]
    notebook.on_ranks(TRAIN, "--no-track")
    assert "1 ['0', '1']" in notebook.run(
        "%dist pull total where\nprint(len(set(total)), sorted(where))"
    )
    server.kill(min(server.pods))
    assert "lost" in notebook.on_ranks("dist.barrier()")
    said = notebook.run("%dist scale 2")
    assert "is back" in said, said
    assert "3.0" in notebook.on_ranks(SUM)
    assert "Stopped" in notebook.run("%dist stop")
    wait_for(lambda: not server.pods, "the pods to end")
    assert f"DELETE /apis/batch/v1/namespaces/{NAMESPACE}/jobs/" in " ".join(server.seen)


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_no_pods(server: ApiServer, notebook: Notebook) -> None:
    assert "Started" in notebook.run(START + "--image train:1 -n 2")
    assert len(server.pods) == 1
    processes = [process for pod in server.pods.values() for process in pod.execs]
    os.kill(notebook.pid, signal.SIGKILL)
    wait_for(lambda: not server.pods and not server.jobs, "the pods to end")
    wait_for(lambda: all(not psutil.pid_exists(p.pid) for p in processes), "the ranks to end")


@pytest.mark.slow
def test_pods_of_a_machine_that_dies_end_by_themselves_when_their_lease_is_over(
    server: ApiServer, notebook: Notebook
) -> None:
    assert "Started" in notebook.run(START + "--image train:1 -n 2")
    pods = list(server.pods.values())
    kernel = psutil.Process(notebook.pid)
    machine = [kernel, *kernel.children(recursive=True)]
    asked = len(server.seen)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees another's end
        for process in machine:
            process.send_signal(number)
    server.hurry()
    wait_for(lambda: not server.pods and not server.jobs, "the pods to end")
    assert [pod.process.wait(10) for pod in pods if pod.process] == [0]
    assert not [one for one in server.seen[asked:] if one.startswith("DELETE")]
    ranks = [process for pod in pods for process in pod.execs]
    wait_for(lambda: all(not psutil.pid_exists(p.pid) for p in ranks), "the ranks to end")


@pytest.mark.slow
def test_an_evicted_pod_tells_its_ranks_and_their_training_is_saved(
    server: ApiServer, notebook: Notebook
) -> None:
    said = notebook.run(START + "--image train:1 --nodes 2")
    assert "Started 2 ranks on cpu" in said, said
    evicted = min(server.pods)
    is_training = notebook.folder / "is-training"

    def evict() -> None:
        wait_for(is_training.exists, "the training")
        server.evict(evicted)

    (other := threading.Thread(target=evict)).start()
    said = notebook.run("%%distributed --checkpoint every=100000\n" + FOR_EVER)
    other.join()
    pod = evicted.rpartition("-")[0]  # a host's name is the same for the pod that follows
    told = f"Kubernetes ends pod {pod}. The training was saved, and the cell was stopped."
    assert told in said, said
    found = re.search(r"step \d+ is in (\S+)\.$", said, re.MULTILINE)
    assert found is not None, said
    assert Path(found[1], "checkpoint.json").exists()  # which commits it
    assert len(server.pods) == 3  # the one that leaves, and who takes its place
    assert "Stopped" in notebook.run("%dist stop")


@pytest.mark.slow
def test_what_kubernetes_refuses_is_told_in_a_sentence_and_leaves_nothing(
    server: ApiServer, notebook: Notebook
) -> None:
    said = notebook.run(START + "--image missing:1")
    assert_says(said, "cannot start: its image cannot be pulled.*missing:1: not found")
    server.forbids = "jobs"
    try:
        assert_says(notebook.run(START + "--image a:1"), "does not allow you this.*is forbidden")
    finally:
        server.forbids = ""
    wait_for(lambda: not server.pods, "nothing to be left")


def assert_says(said: str, pattern: str) -> None:
    assert re.search(pattern, said, re.DOTALL), said
