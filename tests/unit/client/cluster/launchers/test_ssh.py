"""What `--hosts` means, and what ssh's words mean."""

from pathlib import Path

import pytest

from nbdist.client.cluster.launchers.ssh import HostLine, explain, read_hosts
from nbdist.errors import UsageError


def test_hosts_are_names_with_a_number_of_ranks() -> None:
    assert read_hosts("a:2,me@b") == [HostLine("a", 2), HostLine("me@b", 1)]


def test_a_file_says_more_of_each_host(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# ours\na slots=2 python=/opt/py/bin/python NCCL_DEBUG=INFO\n\nb  # one rank\n"
    )
    assert read_hosts(str(file)) == [
        HostLine("a", 2, "/opt/py/bin/python", {"NCCL_DEBUG": "INFO"}),
        HostLine("b", 1),
    ]


@pytest.mark.parametrize("line", ["a slots", "a slots=x", "a slots='2", "a b", "-x slots=2"])
def test_a_line_that_makes_no_sense_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(line)
    with pytest.raises(UsageError):
        read_hosts(str(tmp_path / "hosts"))


@pytest.mark.parametrize("text", ["", "a:0", "a:x", "a,,b", "-oProxyCommand=x", "a:2,a:1", "a b"])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_hosts(text)


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("me@b: Permission denied (publickey).", "it refuses your key"),
        ("ssh: connect to host b port 22: Connection refused", "nothing listens for ssh there"),
        ("ssh: Could not resolve hostname b: Name or service not known", "no such name"),
        ("/usr/bin/python3: No module named nbdist", "its Python has no nbdist"),
        ("(ModuleNotFoundError: No module named 'nbdist')", "its Python has no nbdist"),
        ("env: '/opt/python': No such file or directory", "it has no such Python"),
        ("", "its parent process was killed, or its connection ended"),
        ("something else", "something else"),
    ],
)
def test_what_ssh_says_is_told_in_words(said: str, meaning: str) -> None:
    why, do = explain("b", 255, f"a banner\n{said}" if said else "")
    assert why == meaning
    assert do
