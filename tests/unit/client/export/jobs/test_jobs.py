"""Job files by themselves. `tests/jobs` has what each tool says of its own."""

import ast
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nbdist.client.export.jobs import FORMATS, Job, files
from nbdist.client.export.jobs.sagemaker import _FIND_NODE as SAGEMAKER_NODE
from nbdist.client.export.jobs.vertex import _FIND_NODE as VERTEX_NODE
from nbdist.shared.errors import UsageError
from nbdist.shared.options import HASH_SEED

SMALL = Job("train.py", 2)
LARGE = Job(
    "my-train.py",
    4,
    nodes=2,
    device="cuda",
    name="Größe 1",
    modules=("model.py", "data/rows.py"),
    arguments=("--lr", "1e-3", "it's"),
    packages=("nbdist", "torchmetrics>=1"),
    environment={"MODE": "a b"},
    time_limit="1-12:30",
    image="registry/image:1",
    cores_per_rank=8,
    memory_gib=64,
    partition="gpu",
    sbatch=("--qos=high", "#SBATCH --exclusive"),
    before=("module load cuda",),
)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-00:00:05", 86_405),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(written: str, seconds: int) -> None:
    assert Job("train.py", 1, time_limit=written).time_limit_s == seconds


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"script": "train.ipynb"}, "'train.ipynb'"),
        ({"script": "src/train.py"}, "lies beside"),
        ({"script": "my train.py"}, "no name that all"),
        ({"modules": ("../model.py",)}, r"needs \.\./model.py, which does not lie beside it"),
        ({"modules": ("/tmp/model.py",)}, "needs /tmp/model.py, which"),
        ({"modules": ("data/..",)}, "not all tools take"),
        ({"ranks_per_node": 0}, "ranks a node, not 0"),
        ({"nodes": 0}, "nodes, not 0"),
        ({"device": "tpu"}, "cpu or cuda, not 'tpu'"),
        ({"time_limit": "tomorrow"}, "'tomorrow' is no time limit"),
        ({"time_limit": "0"}, "'0' is no time limit"),
    ],
)
def test_a_job_that_nothing_could_run_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Job(**({"script": "train.py", "ranks_per_node": 2} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "slug"),
    [("", "train"), ("Größe 1", "gr-e-1"), ("3d_net", "job-3d-net"), ("-" * 99, "job")],
)
def test_a_name_becomes_one_that_all_tools_take(name: str, slug: str) -> None:
    assert Job("train.py", 1, name=name).name == slug


def test_a_format_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"'pbs'.*sbatch, trainjob, skypilot, ray, spark"):
        files("pbs", SMALL)


@pytest.mark.parametrize("job", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_files_of_each_format_can_be_read_and_name_the_script(format: str, job: Job) -> None:
    made = files(format, job)
    assert any(job.script in text for text in made.values())
    for name, text in made.items():
        assert name.startswith(job.stem)
        assert name != job.script
        if name.endswith(".py"):
            ast.parse(text)
        elif name.endswith(".yaml"):
            assert yaml.safe_load(text)
        else:
            subprocess.run(["bash", "-n"], input=text.encode(), check=True)


@pytest.mark.parametrize("format", FORMATS)
def test_ranks_of_each_format_have_one_hash_seed_or_the_job_s_own(format: str) -> None:
    assert HASH_SEED == "0"
    for job, seed in ((SMALL, "0"), (replace(SMALL, environment={"PYTHONHASHSEED": "7"}), "7")):
        said = " ".join(files(format, job).values()).replace('"', "'")
        assert re.findall(r"PYTHONHASHSEED'?[:=,]? *\n? *(?:'?value'?:)? *'?(\d)", said)[0] == seed


def test_modules_travel_with_the_script() -> None:
    headings = {
        "trainjob": "my-train.py --from-file=model.py --from-file=data--rows.py=data/rows.py\n",
        "sagemaker": "--include my-train.py --include model.py --include data/rows.py --include ",
        "vertex": (
            "cp my-train.py model.py gs://BUCKET/gr-e-1/\n"
            "#     gcloud storage cp data/rows.py gs://BUCKET/gr-e-1/data/\n"
        ),
        "ray": "FILES = ['my-train.py', 'model.py', 'data/rows.py']\n",
        "spark": "FILES = ['my-train.py', 'model.py', 'data/rows.py']\n",
    }
    for format, says in headings.items():
        assert says in next(iter(files(format, LARGE).values()))
    job = yaml.safe_load(files("trainjob", LARGE)["my-train-trainjob.yaml"])
    jobs = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    (volume,) = jobs["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["items"][2] == {"key": "data--rows.py", "path": "data/rows.py"}


def test_options_of_the_persons_own_come_after_ours_in_a_batch_script() -> None:
    (text,) = files("sbatch", LARGE).values()
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert lines[-2:] == ["#SBATCH --qos=high", "#SBATCH --exclusive"]
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4", "#SBATCH --time=1-12:30"} < set(lines)
    assert text.index("module load cuda") < text.index("srun")


def test_the_shell_gives_a_script_its_arguments_as_they_were_written(tmp_path: Path) -> None:
    for format in ("sbatch", "skypilot"):
        (text,) = files(format, LARGE).values()
        line = text.splitlines()[-1] if format == "sbatch" else yaml.safe_load(text)["run"]
        said = run_with_stand_ins(line.splitlines()[-1], tmp_path)
        assert said[-4:] == ["my-train.py", "--lr", "1e-3", "it's"]


@pytest.mark.parametrize(("host", "number"), [("algo-1", 0), ("algo-2", 1)])
def test_a_container_of_sagemakers_finds_its_number(host: str, number: int, tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    file.write_text(json.dumps({"current_host": host, "hosts": ["algo-2", "algo-1"]}))
    shell = SAGEMAKER_NODE.replace("/opt/ml/input/config/resourceconfig.json", str(file))
    assert found_by(shell, tmp_path) == f"algo-1 {number}"


@pytest.mark.parametrize(
    ("pool", "index", "number"),
    [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)],
)
def test_a_replica_of_vertex_finds_its_number(
    pool: str, index: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]}
    here = {"cluster": pools, "environment": "cloud", "task": {"type": pool, "index": index}}
    monkeypatch.setenv("CLUSTER_SPEC", json.dumps(here))
    assert found_by(VERTEX_NODE, tmp_path) == f"a {number}"


def found_by(shell: str, folder: Path) -> str:
    """Return what a shell finds out about its node."""
    shell = shell.replace("/tmp/node", str(folder / "node")) + '\necho "$head $node"'
    done = subprocess.run(["bash", "-euc", shell], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_with_stand_ins(line: str, folder: Path) -> list[str]:
    """Return the words that torchrun gets of a line, run by a shell with stand-ins for the rest."""
    for name, body in (
        ("torchrun", 'for word in "$@"; do echo "$word"; done'),
        ("srun", 'shift; exec "$@"'),
        ("timeout", 'shift; exec "$@"'),
    ):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    names = ("HEAD", "SLURM_NODEID", "head", "SKYPILOT_NODE_RANK", "SLURM_JOB_ID")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **dict.fromkeys(names, "1")}
    done = subprocess.run(
        ["bash", "-euc", line], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()
