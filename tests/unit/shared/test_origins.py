"""Whose code a file holds is told by where packages lie, whatever people call their folders."""

import os
import sysconfig
from pathlib import Path

import ipykernel
import pytest
import torch

import nbdist
from nbdist.shared import origins

NBDIST = os.path.dirname(nbdist.__file__)
TORCH = os.path.dirname(torch.__file__)


@pytest.mark.parametrize("package", ["nbdist", "torch"])
def test_a_package_is_known_by_its_folder_and_not_by_a_name_in_a_path(package: str) -> None:
    folder = {"nbdist": NBDIST, "torch": TORCH}[package]
    assert origins.is_of(f"{folder}/engine/kernel/location.py", package)
    assert origins.is_of(f"{folder}/__init__.py", "numpy", package)
    # A checkout, someone's own folder, a neighbour whose name begins alike.
    assert not origins.is_of(f"{Path(folder).parent}/train.py", package)
    assert not origins.is_of(f"/home/me/{package}/engine/train.py", package)
    assert not origins.is_of(f"/home/me/{package}/train.py", package)
    assert not origins.is_of(f"{folder}_of_mine/train.py", package)
    assert not origins.is_of(f"{folder}.py", package)


def test_a_package_that_is_not_installed_has_no_files() -> None:
    assert not origins.is_of("/home/me/train.py", "no_such_package_here")


def test_a_file_is_known_below_the_home_folder_as_tracebacks_write_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", os.path.dirname(NBDIST))
    origins.is_of.cache_clear()
    assert origins.is_of("~/nbdist/engine/kernel/location.py", "nbdist")
    assert not origins.is_of("~/train.py", "nbdist")


def test_what_is_installed_is_a_library_and_a_folder_of_that_name_is_not() -> None:
    assert origins.is_library(ipykernel.__file__)
    assert origins.is_library(os.__file__)
    assert origins.is_library(f"{sysconfig.get_path('stdlib')}/contextlib.py")
    assert origins.is_library("<frozen importlib._bootstrap>")
    assert not origins.is_library("/home/me/site-packages/train.py")
    assert not origins.is_library("/home/me/lib/python3.11/train.py")
    assert not origins.is_library(f"{Path(NBDIST).parent}/train.py")


def test_what_pip_has_put_anywhere_is_a_library_but_not_where_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target/vision-1.0.dist-info", "target/vision", "mine/vision-1.0.dist-info"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert origins.is_library(f"{tmp_path}/target/vision/_meta.py")
    assert origins.is_library(f"{tmp_path}/target/alone.py")
    assert not origins.is_library(f"{tmp_path}/mine/train.py")
    assert not origins.is_library(f"{tmp_path}/train.py")


def test_cells_are_known_by_the_names_that_ipython_and_ipykernel_give_them() -> None:
    assert origins.is_cell("/tmp/ipykernel_nbdist/0a1b2c3d4e.py")
    assert origins.is_cell("/tmp/ipykernel_4711/1234567890.py")  # pushed from the notebook
    assert origins.is_cell("<ipython-input-1-abc>")
    assert not origins.is_cell("/home/me/ipykernel_experiments/train.py")
    assert not origins.is_cell("/home/me/ipykernel_4711/models/train.py")
    assert not origins.is_cell("/home/me/train.py")
