"""What a rank tells of its connections, from what was counted before and after."""

from nbdist.engine.group.links.link_stats import MOST_REPORTED, passed
from nbdist.engine.group.links.tcp_info import Counts


def counts(sent: int, received: int = 0, busy_s: float = 0.0, resent: int = 0) -> Counts:
    return Counts(sent, received, busy_s, resent, rtt_s=0.001, quiet_s=0.0)


def test_a_record_holds_what_passed_between_two_samples() -> None:
    before = {"1@10.0.0.2:5000": counts(1000, busy_s=1.0, resent=10)}
    after = {"1@10.0.0.2:5000": counts(5000, busy_s=1.5, resent=30)}
    assert passed(before, after) == {
        "1@10.0.0.2:5000.sent_bytes": 4000.0,
        "1@10.0.0.2:5000.busy_s": 0.5,
        "1@10.0.0.2:5000.resent_bytes": 20.0,
        "1@10.0.0.2:5000.rtt_s": 0.001,
    }


def test_what_is_new_still_or_small_is_not_told_and_who_only_received_is() -> None:
    before = {name: counts(0) for name in ("still", "small", "sends", "receives")}
    after = {
        "still": counts(0),
        "small": counts(9_000, 9_000),
        "sends": counts(1_000_000),
        "receives": counts(10, 900_000),
        "new": counts(5_000_000),
    }
    assert {key.partition(".")[0] for key in passed(before, after)} == {"sends", "receives"}


def test_of_many_connections_the_busiest_are_told() -> None:
    names = [f"@10.0.0.{i}:5000" for i in range(100)]
    before = {name: counts(0) for name in names}
    after = {name: counts(1000 + i) for i, name in enumerate(names)}
    told = {key.rpartition(".")[0] for key in passed(before, after)}
    assert told == set(names[-MOST_REPORTED:])
