"""One JupyterLab, one browser and one notebook with two ranks, shared by these tests."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.lab import PICTURES, Lab, OpenNotebook

# A browser that no one is to talk to: no news, no updates, no accounts.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# All of these end with the last test here: Playwright keeps an event loop running in the main
# thread, where tests after these want to run their own.
@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def shared(lab: Lab, browser: Browser) -> Iterator[OpenNotebook]:
    notebook = OpenNotebook(lab, browser)
    yield notebook
    notebook.close()


@pytest.fixture
def notebook(shared: OpenNotebook, request: pytest.FixtureRequest) -> Iterator[OpenNotebook]:
    """Return the shared notebook with two ranks that are ready; each test adds its cells."""
    ready = shared.run(
        "import nbdist\n"
        "%load_ext nbdist\n"
        "try:\n    nbdist.current().run('dist.barrier()', timeout_s=20)\n"
        "except nbdist.NBDistError:\n    %dist start -n 2 --device cpu"
    ).wait()
    assert "Error" not in ready.text, ready.text
    failures = request.session.testsfailed
    yield shared
    if request.session.testsfailed > failures:
        PICTURES.mkdir(parents=True, exist_ok=True)
        shared.page.screenshot(path=PICTURES / f"FAILED-{request.node.name}.png")


@pytest.fixture(scope="package")
def reopen(lab: Lab, browser: Browser) -> "Reopen":
    return Reopen(lab, browser)


class Reopen:
    """Opens a copy of a saved notebook with a new kernel, as on another day."""

    def __init__(self, lab: Lab, browser: Browser) -> None:
        self._lab, self._browser = lab, browser

    def __call__(self, notebook: OpenNotebook) -> OpenNotebook:
        name = self._lab.write(notebook.saved())
        return OpenNotebook(self._lab, self._browser, name)
