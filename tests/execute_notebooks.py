"""Execute the notebooks anew, in place: `python tests/execute_notebooks.py FILE_OR_FOLDER...`.

For whoever changes a notebook, or what a cell leaves in one. Runs live, so that the board's
pictures stand in the file, and writes nothing that changes by itself: no times of execution, no
versions, no state of widgets; the ids of cells stay. A notebook that fails is left as it was.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

CELL_TIMEOUT_S = 300
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> None:
    """Execute the notebook at `path` in an empty folder, where no earlier runs are; write it.

    Raises:
        CellExecutionError: A cell failed that has no tag `raises-exception`.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    # What sends the runs to MLflow may still write for a moment after its kernel has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            store_widget_state=False,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            resources={"metadata": {"path": folder}},
        ).execute()
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def main(arguments: Sequence[str]) -> None:
    """Execute each notebook in turn."""
    parser = argparse.ArgumentParser(description="Execute notebooks live, in place.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    os.environ.pop("NBDIST_STATIC", None)
    # Jupyter looks for its kernels beside the Python that runs this.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    for path in parser.parse_args(arguments).paths:
        for notebook in sorted(path.glob("*.ipynb")) if path.is_dir() else [path]:
            print(notebook, flush=True)
            execute(notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
