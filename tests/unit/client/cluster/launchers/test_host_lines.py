"""What `--hosts` means."""

from pathlib import Path

import pytest

from nbdist.client.cluster.launchers.hosts.host_lines import HostLine, read_hosts
from nbdist.shared.errors import UsageError


def test_hosts_are_names_with_a_number_of_ranks() -> None:
    assert read_hosts("a:2,me@b", "ssh") == [HostLine("a", 2), HostLine("me@b", 1)]


def test_a_file_says_more_of_each_host(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# ours\na slots=2 python=/opt/py/bin/python NCCL_DEBUG=INFO\n\nb  # one rank\n"
    )
    assert read_hosts(str(file), "ssh") == [
        HostLine("a", 2, "/opt/py/bin/python", {"NCCL_DEBUG": "INFO"}),
        HostLine("b", 1),
    ]


@pytest.mark.parametrize("line", ["a slots", "a slots=x", "a slots='2", "a b", "-x slots=2"])
def test_a_line_that_makes_no_sense_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(line)
    with pytest.raises(UsageError):
        read_hosts(str(tmp_path / "hosts"), "ssh")


@pytest.mark.parametrize("text", ["", "a:0", "a:x", "a,,b", "-oProxyCommand=x", "a:2,a:1", "a b"])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_hosts(text, "ssh")


def test_a_batch_systems_variable_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nodes").write_text("n1\nn2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert read_hosts("$PBS_NODEFILE", "ssh") == [HostLine("n1", 1), HostLine("n2", 1)]


def test_a_variable_that_is_not_set_is_no_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PBS_NODEFILE", raising=False)
    with pytest.raises(UsageError, match=r"--hosts names \$PBS_NODEFILE, which is not set"):
        read_hosts("$PBS_NODEFILE", "mpi")
