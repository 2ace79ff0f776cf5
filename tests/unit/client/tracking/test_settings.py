"""Where runs go, and with which environment MLflow's processes start."""

from pathlib import Path

from nbdist.client.tracking import provenance
from nbdist.client.tracking.settings import (
    mlflow_environment,
    own_artifacts,
    own_database,
    shown_uri,
    tracking_uri,
)

HOME = Path("/home/me/.nbdist")


def test_without_a_word_runs_go_to_a_database_beside_the_notebook() -> None:
    uri = tracking_uri(HOME, None, {})
    assert uri == "sqlite:////home/me/.nbdist/mlflow.db"
    assert own_artifacts(HOME, uri, "my nb") == "file:///home/me/.nbdist/artifacts/my_nb"


def test_the_uri_asked_for_comes_before_the_environments() -> None:
    environment = {"MLFLOW_TRACKING_URI": "http://b:5000/"}
    assert tracking_uri(HOME, "http://a:5000", environment) == "http://a:5000"
    assert tracking_uri(HOME, None, environment) == "http://b:5000"
    assert own_artifacts(HOME, "http://b:5000", "nb") is None


def test_a_relative_database_stays_where_it_was_meant_when_the_kernel_moves() -> None:
    uri = tracking_uri(HOME, "sqlite:///runs.db", {})
    assert uri == f"sqlite:///{Path.cwd()}/runs.db"


def test_people_never_see_a_password_in_a_uri() -> None:
    assert shown_uri("https://me:pw@host:1/x") == "https://host:1/x"
    assert shown_uri(own_database(HOME)) == own_database(HOME)


def test_mlflows_telemetry_is_off_unless_the_user_turns_it_on() -> None:
    assert mlflow_environment({})["MLFLOW_DISABLE_TELEMETRY"] == "true"
    chosen = mlflow_environment({"MLFLOW_DISABLE_TELEMETRY": "false"})
    assert chosen["MLFLOW_DISABLE_TELEMETRY"] == "false"
    assert "DO_NOT_TRACK" not in chosen


def test_the_environment_is_written_down_by_an_allow_list(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu.dist-info").mkdir()
    text = provenance.environment_text(
        [str(tmp_path)], {"OMP_NUM_THREADS": "1", "AWS_SECRET_ACCESS_KEY": "s3cret"}
    )
    assert "torch==2.13.0+cpu\n" in text
    assert "# OMP_NUM_THREADS=1\n" in text
    assert "s3cret" not in text


def test_the_experiment_is_the_notebook_as_far_as_jupyter_tells() -> None:
    assert provenance.notebook_name({"JPY_SESSION_NAME": "/work/02_train.ipynb"}) == "02_train"
    assert provenance.notebook_name({"JPY_SESSION_NAME": "a-console-id"}) == "notebook"
    assert provenance.notebook_name({}) == "notebook"
    by_vs_code = {"__vsc_ipynb_file__": "/work/05_where.ipynb"}
    assert provenance.notebook_path({}, by_vs_code) == Path("/work/05_where.ipynb")
    assert provenance.notebook_name({"JPY_SESSION_NAME": "a-console-id"}, by_vs_code) == "05_where"
    assert provenance.notebook_path({}, {"__vsc_ipynb_file__": 3}) is None
