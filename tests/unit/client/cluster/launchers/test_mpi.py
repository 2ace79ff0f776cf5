"""Whose `mpiexec` it is, how it is called, and what its machine files mean."""

from pathlib import Path

import pytest

from nbdist.client.cluster.launchers import mpi


@pytest.mark.parametrize(
    ("version", "flavour"),
    [
        ("mpiexec.openmpi (OpenRTE) 4.1.4", "Open MPI"),
        ("mpiexec (Open MPI) 5.0.11", "Open MPI"),
        ("HYDRA build details:\n    Version: 5.0.2", "Hydra"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "Hydra"),
        ("mpiexec.lsf 10.1", None),
    ],
)
def test_the_flavour_is_read_from_the_version(version: str, flavour: str | None) -> None:
    assert mpi.flavour_of(version) == flavour


def test_a_machine_file_with_a_line_a_slot_counts_them(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("n1\nn1\nn2\n")
    assert [(line.host, line.slots) for line in mpi.read_machines(str(file))] == [
        ("n1", 2),
        ("n2", 1),
    ]


def test_a_machine_file_with_slots_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("n1 slots=4\nn2 slots=4 # the other rack\n")
    assert [(line.host, line.slots) for line in mpi.read_machines(str(file))] == [
        ("n1", 4),
        ("n2", 4),
    ]


def test_grid_engines_file_has_slots_beside_each_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("n1 4 all.q@n1 UNDEFINED\nn2 2 all.q@n2 <NULL>\n")
    monkeypatch.setenv("PE_HOSTFILE", str(tmp_path / "hosts"))
    assert [(line.host, line.slots) for line in mpi.read_machines("$PE_HOSTFILE")] == [
        ("n1", 4),
        ("n2", 2),
    ]


def test_open_mpi_does_not_bind_the_parent_of_all_ranks_to_one_core() -> None:
    words = mpi.mpiexec("Open MPI", "b", "true")
    assert words[words.index("--bind-to") + 1] == "none"
