"""What a run can be made again from, and that nothing in it is secret."""

import json
from pathlib import Path

from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.tracking.settings import split_password, whole_uri
from nbdist.client.tracking.story import cells_text, notebook_text, story


def cell(number: int, source: str, **params: object) -> CellInfo:
    return CellInfo(number, source, (0, 1), 4, "gloo", ("cpu", "cpu"), params=params)


def test_the_sessions_cells_stand_in_order_with_what_they_were_given() -> None:
    text = cells_text([cell(1, "a = 1\n", lr=0.1, api_token="xyzzy"), cell(2, "b = a")])
    assert text == (
        "# %% cell 1, on ranks 0-1\n# -p lr=0.1\n# -p api_token=(hidden)\na = 1\n\n"
        "# %% cell 2, on ranks 0-1\nb = a\n"
    )


def test_a_long_session_keeps_its_newest_cells() -> None:
    text = cells_text([cell(i, "x" * 300_000) for i in range(6)])
    assert text.startswith("# (older cells are left out)")
    assert "cell 5" in text
    assert "cell 1" not in text


def test_the_notebook_is_kept_as_it_is_on_the_disk_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    path.write_text('{"source": ["token = \\"hunter2\\"\\n"]}')
    assert notebook_text(path, tmp_path) == '{"source": ["token = \\"(hidden)\\"\\n"]}'
    assert notebook_text(Path("/elsewhere/nb.ipynb"), tmp_path) != ""
    assert notebook_text(tmp_path / "gone.ipynb", tmp_path) == ""


def test_the_code_of_a_notebook_is_read_as_code_and_its_outputs_as_text(tmp_path: Path) -> None:
    code = ["%load_ext nbdist\n", 'headers = {"Authorization": (\n', "    'hunter2')}"]
    text = [{"output_type": "stream", "name": "stdout", "text": ["password: 'hunter2'"]}]
    cells = [{"cell_type": "code", "metadata": {}, "source": code, "outputs": text}]
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    kept = notebook_text(path, tmp_path)
    assert "hunter2" not in kept
    assert json.loads(kept)["cells"][0]["source"][2] == '    "(hidden)")}'


def test_a_runs_files_begin_with_its_cell(tmp_path: Path) -> None:
    files = dict(story(tmp_path, [cell(1, "a = 1"), cell(2, "b = 2")]))
    assert files["cell.py"] == b"b = 2"
    assert b"a = 1" in files["cells.py"]
    assert b"==" in files["environment.txt"]


def test_a_password_is_split_from_what_may_be_written_down() -> None:
    uri, secrets = split_password("https://me:p%40ss@ml.example:5000/x")
    assert uri == "https://ml.example:5000/x"
    assert secrets == {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "p@ss"}
    uri, secrets = split_password("postgresql://me:hunter2@db/runs")
    assert uri == "postgresql://me@db/runs"
    assert whole_uri(uri, secrets) == "postgresql://me:hunter2@db/runs"
    assert whole_uri("sqlite:///x.db", secrets) == "sqlite:///x.db"
    assert split_password("http://ml:5000") == ("http://ml:5000", {})
