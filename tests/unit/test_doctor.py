import subprocess
import sys

import pytest

from nbdist import doctor
from nbdist.doctor import Finding, Process, Torch

GOOD_TORCH = Torch("2.13.0", "", (), gloo=True, nccl=False)


def test_a_report_names_what_is_wrong_with_its_mend_and_counts_it() -> None:
    report = doctor.render([Finding("cores", "2"), Finding("torch", "missing", True, "pip it")])

    assert report == ("ok  cores  2\n!!  torch  missing\n           Do: pip it\n1 thing to mend.")


def test_a_report_without_faults_says_so() -> None:
    assert doctor.render([Finding("cores", "2")]).endswith("\nNothing is wrong.")


@pytest.mark.parametrize(("version", "is_wrong"), [((3, 10, 9), True), ((3, 11, 0), False)])
def test_python_3_11_is_the_oldest_that_passes(
    version: tuple[int, int, int], is_wrong: bool
) -> None:
    assert doctor.judge_python(version, "python").is_wrong is is_wrong


def test_packages_that_are_missing_or_out_of_range_are_named_with_the_range() -> None:
    requirements = ["psutil>=5.9", "mlflow<4,>=3.5", "numpy>=1.26", "torch>=2.11"]
    installed = {"psutil": "7.2.2", "mlflow": "4.0.1", "torch": "2.13.0+cpu"}

    findings = doctor.judge_packages("0.1.0", requirements, installed)

    assert [(f.name, f.is_wrong) for f in findings] == [
        ("nbdist", False),
        ("psutil", False),
        ("mlflow", True),
        ("numpy", True),
    ]
    assert findings[2].says == "4.0.1; needs <4,>=3.5"
    assert findings[3].mend.endswith("-m pip install 'numpy>=1.26'")


def test_torch_that_cannot_be_imported_shows_why() -> None:
    (finding,) = doctor.judge_torch("ImportError: libcudart.so.13", has_gpu=False)

    assert finding.is_wrong
    assert finding.says == "ImportError: libcudart.so.13"


def test_torch_without_gloo_is_wrong_for_ranks_could_not_join() -> None:
    torch = Torch("2.13.0", "", (), gloo=False, nccl=False)

    assert doctor.judge_torch(torch, has_gpu=False)[0].is_wrong


def test_a_machine_without_gpus_is_fine() -> None:
    assert not any(finding.is_wrong for finding in doctor.judge_torch(GOOD_TORCH, has_gpu=False))


def test_a_cpu_build_of_torch_beside_a_gpu_is_to_be_mended() -> None:
    _, gpus = doctor.judge_torch(GOOD_TORCH, has_gpu=True)

    assert gpus.is_wrong
    assert "CUDA build" in gpus.mend


def test_the_64_mib_of_a_container_are_too_little_shared_memory() -> None:
    assert doctor.judge_shared_memory(64 << 20).is_wrong
    assert not doctor.judge_shared_memory(8 << 30).is_wrong
    assert not doctor.judge_shared_memory(None).is_wrong


def test_loopback_answers_on_this_machine() -> None:
    assert doctor.look_at_loopback() == ""


KERNEL = Process(10, 1, ("python", "-m", "ipykernel_launcher"))
PARENT = Process(20, 10, ("python", "-m", "nbdist.host.parent", "5", "10", "fork"))
ENGINE = Process(30, 20, PARENT.words)


def test_processes_of_a_living_kernel_are_not_left_over() -> None:
    assert doctor.find_leftovers([KERNEL, PARENT, ENGINE]) == []


def test_a_kernel_that_is_process_1_of_a_container_is_alive() -> None:
    kernel = Process(1, 0, KERNEL.words)
    parent = Process(20, 1, PARENT.words)

    assert doctor.find_leftovers([kernel, parent, ENGINE]) == []


@pytest.mark.parametrize("heir", [(), (Process(1, 0, ("/sbin/init",)),)])
def test_processes_whose_kernel_ended_are_left_over_whoever_inherits_them(
    heir: tuple[Process, ...],
) -> None:
    orphan = Process(20, 1, PARENT.words)

    assert doctor.find_leftovers([*heir, orphan, ENGINE]) == [orphan, ENGINE]
    assert doctor.judge_leftovers([orphan, ENGINE]).mend == "kill -9 20 30"


def test_a_process_that_only_mentions_nbdist_is_not_ours() -> None:
    editor = Process(40, 1, ("vim", "nbdist.host.parent"))

    assert doctor.find_leftovers([editor]) == []


def test_this_process_is_among_those_looked_at() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    with child:
        try:
            seen = {process.pid: process for process in doctor.look_at_processes()}
            assert seen[child.pid].words[1:] == ("-c", "input()")
        finally:
            child.kill()
