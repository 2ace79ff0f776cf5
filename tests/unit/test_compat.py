"""The rooms for private parts of others fit the versions that are installed."""

from pathlib import Path
from typing import Any

import ipyparallel
import pytest

from nbdist.client import ipp
from nbdist.doctor import software


def test_ipyparallels_client_has_every_private_part_that_we_use() -> None:
    assert ipp.check() == []


def test_a_private_part_that_is_gone_is_named_with_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newer:
        def execute(self, client: Any) -> Any:
            return client._mux_stream, client._control_stream, client.session

    monkeypatch.setattr(ipyparallel, "Client", Newer)
    found = ipp.check()
    version = ipyparallel.__version__
    assert f"ipyparallel {version}: Client._dispatch_reply is gone" in found
    assert f"ipyparallel {version}: Client._query_stream is gone" in found
    assert f"ipyparallel {version}: Client._mux_stream is gone" not in found


def test_the_engines_rooms_have_every_private_part_that_we_use() -> None:
    # In a process of its own: the modules belong on a rank.
    assert software.look_at_torch(timeout_s=60).broken == ()


def test_the_doctor_asks_every_room_of_the_engine_that_has_a_check() -> None:
    folder = Path(software.__file__).parents[1] / "engine"
    rooms = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "\ndef check() -> list[str]" in path.read_text()
    }
    assert rooms == set(software.ROOMS)
