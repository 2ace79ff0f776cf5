"""Memory that ranks share: the same for all who map it, and gone when nobody holds it."""

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from nbdist.engine.group.shared_memory import Offered, accept


def test_what_one_writes_the_other_reads_also_after_the_offer_has_ended() -> None:
    offered = Offered(4096)
    first, second = accept(offered.offer), accept(offered.offer)
    offered.close()
    assert first is not None
    assert second is not None
    assert len(first) == 4096
    assert not any(first)
    first[100] = 7
    assert second[100] == 7


def test_only_the_user_may_open_it() -> None:
    offered = Offered(64)
    try:
        assert stat.S_IMODE(os.stat(offered.offer.path).st_mode) == 0o600
    finally:
        offered.close()


def test_another_host_an_ended_offer_and_other_memory_are_not_mapped(tmp_path: Path) -> None:
    offered, other = Offered(64), Offered(64)
    offer = offered.offer
    try:
        assert accept(dataclasses.replace(offer, host="another")) is None
        assert accept(dataclasses.replace(offer, path=other.offer.path)) is None
        os.mkfifo(tmp_path / "fifo")  # where an open for reading alone would wait
        assert accept(dataclasses.replace(offer, path=str(tmp_path / "fifo"))) is None
    finally:
        offered.close()
        other.close()
    assert accept(offer) is None


def test_without_nameless_memory_a_file_serves_and_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr("os.memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    offered = Offered(64)
    assert accept(offered.offer) is not None
    offered.close()
    offered.close()
    assert list(tmp_path.iterdir()) == []


def test_mapping_costs_no_descriptor_once_it_is_given_up() -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(3):
        offered = Offered(64)
        memory = accept(offered.offer)
        offered.close()
        del memory
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before
