"""Clocks of other hosts: the true offset always lies within the bound that is told."""

import random
from concurrent.futures import Future
from typing import Any

import pytest

from nbdist.client.metrics.analysis.clocks import MAX_DRIFT, Clocks, Ping, Sighting, offset, sight

MS, S = 1_000_000, 1_000_000_000


class Host:
    """A host whose clock is `ahead_ns` ahead at the notebook's zero, and drifts."""

    def __init__(self, ahead_ns: int = 0, drift: float = 0.0, name: str = "there") -> None:
        self.ahead_ns, self.drift, self.name = ahead_ns, drift, name

    def shows(self, here_ns: float) -> float:
        return here_ns * (1 + self.drift) + self.ahead_ns

    def true_offset(self, there_ns: float) -> float:
        here_ns = (there_ns - self.ahead_ns) / (1 + self.drift)
        return here_ns - there_ns


class World:
    """The notebook's clock, and ranks on hosts that are asked through a network."""

    def __init__(self, hosts: dict[int, Host], ways_ns: Any) -> None:
        self.now_ns, self.hosts, self.ways_ns, self.asked = 1_000 * S, hosts, ways_ns, 0

    def ask(self, rank: int) -> "Future[dict[str, Any]]":
        there, back = self.ways_ns()
        host = self.hosts[rank]
        self.asked += 1
        self.now_ns += there
        shown_ns = round(host.shows(self.now_ns))
        answer = {"identity": host.name, "now_ns": shown_ns}
        self.now_ns += back
        future: Future[dict[str, Any]] = Future()
        future.set_result(answer)
        return future

    def clocks(self) -> Clocks:
        return Clocks(self.ask, lambda: self.now_ns, "here")


def lopsided(seed: int) -> Any:
    """Ways that take 0.2 ms at least, and often much longer in one direction alone."""
    dice = random.Random(seed)

    def ways() -> tuple[int, int]:
        slow = (dice.expovariate(1) * 5 * MS, dice.expovariate(1) * MS / 10)
        there, back = slow if dice.random() < 0.8 else slow[::-1]
        return int(0.2 * MS + there), int(0.2 * MS + back)

    return ways


@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_lies_within_the_bound_whatever_delays_and_drift(seed: int) -> None:
    dice = random.Random(seed)
    drift = dice.uniform(-MAX_DRIFT, MAX_DRIFT) * 0.9
    host = Host(ahead_ns=dice.randrange(-10_000 * S, 10_000 * S), drift=drift)
    world = World({0: Host(name="here"), 1: host}, lopsided(seed))
    clocks = world.clocks()
    for _ in range(400):
        clocks.refresh([0, 1])
        there_ns = round(host.shows(world.now_ns))
        told = clocks.offset_ns(1, there_ns)
        assert told is not None
        assert abs(told - host.true_offset(there_ns)) <= clocks.error_ns + 1  # rounded twice
        world.now_ns += dice.randrange(2 * S)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_before_between_and_after_the_readings(seed: int) -> None:
    dice = random.Random(seed)
    host = Host(ahead_ns=5 * S, drift=dice.uniform(-MAX_DRIFT, MAX_DRIFT) * 0.99)
    ways = lopsided(seed)
    sightings = []
    for second in sorted(dice.sample(range(600), 10)):
        there, back = ways()
        asked_ns = second * S
        there_ns = round(host.shows(asked_ns + there))
        sightings.append(sight([Ping(asked_ns, asked_ns + there + back, there_ns)]))
    for _ in range(200):
        moment_ns = round(host.shows(dice.randrange(-100 * S, 700 * S)))
        told, error = offset(sightings, moment_ns)
        assert abs(told - host.true_offset(moment_ns)) <= error + 1


def test_after_some_minutes_the_bound_is_about_half_the_least_round_trip() -> None:
    world = World({0: Host(name="here"), 1: Host(5 * S, 50e-6)}, lopsided(3))
    clocks = world.clocks()
    for _ in range(1200):
        clocks.refresh([0, 1])
        world.now_ns += S // 2
    assert clocks.error_ns < 1.5 * MS


def test_the_fastest_of_some_readings_counts() -> None:
    pings = [Ping(0, 90, 1_000), Ping(100, 110, 1_105), Ping(200, 260, 1_290)]
    assert sight(pings) == Sighting(1_105, -1_005, -995)
    assert offset([sight(pings)], 1_105) == (-1_000, 5)


def test_of_one_reading_the_bound_grows_by_the_most_that_a_clock_drifts() -> None:
    _, error = offset([Sighting(0, -10, 10)], 1_000_000)
    assert error == pytest.approx(10 + 500)


def test_a_clock_whose_drift_changes_is_followed() -> None:
    bent = [Sighting(i * S, 100e3 * i - 10, 100e3 * i + 10) for i in range(5)]
    bent += [Sighting((4 + i) * S, 400e3 - 10, 400e3 + 10) for i in range(1, 5)]
    told, error = offset(bent, 9 * S)
    assert abs(told - 400e3) <= error
    assert error < 1000


def test_ranks_that_read_the_notebooks_own_clock_are_asked_once_and_need_nothing() -> None:
    world = World({0: Host(name="here"), 1: Host(name="here")}, lopsided(1))
    clocks = world.clocks()
    clocks.begin({0: 10, 1: 11})
    assert clocks.offset_ns(0, 5) is None
    for _ in range(100):
        clocks.refresh([0, 1])
        world.now_ns += S
    assert (clocks.offset_ns(0, 5), clocks.offset_ns(1, 7), clocks.error_ns) == (0, 0, 0)
    assert world.asked == 2


def test_a_rank_with_a_new_process_is_asked_again() -> None:
    world = World({0: Host(name="here"), 1: Host(name="here")}, lopsided(1))
    clocks = world.clocks()
    clocks.begin({0: 10, 1: 11})
    clocks.refresh([0, 1])
    clocks.begin({0: 10, 1: 12})
    assert clocks.offset_ns(1, 5) is None
    clocks.refresh([0, 1])
    assert clocks.offset_ns(1, 5) is None, "not before a second has passed"
    world.now_ns += S
    clocks.refresh([0, 1])
    assert clocks.offset_ns(1, 5) == 0


def test_two_ranks_of_one_other_host_do_not_differ_and_are_measured_once() -> None:
    world = World({0: Host(7 * S), 1: Host(7 * S)}, lopsided(1))
    clocks = world.clocks()
    clocks.refresh([0, 1])
    assert clocks.offset_ns(0, 8 * S) == clocks.offset_ns(1, 8 * S)
    assert clocks.error_ns == 0


def test_a_copied_machine_has_the_same_boot_and_another_clock() -> None:
    world = World({0: Host(name="here"), 1: Host(9 * S, name="here")}, lopsided(1))
    clocks = world.clocks()
    clocks.refresh([0, 1])
    assert clocks.offset_ns(0, 0) == 0
    there_ns = round(world.hosts[1].shows(world.now_ns))
    told = clocks.offset_ns(1, there_ns)
    assert told is not None
    assert abs(told + 9 * S) <= clocks.error_ns


def test_a_rank_that_does_not_answer_has_no_clock_and_stops_nobody() -> None:
    from nbdist.client.cluster.requests import RankDiedError

    world = World({0: Host(name="here"), 1: Host(name="here")}, lopsided(1))

    def ask(rank: int) -> "Future[dict[str, Any]]":
        if rank == 1:
            dead: Future[dict[str, Any]] = Future()
            dead.set_exception(RankDiedError("Rank 1 has ended."))
            return dead
        return world.ask(rank)

    clocks = Clocks(ask, lambda: world.now_ns, "here")
    clocks.refresh([0, 1])
    assert clocks.offset_ns(0, 5) == 0
    assert clocks.offset_ns(1, 5) is None
