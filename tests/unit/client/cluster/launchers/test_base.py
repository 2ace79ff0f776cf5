"""Launchers by name, also those of other packages."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from nbdist.client.cluster.launchers import base
from nbdist.client.cluster.launchers.local import LocalLauncher
from nbdist.errors import UsageError


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Install a package that offers the launcher `ssh`."""
    (tmp_path / "other_launchers.py").write_text("def ssh(logs): return 'ssh', logs\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("ssh", "other_launchers:ssh", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda *, group: EntryPoints([entry]))
    yield
    sys.modules.pop("other_launchers", None)


def test_local_is_always_there() -> None:
    assert base.find_launcher("local") is LocalLauncher


@pytest.mark.usefixtures("offered")
def test_another_package_offers_one_by_its_name(tmp_path: Path) -> None:
    assert base.find_launcher("ssh")(tmp_path) == ("ssh", tmp_path)


@pytest.mark.usefixtures("offered")
def test_a_name_that_nobody_offers_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="There is no launcher 'slurm'") as refused:
        base.find_launcher("slurm")
    assert refused.value.do == "use one of: local, ssh"
