"""What ssh's words mean."""

import pytest

from nbdist.client.cluster.launchers.ssh import explain


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
