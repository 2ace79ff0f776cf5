"""Job files, each by its own tool; the drivers of Ray and Spark run, and give torchrun's losses."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nbdist.client.export.jobs import Job, files
from nbdist.shared.text import figure

pytestmark = [
    pytest.mark.jobs,
    # botocore reads dates by a function that Python has named as leaving.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HERE = Path(__file__).parent
MODULE = "problem.py"  # which the scripts import
BY_LIBRARY = "train_by_library.py"
SCRIPTS = ("train.py", BY_LIBRARY)
SMALL = Job("train.py", 2)
LARGE = Job(
    "train.py",
    4,
    nodes=3,
    device="cuda",
    name="large",
    arguments=("--lr", "1e-3"),
    packages=("nbdist", "torchmetrics>=1"),
    environment={"MODE": "a b"},
    time_limit="2:00:00",
    image="registry/image:1",
    cores_per_rank=8,
    memory_gib=64,
)
UNDERSTOOD: dict[str, list[dict[str, Any]]] = {
    "trainjob": [{"nodes": 1, "ranks": 2}, {"nodes": 3, "ranks": 4}],
    "skypilot": [
        {"nodes": 1, "gpus": 0, "cpus": ["2+"], "name": "train"},
        {"nodes": 3, "gpus": 4, "cpus": ["32+"], "name": "large"},
    ],
    "azureml": [
        {"nodes": 1, "ranks": 2, "limit": None},
        {"nodes": 3, "ranks": 4, "limit": 7200},
    ],
    "vertex": [{"nodes": 1, "gpus": 0}, {"nodes": 3, "gpus": 4}],
}


@pytest.mark.parametrize("format", UNDERSTOOD)
def test_the_tool_itself_reads_of_the_file_what_the_job_says(
    format: str, python: Path, tmp_path: Path
) -> None:
    names = []
    for job in (SMALL, LARGE):
        ((_, text),) = files(format, job).items()
        (tmp_path / f"{job.name}.yaml").write_text(text)
        names.append(str(tmp_path / f"{job.name}.yaml"))
    said = run([str(python), str(HERE / "validate.py"), format, *names], tmp_path)
    assert [json.loads(line) for line in said.splitlines()] == UNDERSTOOD[format]


def test_a_file_with_a_field_that_its_tool_does_not_know_is_found(
    python: Path, tmp_path: Path
) -> None:
    ((_, text),) = files("trainjob", SMALL).items()
    (tmp_path / "wrong.yaml").write_text(text.replace("numNodes", "nodeCount"))
    words = [str(python), str(HERE / "validate.py"), "trainjob", str(tmp_path / "wrong.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "the model knows another file" in done.stderr


@pytest.mark.parametrize("job", [SMALL, LARGE], ids=["small", "large"])
def test_amazons_own_model_of_the_service_takes_the_request(job: Job) -> None:
    session = pytest.importorskip("botocore.session").get_session()
    validate = pytest.importorskip("botocore.validate")
    request = session.get_service_model("sagemaker").operation_model("CreateTrainingJob")
    document = yaml.safe_load(files("sagemaker", job)[f"{job.stem}-sagemaker.yaml"])
    report = validate.ParamValidator().validate(document, request.input_shape)
    assert report.generate_report() == ""
    document["ResourceConfig"]["Machines"] = 1
    report = validate.ParamValidator().validate(document, request.input_shape)
    assert "Machines" in report.generate_report()


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the scripts, and the losses of torchrun on two ranks."""
    folder = tmp_path_factory.mktemp("jobs")
    shutil.copy(HERE / MODULE, folder)
    for script in SCRIPTS:
        shutil.copy(HERE / script, folder)
        torchrun = [str(python), "-m", "torch.distributed.run", "--standalone"]
        run(
            [*torchrun, "--nproc-per-node=2", script, f"{script}-torchrun.txt"],
            folder,
            PYTHONHASHSEED="0",
        )
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("format", ["ray", "spark"])
def test_a_driver_gives_the_losses_of_torchrun_to_the_last_bit(
    format: str, script: str, python: Path, folder: Path
) -> None:
    # The path is relative: a driver runs the script in the folder that it was started from.
    losses = f"{script}-{format}.txt"
    ((driver, text),) = files(
        format, Job(script, 2, modules=(MODULE,), arguments=(losses,))
    ).items()
    (folder / driver).write_text(text)
    submit = {
        "ray": [str(python), driver],
        "spark": [str(python.with_name("spark-submit")), "--master", "local[2]", driver],
    }
    said = run(submit[format], folder)
    of_driver, of_torchrun = (
        (folder / f"{script}-{by}.txt").read_text() for by in (format, "torchrun")
    )
    assert of_driver == of_torchrun
    world_size, first, *_, last = of_driver.splitlines()
    assert world_size == "2"
    assert float.fromhex(last) < 0.1 * float.fromhex(first)
    logged = f"mean {figure(float.fromhex(last))}"  # by nbdist.log, on rank 0
    assert said.count(logged) == (script == BY_LIBRARY)


def run(command: Sequence[str], folder: Path, **more: str) -> str:
    """Run a command of the tools' environment in a folder, and return what it prints."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    tools = Path(command[0]).parent
    environment = kept | {
        "PATH": f"{tools}{os.pathsep}{kept['PATH']}",
        "PYSPARK_PYTHON": str(tools / "python"),
        "PYTHONDONTWRITEBYTECODE": "",  # thousands of modules, in each of many processes
        "RAY_USAGE_STATS_ENABLED": "0",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "HOME": str(folder),  # where SkyPilot and Azure would leave files
        **more,
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return done.stdout
