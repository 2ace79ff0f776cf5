"""Launchers by name, also those of other packages."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import pytest

from nbdist.client.cluster.launchers import base, ssh
from nbdist.client.cluster.launchers.batch_systems import IPYPARALLELS
from nbdist.client.cluster.launchers.shared_options import HostsOptions
from nbdist.shared.errors import UsageError


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
    assert base.find_options("ssh") is HostsOptions


@pytest.mark.usefixtures("offered")
def test_a_launcher_may_have_no_options_of_its_own() -> None:
    assert base.find_options("local") is base.find_options("pbs") is base.NoOptions


@pytest.mark.usefixtures("offered")
def test_another_package_offers_one_by_its_name(tmp_path: Path) -> None:
    asked = base.LaunchOptions(base.NoOptions(), n=2)
    assert base.find_launcher("pbs")(tmp_path, asked) == (tmp_path, asked)


@pytest.mark.usefixtures("offered")
def test_a_name_that_nobody_offers_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="There is no launcher 'k8s'") as refused:
        base.find_launcher("k8s")
    assert refused.value.do == "use one of: local, kubernetes, mpi, pbs, slurm, ssh"


OURS = {"local", "ssh", "slurm", "mpi", "kubernetes"}


@pytest.mark.parametrize(
    "name", sorted({entry.name for entry in entry_points(group=IPYPARALLELS)} - OURS)
)
def test_a_launcher_of_ipyparallels_is_refused_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is a launcher of ipyparallel's") as refused:
        base.find_launcher(name)
    assert "starts engines without a channel to the notebook" in refused.value.why
    assert "--launcher ssh" in refused.value.do or "--launcher mpi" in refused.value.do


@pytest.mark.usefixtures("offered")
def test_one_that_is_offered_to_nbdist_wins_over_ipyparallels(tmp_path: Path) -> None:
    asked = base.LaunchOptions(base.NoOptions())
    assert base.find_launcher("pbs")(tmp_path, asked) == (tmp_path, asked)
