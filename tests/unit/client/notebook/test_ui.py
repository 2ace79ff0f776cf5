"""`%dist ui`: which server a link leads to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.client.notebook import current
from nbdist.client.tracking.shipping import ui


def test_a_server_is_used_again_for_the_runs_it_was_started_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, ...]] = []

    def start_ui(folder: Path, uri: str, *_: Any, **__: Any) -> tuple[str, Any]:
        started.append((folder, uri))
        return f"http://127.0.0.1:{len(started)}/#/page", SimpleNamespace(poll=lambda: None)

    def use(folder: str, uri: str) -> str:
        tracker = SimpleNamespace(folder=tmp_path / folder, uri=uri, whole_uri=uri, experiment="e")
        monkeypatch.setattr(current, "_tracker", lambda: tracker)
        return current.open_ui().splitlines()[0].rpartition(" ")[2]

    monkeypatch.setattr(ui, "start_ui", start_ui)
    monkeypatch.setattr(ui, "view_page", lambda *_: "/#/page")
    monkeypatch.setattr(current, "_uis", {})
    assert use("a", "sqlite:///a") == "http://127.0.0.1:1/#/page"
    assert use("b", "sqlite:///b") == "http://127.0.0.1:2/#/page"
    assert use("a", "sqlite:///a") == "http://127.0.0.1:1/#/page"
    assert len(started) == 2
