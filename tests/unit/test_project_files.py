"""The files that describe the project agree with each other."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from nbval.plugin import get_sanitize_patterns
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]


def requirements(words: list[str]) -> dict[str, str]:
    parsed = map(Requirement, words)
    return {canonicalize_name(r.name): str(r.specifier) for r in parsed}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pairs}


def test_conda_users_get_what_pip_users_get(project: dict[str, Any]) -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    plain = [word for word in environment["dependencies"] if isinstance(word, str)]
    conda = requirements(plain)

    wanted = requirements(project["dependencies"] + project["optional-dependencies"]["notebooks"])
    assert conda.pop("python") == project["requires-python"]
    assert conda.pop("pip") == ""
    assert conda == {CONDA_NAMES.get(name, name): bounds for name, bounds in wanted.items()}
    assert {"pip": ["-e ."]} in environment["dependencies"]


def test_every_requirement_is_pinned_to_a_version_it_allows(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"].values()
    pinned = pins("constraints.txt") | pins("constraints-torch.txt")
    heavy = pins("constraints-thirdparty.txt")
    assert not heavy.keys() & pinned.keys()
    pinned |= heavy

    for word in [*project["dependencies"], *(word for extra in extras for word in extra)]:
        requirement = Requirement(word)
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{word} is pinned to {version}"


def test_constraints_name_versions_alone_and_leave_torch_to_its_own_file() -> None:
    files = sorted(file.name for file in ROOT.glob("constraints*.txt"))
    assert len(files) == 4
    for name in files:
        for version in pins(name).values():
            assert Version(version).local is None
    assert "torch" not in pins("constraints.txt")
    assert list(pins("constraints-torch.txt")) == ["torch"]


def test_every_tool_of_job_files_is_pinned() -> None:
    pinned = pins("constraints-jobs.txt").keys() | pins("constraints-torch.txt").keys()
    tools = (ROOT / "tests" / "jobs" / "requirements.txt").read_text().splitlines()
    assert {canonicalize_name(Requirement(word).name) for word in tools} <= pinned


def test_the_readme_is_what_package_indexes_show(project: dict[str, Any]) -> None:
    exists = (ROOT / "README.md").exists()

    assert project.get("readme") == ("README.md" if exists else None)


def sanitize(text: str) -> str:
    """Apply the shipped sanitizer as nbval does: section by section, in the file's order."""
    patterns = get_sanitize_patterns((ROOT / "nbdist" / "nbval_sanitize.cfg").read_text())
    for regex, replacement in patterns:
        text = re.sub(regex, replacement, text)
    return text


@pytest.mark.parametrize(
    ("shown", "compared"),
    [
        ("rank 0 pid 4711, rank 1 pid=4712", "rank 0 pid PID, rank 1 pid=PID"),
        ("MLflow UI: http://127.0.0.1:40123/#/runs", "MLflow UI: http://127.0.0.1:PORT/#/runs"),
        ("MASTER_PORT: 29500, port 29501", "MASTER_PORT: 29500, port PORT"),
        ("<Net object at 0x7f3a2b1c0d10>", "<Net object at 0xADDRESS>"),
        ("kept in /home/ada/work/.nbdist/logs/out.txt", "kept in .nbdist/logs/out.txt"),
        ("open /tmp/nbdist-x1/key.", "open TMP_PATH"),
        ("/home/ada/.venv/lib/python3.11/site-packages/torch/x.py", "site-packages/torch/x.py"),
        ("run 0123456789abcdef0123456789abcdef ended", "run RUN_ID ended"),
        ("loss 0.123456 on ranks 0-3", "loss 0.123456 on ranks 0-3"),
        ("4 ranks on 2 cores: each gets 1/2 of a core.\nStarted 4 ranks.", "Started 4 ranks."),
        (
            2 * "Waiting for torch's import: 15 s so far (interrupt to give up).\n" + "Started.",
            "Started.",
        ),
        ("loss < 0.3 holds: loss is 0.2 at step 9.", "loss < 0.3 holds."),
        (
            '<div>x</div><details class="nbdist-numbers"><td>0.3</td>\n</details> y',
            "<div>x</div> y",
        ),
        (
            "  rank 0 (loss 0.2511): every output; rank 1 (loss nan): 0 (Log)",
            "  rank 0 (loss NUMBER): every output; rank 1 (loss nan): 0 (Log)",
        ),
    ],
)
def test_the_sanitizer_hides_what_differs_between_runs_and_nothing_else(
    shown: str, compared: str
) -> None:
    assert sanitize(shown) == compared


def test_nobody_is_told_to_install_from_an_index_what_no_index_has_before_a_release() -> None:
    told = re.compile(r"pip install (?:-\S+ )*['\"]?nbdist\b|nbdist\[[a-z]")
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
    files += (ROOT / "nbdist").rglob("*.py")
    assert [str(file) for file in files if told.search(file.read_text())] == []


def test_the_reference_names_each_variable_that_is_the_users_to_set() -> None:
    read, given = set[str](), set[str]()
    for file in (ROOT / "nbdist").rglob("*.py"):
        text = file.read_text()
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"(NBDIST_\w+)", text))
        given |= set(re.findall(r"\"(NBDIST_\w+)\":", text))  # by nbdist, to what it starts
    reference = (ROOT / "docs/reference/configuration.md").read_text()
    told = set(re.findall(r"NBDIST_\w+", reference))
    assert told == read - (given - told)
    assert told


def test_jupyterlabs_part_is_of_this_version_and_where_jupyterlab_looks() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        whole = tomllib.load(file)
    package = json.loads((ROOT / "nbdist/labextension/package.json").read_text())
    shared = whole["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]

    assert package["name"] == "nbdist"
    assert package["version"] == whole["project"]["version"]
    assert shared == {"nbdist/labextension": "share/jupyter/labextensions/nbdist"}
    assert (ROOT / "nbdist/labextension" / package["jupyterlab"]["_build"]["load"]).is_file()
