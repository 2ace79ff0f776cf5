"""A notebook as pytest sees it: a file with one test, which runs all cells."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nbdist.testing import outcome
from nbdist.testing.runner import RunOptions, run_notebook


class NotebookFile(pytest.File):
    """A notebook's file."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the one test of it."""
        yield NotebookItem.from_parent(self, name="notebook")


class NotebookItem(pytest.Item):
    """All cells of a notebook, in order, in one kernel.

    JUnit's properties are `cells`, `nbdist-ranks` where that option was given, `expect` for each
    line that `%dist expect` has said, `artifact` for each file that was kept, and `baseline` for
    the one that was written.
    """

    def runtest(self) -> None:
        """Run the notebook; raises NotebookFailed."""
        options = self._options()
        try:
            notebook: Any = nbformat.read(self.path, as_version=4)
        except AttributeError:  # JSON, and no object
            raise outcome.NotebookFailed(
                "This is no notebook: it is JSON of another kind."
            ) from None
        except Exception as error:
            raise outcome.NotebookFailed(f"This is no notebook: {error}") from None
        if options.ranks is not None:
            self.user_properties.append(("nbdist-ranks", str(options.ranks)))
        self.user_properties.append(("cells", str(len(outcome.code_cells(notebook.cells)))))
        for cell in outcome.code_cells(notebook.cells):
            cell.outputs = []  # those of an earlier run are no evidence of this one
        before = self._baseline_state()
        try:
            run_notebook(notebook, self.path, options)
        finally:
            if self._baseline_state() != before:
                self.user_properties.append(("baseline", os.path.relpath(self._baseline)))
            self._keep(notebook)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Return what is shown: of a cell that failed what its reader would see."""
        if isinstance(excinfo.value, outcome.NotebookFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return where the test is, and its title."""
        return self.path, None, f"notebook {self.path.name}"

    def _options(self) -> RunOptions:
        option = self.config.option
        return RunOptions(
            option.nbdist_ranks, option.nbdist_cell_timeout, option.nbdist_writes_baseline
        )

    @property
    def _baseline(self) -> Path:
        return self.path.with_suffix(".baseline.json")

    def _baseline_state(self) -> tuple[int, int] | None:
        """Return what is another after each time that the baseline is written."""
        try:
            status = self._baseline.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _keep(self, notebook: Any) -> None:
        """Keep what was said and drawn, as properties and as files."""
        said = outcome.expectations(notebook.cells)
        self.user_properties += [("expect", line) for line in said]
        folder = self.config.option.nbdist_artifacts
        if folder is None:
            return
        place = folder / _place_of(self.path, self.config.rootpath)
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob("board-cell-*"):
            old.unlink()
        kept = [place / self.path.name]
        nbformat.write(notebook, kept[0])
        for picture in outcome.pictures(notebook.cells):
            kept.append(place / picture.name)
            kept[-1].write_bytes(picture.content)
        self.user_properties += [("artifact", str(file)) for file in kept]


def _place_of(path: Path, root: Path) -> Path:
    """Return a notebook's own folder among the artifacts."""
    # Of those elsewhere all folders: two may have the same name.
    inside = path.relative_to(root if path.is_relative_to(root) else path.anchor)
    return inside.with_suffix("")
