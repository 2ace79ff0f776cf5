import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nbdist import doctor
from nbdist.client.cluster.controller import ControllerFolder, remove_orphans
from nbdist.doctor import Finding, machine, network, orphans, software
from nbdist.doctor.orphans import Process
from nbdist.doctor.software import Torch

GOOD_TORCH = Torch("2.13.0", "", (), gloo=True, nccl=False)


def test_a_report_names_what_is_wrong_with_its_mend_and_counts_it() -> None:
    report = doctor.render([Finding("cores", "2"), Finding("torch", "missing", True, "pip it")])

    assert report == ("ok  cores  2\n!!  torch  missing\n           Do: pip it\n1 problem found.")


def test_a_report_without_faults_says_so() -> None:
    assert doctor.render([Finding("cores", "2")]).endswith("\nNothing is wrong.")


@pytest.mark.parametrize(("version", "is_wrong"), [((3, 10, 9), True), ((3, 11, 0), False)])
def test_python_3_11_is_the_oldest_that_passes(
    version: tuple[int, int, int], is_wrong: bool
) -> None:
    assert software.judge_python(version, "python").is_wrong is is_wrong


def test_packages_that_are_missing_or_out_of_range_are_named_with_the_range() -> None:
    requirements = ["psutil>=5.9", "mlflow<4,>=3.5", "numpy>=1.26", "torch>=2.11"]
    installed = {"psutil": "7.2.2", "mlflow": "4.0.1", "torch": "2.13.0+cpu"}

    findings = software.judge_packages("0.1.0", requirements, installed)

    assert [(f.name, f.is_wrong) for f in findings] == [
        ("nbdist", False),
        ("psutil", False),
        ("mlflow", True),
        ("numpy", True),
    ]
    assert findings[2].says == "4.0.1; needs <4,>=3.5"
    assert findings[3].fix.endswith("-m pip install 'numpy>=1.26'")


def test_torch_that_cannot_be_imported_shows_why() -> None:
    (finding,) = software.judge_torch("ImportError: libcudart.so.13", has_gpu=False)

    assert finding.is_wrong
    assert finding.says == "ImportError: libcudart.so.13"


def test_torch_without_gloo_is_wrong_for_ranks_could_not_join() -> None:
    torch = Torch("2.13.0", "", (), gloo=False, nccl=False)

    assert software.judge_torch(torch, has_gpu=False)[0].is_wrong


def test_a_machine_without_gpus_is_fine() -> None:
    assert not any(finding.is_wrong for finding in software.judge_torch(GOOD_TORCH, has_gpu=False))


def test_a_cpu_build_of_torch_beside_a_gpu_is_to_be_mended() -> None:
    _, gpus = software.judge_torch(GOOD_TORCH, has_gpu=True)

    assert gpus.is_wrong
    assert "CUDA build" in gpus.fix


def test_the_64_mib_of_a_container_are_too_little_shared_memory() -> None:
    assert machine.judge_shared_memory((64 << 20, 64 << 20)).is_wrong
    assert not machine.judge_shared_memory((8 << 30, 8 << 30)).is_wrong
    assert not machine.judge_shared_memory(None).is_wrong


def test_a_large_dev_shm_that_is_full_is_too_little_as_well() -> None:
    finding = machine.judge_shared_memory((8 << 30, 1 << 20))
    assert finding.is_wrong
    assert finding.says.startswith("1.0 MB of 8.6 GB free")


def test_memory_disk_and_open_files_are_judged_by_what_ranks_need() -> None:
    here = Path("/here")
    assert machine.judge_memory(500 << 20, 1 << 30).is_wrong
    assert not machine.judge_memory(8 << 30, 16 << 30).is_wrong
    assert machine.judge_disk(here, 10 << 20).is_wrong
    assert machine.judge_disk(here, None).says == "/here cannot be written to"
    assert not machine.judge_disk(here, 10 << 30).is_wrong
    assert machine.judge_descriptors(256).fix.startswith("ulimit -n 4096")
    assert not machine.judge_descriptors(None).is_wrong


def test_what_this_machine_has_is_read_without_an_error(tmp_path: Path) -> None:
    free, limit = machine.look_at_memory()
    assert 0 < free <= limit
    assert (machine.look_at_disk(tmp_path) or 0) > 0
    assert network.look_at_ports(4) == ""
    assert any("127.0.0.1" in found for found in network.look_at_interfaces().values())


def test_an_interface_that_is_not_there_and_waits_that_cannot_be_ended_are_found() -> None:
    environment = {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=eth0:1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "CUDA_LAUNCH_BLOCKING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "detail",
    }
    found = {f.name: f for f in network.judge_settings(environment, ["lo", "eth0"])}
    assert {name for name, f in found.items() if f.is_wrong} == {
        "GLOO_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_DISTRIBUTED_DEBUG",
    }
    assert "overrides" in found["TORCH_NCCL_ENABLE_MONITORING"].says
    (well,) = network.judge_settings({"PATH": "/bin"}, ["lo"])
    assert not well.is_wrong


@pytest.mark.parametrize(
    ("environment", "is_wrong"),
    [
        ({}, False),
        ({"https_proxy": "http://proxy:1"}, False),
        ({"http_proxy": "http://proxy:1"}, True),
        ({"HTTP_PROXY": "http://proxy:1", "no_proxy": "localhost,127.0.0.1"}, False),
        ({"all_proxy": "http://proxy:1", "NO_PROXY": "*"}, False),
    ],
)
def test_a_proxy_must_not_stand_before_this_machine(
    environment: dict[str, str], is_wrong: bool
) -> None:
    assert network.judge_proxies(environment).is_wrong is is_wrong


def test_private_parts_that_are_gone_are_named() -> None:
    assert not software.judge_private_parts([]).is_wrong
    assert "Client._ids is gone" in software.judge_private_parts(["Client._ids is gone"]).says


def test_shared_memory_whose_maker_is_not_here_is_told_and_not_to_be_deleted() -> None:
    ended, alive, other = (Path(f"/dev/shm/{n}") for n in ("torch_5_9_0", "torch_7_9_0", "psm_1"))
    found = orphans.find_shared_leftovers([ended, alive, other], pids=[7])
    assert found == [ended]
    finding = orphans.judge_shared_leftovers(found)
    assert "1 of torch's files" in finding.says
    assert not finding.fix


def make_orphan(temp: Path, port: int) -> Path:
    """Leave a folder with keys as an owner does that is killed, of a controller on `port`."""
    code = (
        "import os\nfrom nbdist.client.cluster.controller import ControllerFolder\n"
        "mine = ControllerFolder()\nprint(mine.path, flush=True)\nos.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "TMPDIR": str(temp)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    folder = Path(ran.stdout.strip())
    (folder / "security").mkdir()
    facts = {"interface": "tcp://127.0.0.1", "registration": port}
    (folder / "security/ipcontroller-nbdist-client.json").write_text(json.dumps(facts))
    return folder


def test_a_folder_with_keys_is_left_over_when_neither_owner_nor_controller_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = ControllerFolder()
    try:
        orphan = make_orphan(tmp_path, port=1)
        assert orphans.look_at_folders(tmp_path) == [orphan]
        facts = orphan / "security/ipcontroller-nbdist-client.json"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            facts.write_text(json.dumps({"interface": "tcp://127.0.0.1", "registration": port}))
            assert orphans.look_at_folders(tmp_path) == []
    finally:
        mine.remove()


def test_folders_that_only_look_like_ours_are_never_named_nor_removed(tmp_path: Path) -> None:
    orphan = make_orphan(tmp_path, port=1)
    mark = (orphan / "owner.lock").read_bytes()
    thesis = tmp_path / "nbdist-my-thesis"
    thesis.mkdir(0o700)
    (thesis / "thesis.py").write_text("x")
    (thesis / "security").mkdir()
    (thesis / "security/my-client.json").write_text("{}")
    locked = tmp_path / "nbdist-locked"
    locked.mkdir(0o700)
    (locked / "owner.lock").write_text("")
    open_to_all = tmp_path / "nbdist-open"
    open_to_all.mkdir(0o755)
    (open_to_all / "owner.lock").write_bytes(mark)
    piped = tmp_path / "nbdist-piped"
    piped.mkdir(0o700)
    os.mkfifo(piped / "owner.lock")
    copy = shutil.copytree(orphan, tmp_path / "nbdist-copy")
    copy.chmod(0o700)
    (tmp_path / "nbdist-link").symlink_to(orphan)
    for folder in (thesis, locked, open_to_all, piped, copy):
        os.utime(folder, (0, 0))

    assert orphans.look_at_folders(tmp_path) == [orphan]
    remove_orphans(tmp_path)
    left = {"my-thesis", "locked", "open", "piped", "copy", "link"}
    assert {path.name for path in tmp_path.iterdir()} == {f"nbdist-{name}" for name in left}


def test_a_name_with_a_space_stays_one_word_for_the_shell() -> None:
    finding = orphans.judge_folders([Path("/tmp/a b/nbdist-1"), Path("/tmp/nbdist-2")])
    assert finding.fix == "rm -r '/tmp/a b/nbdist-1' /tmp/nbdist-2"


def test_loopback_answers_on_this_machine() -> None:
    assert network.look_at_loopback() == ""


KERNEL = Process(10, 1, ("python", "-m", "ipykernel_launcher"))
PARENT = Process(20, 10, ("python", "-m", "nbdist.host.parent", "5", "10", "fork"))
ENGINE = Process(30, 20, PARENT.words)


def test_processes_of_a_living_kernel_are_not_left_over() -> None:
    assert orphans.find_leftovers([KERNEL, PARENT, ENGINE]) == []


def test_a_kernel_that_is_process_1_of_a_container_is_alive() -> None:
    kernel = Process(1, 0, KERNEL.words)
    parent = Process(20, 1, PARENT.words)

    assert orphans.find_leftovers([kernel, parent, ENGINE]) == []


@pytest.mark.parametrize("heir", [(), (Process(1, 0, ("/sbin/init",)),)])
def test_processes_whose_kernel_ended_are_left_over_whoever_inherits_them(
    heir: tuple[Process, ...],
) -> None:
    orphan = Process(20, 1, PARENT.words)

    assert orphans.find_leftovers([*heir, orphan, ENGINE]) == [orphan, ENGINE]
    assert orphans.judge_leftovers([orphan, ENGINE]).fix == "kill -9 20 30"


@pytest.mark.parametrize(
    "words",
    [
        ("vim", "nbdist.host.parent"),
        ("vim", "-m", "nbdist.host.parent", "5", "10", "fork"),
        ("python", "-m", "pytest", "-m", "nbdist.host.parent", "5", "10", "fork"),
        ("python", "-m", "nbdist.host.parents", "5", "10", "fork"),
        ("python", "-m", "nbdist.host.parent"),
        ("python", "-m", "nbdist.host.parent", "5", "x", "fork"),
        ("python", "-m", "nbdist.host.oom", "5", "10", "fork"),
        ("python", "-m", "nbdist.engine.rank.boot", "{}"),
        ("python", "-m", "nbdist.engine.rank.boot", "no json"),
    ],
)
def test_a_process_that_only_looks_like_ours_is_not(words: tuple[str, ...]) -> None:
    assert orphans.find_leftovers([Process(40, 1, words)]) == []


def test_a_fresh_interpreter_names_its_kernel_too() -> None:
    spec = json.dumps({"rank": 0, "kernel_pid": 10})
    rank = Process(30, 1, ("/usr/bin/python3.12", "-m", "nbdist.engine.rank.boot", spec), 5.0)

    assert orphans.find_kernels([rank]) == {10}
    assert orphans.find_leftovers([rank], {}) == [rank]
    assert orphans.find_leftovers([rank], {10: 4.0}) == []


def test_a_kernel_that_goes_by_another_name_is_alive_by_its_number_and_age() -> None:
    kernel = Process(10, 1, ("jupyter-kernel: thesis",), 1.0)
    parent = Process(20, 10, PARENT.words, 2.0)
    engine = Process(30, 20, PARENT.words, 3.0)
    family = [kernel, parent, engine]

    assert orphans.find_leftovers(family, {10: 1.0}) == []
    # Its number was given to another process since.
    assert orphans.find_leftovers([parent, engine], {10: 9.0}) == [parent, engine]


def test_a_zombie_and_a_number_that_nobody_has_were_never_born() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not collected

    assert set(orphans.look_at_births([child.pid, os.getpid()])) == {os.getpid()}
    child.wait()
    assert orphans.look_at_births([child.pid]) == {}


def test_this_process_is_among_those_looked_at() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    with child:
        try:
            seen = {process.pid: process for process in orphans.look_at_processes()}
            assert seen[child.pid].words[1:] == ("-c", "input()")
        finally:
            child.kill()
