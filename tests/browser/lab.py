"""JupyterLab as its users have it: a server of its own, a browser, a notebook to type into.

Everything JupyterLab would read or leave in a home folder lies in a temp folder instead. The page
is driven by JupyterLab's commands, not by keys: a key that is pressed before the kernel's
websocket is connected is lost without a word.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, Locator, Page

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "artifacts" / "browser"
LONGEST_MS = 60_000  # a bound that tells a hang from a slow machine

_SETTINGS = {
    # A question about news would lie over the page.
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    # Cells out of sight stay in the page.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}

# A synchronous predicate: a Promise would be taken for "true".
CONNECTED = """() => {
  const panel = window.jupyterapp?.shell?.currentWidget;
  const kernel = panel?.sessionContext?.session?.kernel;
  return !!(panel?.context?.isReady && panel?.sessionContext?.isReady
    && kernel?.status === 'idle' && kernel?.connectionStatus === 'connected');
}"""

_ADD = """source => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  const cells = notebook.model.sharedModel;
  cells.insertCell(cells.cells.length, {cell_type: 'code', source, metadata: {}});
  return cells.cells.length - 1;
}"""

# Notes every state that the cell's output passes through, with what the prompt says meanwhile.
_RUN = """index => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = index;
  notebook.deselectAll();
  const cell = notebook.widgets[index].node;
  const states = [];
  const look = () => states.push({
    is_running: cell.querySelector('.jp-InputPrompt').innerText.includes('*'),
    text: cell.querySelector('.jp-OutputArea')?.innerText ?? '',
    time_ms: performance.now(),
  });
  const observer = new MutationObserver(look);
  observer.observe(cell, {subtree: true, childList: true, characterData: true, attributes: true});
  (window.nbdistStates ??= {})[index] = states;
  window.jupyterapp.commands.execute('notebook:run-cell');
  return performance.now();
}"""

_EDIT = """async index => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = index;
  notebook.deselectAll();
  notebook.mode = 'edit';
  await notebook.widgets[index].ready;
  notebook.widgets[index].editor.focus();
}"""

_ENDED = """index => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  return /\\d/.test(notebook.widgets[index].node.querySelector('.jp-InputPrompt').innerText);
}"""


# What each front end is started with to have its application asked from tests.
_EXPOSE = {"jupyterlab": "--LabApp", "notebook": "--JupyterNotebookApp"}


class Lab:
    """A server of JupyterLab or of Notebook 7 (`app`: "jupyterlab", "notebook").

    Use as a context manager: server and kernels end with it.
    """

    def __init__(self, folder: Path, app: str = "jupyterlab") -> None:
        self.app = app
        self.root = folder / "notebooks"
        self.token = secrets.token_hex(16)
        self._folder = folder
        self._log = folder / "lab.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Lab":
        self.root.mkdir()
        settings = self._folder / "settings"
        settings.mkdir()
        (settings / "overrides.json").write_text(json.dumps(_SETTINGS))
        # Of this tree, which may be newer than what was installed.
        extensions = self._folder / "labextensions"
        extensions.mkdir()
        (extensions / "nbdist").symlink_to(ROOT / "nbdist" / "labextension")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", self.app, "--no-browser", "--allow-root"),
                    *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"),
                    f"--IdentityProvider.token={self.token}",
                    f"--ServerApp.root_dir={self.root}",
                    f"--LabApp.app_settings_dir={settings}",
                    f"--LabApp.extra_labextensions_path={extensions}",
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                    f"{_EXPOSE[self.app]}.expose_app_in_browser=True",
                ],
                env=self._environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_it_answers()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)  # ends its kernels first
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        own = {
            name: str(self._folder / name.lower())
            for name in (
                "JUPYTER_CONFIG_DIR",
                "JUPYTER_DATA_DIR",
                "JUPYTER_RUNTIME_DIR",
                "JUPYTERLAB_SETTINGS_DIR",
                "JUPYTERLAB_WORKSPACES_DIR",
                "IPYTHONDIR",
            )
        }
        inherited = {k: v for k, v in os.environ.items() if k != "NBDIST_STATIC"}
        # Kernels and widgets of the Python that runs the tests, whatever else is installed here.
        return {**inherited, **own, "PYTHONPATH": path, "JUPYTER_PREFER_ENV_PATH": "1"}

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/api/status?token={self.token}", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                has_ended = self._process.poll() is not None
                if has_ended or time.monotonic() > deadline:
                    raise AssertionError(self._log.read_text()[-2000:]) from None
                time.sleep(0.1)  # another program's socket: there is no event to wait for

    def address(self, name: str) -> str:
        """Return where a notebook is opened, in a workspace of its own."""
        if self.app == "notebook":
            return f"{self.url}/notebooks/{name}?token={self.token}"
        workspace = secrets.token_hex(4)
        return f"{self.url}/lab/workspaces/{workspace}/tree/{name}?token={self.token}"

    def write(self, notebook: Any) -> str:
        """Write a notebook (nbformat 4) under a new name; return the name."""
        name = f"{secrets.token_hex(4)}.ipynb"
        nbformat.write(notebook, self.root / name)
        return name


class OpenNotebook:
    """A notebook that is open in JupyterLab, with a kernel of its own."""

    def __init__(self, lab: Lab, browser: Browser, name: str | None = None) -> None:
        """Open the notebook `name`, or an empty one; returns when its kernel is connected."""
        if name is None:
            empty = nbformat.v4.new_notebook()
            empty.metadata.kernelspec = {
                "name": "python3",
                "display_name": "Python 3",
                "language": "python",
            }
            name = lab.write(empty)
        self.path = lab.root / name
        self._lab, self._browser = lab, browser
        # As sharp as a good screen, for the people who look at the pictures.
        self._context = browser.new_context(
            viewport={"width": 1280, "height": 1000}, device_scale_factor=2
        )
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(LONGEST_MS)
        self.page.goto(lab.address(name))
        self.page.wait_for_function(CONNECTED)
        self.page.evaluate("() => {window.jupyterapp.shell.collapseLeft()}")

    def opened_again(self) -> "OpenNotebook":
        """Close the page, and open the file of now in another one, with the same kernel."""
        self._context.close()
        return OpenNotebook(self._lab, self._browser, self.path.name)

    def restart_kernel(self) -> None:
        """Restart it as the button does, without its question."""
        self.page.evaluate(
            "async () => {await window.jupyterapp.shell.currentWidget.sessionContext"
            ".session.kernel.restart()}"
        )
        self.page.wait_for_function(CONNECTED)

    def run(self, source: str) -> "Cell":
        """Type `source` into a new cell at the end and run it; returns at once."""
        return self.cell(self.page.evaluate(_ADD, source)).start()

    def edit(self, source: str) -> None:
        """Type `source` into a new cell at the end, and leave the cursor behind it."""
        index = self.page.evaluate(_ADD, source)
        self.page.evaluate(_EDIT, index)
        self.page.keyboard.press("Control+End")

    def cell(self, index: int) -> "Cell":
        """Return the cell at this place."""
        return Cell(self, index)

    def interrupt(self) -> None:
        """Press the ■ in the toolbar."""
        self.page.locator('[data-jp-item-name="interrupt"]').first.click()

    def saved(self) -> Any:
        """Save; return the notebook as its file holds it."""
        self.page.evaluate(
            "async () => {await window.jupyterapp.shell.currentWidget.context.save()}"
        )
        return nbformat.read(self.path, as_version=4)

    def use_theme(self, name: str) -> None:
        """Change JupyterLab's colours: "JupyterLab Light" or "JupyterLab Dark"."""
        self.page.evaluate(
            "async theme => {await window.jupyterapp.commands.execute("
            "'apputils:change-theme', {theme})}",
            name,
        )
        is_light = str("Dark" not in name).lower()
        self.page.locator(f'body[data-jp-theme-light="{is_light}"]').wait_for(state="attached")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def close(self) -> None:
        """End the kernel and close the page."""
        self.page.evaluate(
            "async () => {await window.jupyterapp.shell.currentWidget.sessionContext.shutdown()}"
        )
        self._context.close()


class Cell:
    """One code cell on the page."""

    def __init__(self, notebook: OpenNotebook, index: int) -> None:
        self.index = index
        self._notebook = notebook
        self._page = notebook.page
        self.element: Locator = self._page.locator(".jp-Notebook .jp-Cell").nth(index)
        self.output: Locator = self.element.locator(".jp-OutputArea")
        self.started_ms = 0.0

    def start(self) -> "Cell":
        """Run it, as Shift+Enter does; returns at once."""
        self.started_ms = self._page.evaluate(_RUN, self.index)
        return self

    def wait(self) -> "Cell":
        """Wait until the prompt shows a number."""
        self._page.wait_for_function(_ENDED, arg=self.index)
        return self

    @property
    def is_running(self) -> bool:
        """Whether the prompt shows [*]."""
        return "*" in self.element.locator(".jp-InputPrompt").inner_text()

    @property
    def text(self) -> str:
        """What a person can read in the output."""
        return "\n".join(self.output.all_inner_texts())

    @property
    def states(self) -> list[dict[str, Any]]:
        """What the output looked like after each change since `start`."""
        states: list[dict[str, Any]] = self._page.evaluate(
            "index => window.nbdistStates[index]", self.index
        )
        return states

    def saved_outputs(self) -> list[Any]:
        """Save; return this cell's outputs as the file holds them."""
        outputs: list[Any] = self._notebook.saved().cells[self.index].outputs
        return outputs

    def picture(self, name: str, *, whole: bool = False) -> Path:
        """Keep a picture of the output (of the whole cell) for people to look at."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / f"{name}.png"
        (self.element if whole else self.output.first).screenshot(path=path)
        return path
