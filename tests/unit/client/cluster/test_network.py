"""Where a cluster may listen, and what it must ask of its callers there."""

from pathlib import Path
from typing import Any

import pytest

from nbdist.client.cluster.network import check_connection, choose_address
from nbdist.client.notebook import current
from nbdist.client.notebook.arguments import parse_dist
from nbdist.shared.errors import StartError, UsageError

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["192.0.2.7"], "down0": []}
GOOD = {"key": "k" * 64, "signature_scheme": "hmac-sha256", "interface": "tcp://127.0.0.1"}


def choose(asked: str, *, trust: bool = False, curve: bool = True) -> str:
    return choose_address(asked, INTERFACES, trust_network=trust, has_curve=curve)


@pytest.mark.parametrize("asked", ["127.0.0.1", "lo", "127.0.0.2"])
def test_loopback_needs_nobodys_trust(asked: str) -> None:
    assert choose(asked, curve=False).startswith("127.0.0.")


@pytest.mark.parametrize("asked", ["192.0.2.7", "eth0"])
def test_an_address_that_others_reach_is_refused_unless_the_network_is_trusted(asked: str) -> None:
    with pytest.raises(StartError) as refused:
        choose(asked)
    text = str(refused.value)
    assert "192.0.2.7 can be reached from the network" in text
    assert "torch's store, gloo and NCCL have no passwords and no encryption" in text
    assert f"%dist start --interface {asked} --trust-network" in text
    assert choose(asked, trust=True) == "192.0.2.7"


def test_off_loopback_nothing_starts_without_encryption() -> None:
    with pytest.raises(StartError, match="without CURVE"):
        choose("eth0", trust=True, curve=False)


@pytest.mark.parametrize("asked", ["203.0.113.1", "eth7", "down0", "::1", ""])
def test_what_is_not_of_this_machine_is_answered_by_what_it_has(asked: str) -> None:
    with pytest.raises(UsageError, match=r"lo \(127\.0\.0\.1\), eth0 \(192\.0\.2\.7\)"):
        choose(asked, trust=True)


@pytest.mark.parametrize("asked", ["0.0.0.0", "::"])
def test_all_interfaces_at_once_are_not_offered(asked: str) -> None:
    with pytest.raises(UsageError, match="means all of them"):
        choose(asked, trust=True)


def test_a_controller_that_signs_and_on_a_network_encrypts_is_accepted() -> None:
    check_connection(GOOD, "127.0.0.1")
    away = {**GOOD, "interface": "tcp://192.0.2.7", "curve_serverkey": "s"}
    check_connection(away, "192.0.2.7")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"key": ""}, "no key to be signed with"),
        ({"key": None}, "no key to be signed with"),
        ({"signature_scheme": "hmac-md5"}, "signed by hmac-md5"),
        ({"interface": "tcp://*"}, "not on 127.0.0.1 alone"),
    ],
)
def test_a_controller_that_a_config_file_has_opened_is_refused(
    change: dict[str, Any], why: str
) -> None:
    with pytest.raises(StartError, match=why):
        check_connection({**GOOD, **change}, "127.0.0.1")


def test_a_controller_on_a_network_without_curve_is_refused() -> None:
    with pytest.raises(StartError, match="do not use CURVE"):
        check_connection({**GOOD, "interface": "tcp://192.0.2.7"}, "192.0.2.7")


def test_a_start_that_is_refused_for_its_address_begins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="means all of them"):
        current.start(2, interface="0.0.0.0", trust_network=True)
    assert list(tmp_path.iterdir()) == []


def test_the_magic_takes_an_interface_and_the_trust_in_it() -> None:
    asked = parse_dist("start --interface eth0 --trust-network")
    assert asked is not None
    assert (asked.interface, asked.trust_network) == ("eth0", True)
    bare = parse_dist("start")
    assert bare is not None
    assert (bare.interface, bare.trust_network) == (None, None)  # the traitlets decide
