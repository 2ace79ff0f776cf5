"""Pings by real sockets: ipyparallel's own hearts answer."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq
from ipyparallel.controller import heartmonitor
from zmq.eventloop.zmqstream import ZMQStream

from nbdist.host import heartbeat

LONGEST_MS = 10_000


@dataclass
class Monitored:
    """A monitor that runs, where hearts reach it, and what it tells the hub."""

    monitor: heartbeat.JoiningMonitor
    ping_url: str
    pong_url: str
    told: zmq.Socket[bytes]

    def join(self, name: bytes) -> None:
        """Let a heart begin to beat."""
        heart = heartmonitor.Heart(self.ping_url, self.pong_url, heart_id=name)
        heart.start()

    def heard(self) -> list[bytes]:
        """Return what the hub is told next, within seconds."""
        assert self.told.poll(LONGEST_MS), "the hub is told nothing"
        return self.told.recv_multipart()


@pytest.fixture
def monitored() -> Iterator[Monitored]:
    context = zmq.Context()
    told = context.socket(zmq.SUB)
    told.setsockopt(zmq.SUBSCRIBE, b"")
    monitor_port = told.bind_to_random_port("tcp://127.0.0.1")
    ready, loop = threading.Event(), asyncio.new_event_loop()
    made: list[Monitored] = []

    async def begin() -> None:
        ping, pong, tell = (context.socket(kind) for kind in (zmq.PUB, zmq.ROUTER, zmq.XPUB))
        ping_url, pong_url = (
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            for socket in (ping, pong)
        )
        tell.connect(f"tcp://127.0.0.1:{monitor_port}")
        streams = {"ping_stream": ping, "pong_stream": pong, "monitor_stream": tell}
        monitor = heartbeat.JoiningMonitor(
            **{name: ZMQStream(socket) for name, socket in streams.items()},
            max_heartmonitor_misses=1_000_000,
        )
        monitor.start()
        made.append(Monitored(monitor, ping_url, pong_url, told))
        ready.set()

    def run() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not ready.wait(0.01):
        told.poll(0)  # only then does zmq subscribe: the monitor begins after that
    yield made[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    told.close(0)


def test_who_connects_is_told_to_the_hub_and_then_pings_come_seldom(
    monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = threading.Event()
    often = monitored.monitor._often
    stop = often.stop

    def stop_and_tell() -> None:
        stop()
        quiet.set()

    monkeypatch.setattr(heartbeat, "JOINING_S", 1e9)  # what ends it is the answer
    monkeypatch.setattr(often, "stop", stop_and_tell)
    for name in (b"first", b"second"):
        assert not often.is_running()
        quiet.clear()
        monitored.join(name)
        assert any(name in part for part in monitored.heard())
        assert quiet.wait(LONGEST_MS / 1000)


def test_the_process_that_beats_for_a_controller_takes_this_monitor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartmonitor, "HeartMonitor", heartmonitor.HeartMonitor)
    heartbeat.install()
    assert heartmonitor._setup_heartmonitor.__globals__["HeartMonitor"] is heartbeat.JoiningMonitor
