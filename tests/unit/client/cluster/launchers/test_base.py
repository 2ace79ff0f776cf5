"""Launchers by name, also those of other packages."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from nbdist.client.cluster.launchers import base, ssh
from nbdist.errors import UsageError


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Install a package that offers the launcher `pbs`."""
    (tmp_path / "other_launchers.py").write_text("def pbs(logs, asked): return logs, asked\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("pbs", "other_launchers:pbs", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda *, group: EntryPoints([entry]))
    yield
    sys.modules.pop("other_launchers", None)


def test_hosts_over_ssh_are_always_there() -> None:
    assert base.find_launcher("ssh") is ssh.make_launcher


@pytest.mark.usefixtures("offered")
def test_another_package_offers_one_by_its_name(tmp_path: Path) -> None:
    asked = base.LaunchOptions(hosts="a:2")
    assert base.find_launcher("pbs")(tmp_path, asked) == (tmp_path, asked)


@pytest.mark.usefixtures("offered")
def test_a_name_that_nobody_offers_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="There is no launcher 'lsf'") as refused:
        base.find_launcher("lsf")
    assert refused.value.do == "use one of: local, mpi, pbs, slurm, ssh"
