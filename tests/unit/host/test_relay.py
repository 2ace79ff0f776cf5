"""Relays by real sockets, in the process of their own that ipyparallel gives them."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq
from ipyparallel.controller.app import IPController
from traitlets.utils.importstring import import_item

from nbdist.host import relay

LONGEST_MS = 10_000


@dataclass
class Relayed:
    """A notebook, a rank, and who listens to what they say to one another."""

    notebook: zmq.Socket[bytes]
    rank: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


@pytest.fixture
def relayed() -> Iterator[Relayed]:
    controller = IPController()
    assert controller.has_trait("mq_class")
    relay.install(controller)
    queue = import_item(controller.mq_class)(zmq.ROUTER, zmq.ROUTER, zmq.PUB, b"in", b"out")
    context = zmq.Context()
    monitor = context.socket(zmq.SUB)
    monitor.subscribe(b"")
    port = monitor.bind_to_random_port("tcp://127.0.0.1")
    queue.connect_mon(f"tcp://127.0.0.1:{port}")
    ports = [
        bind("tcp://127.0.0.1")
        for bind in (queue.bind_in_to_random_port, queue.bind_out_to_random_port)
    ]
    queue.daemon = True
    queue.start()
    notebook, rank = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for end, name, port in ((notebook, b"notebook", ports[0]), (rank, b"rank", ports[1])):
        end.identity = name
        end.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield Relayed(notebook, rank, monitor)
    finally:
        queue.launcher.terminate()
        queue.join()
        context.destroy(linger=0)


def heard(end: zmq.Socket[bytes]) -> list[bytes]:
    assert end.poll(LONGEST_MS), "nothing comes"
    return end.recv_multipart()


def introduce(relayed: Relayed) -> None:
    """Wait until each end is known to the relay: a ROUTER drops what is for a stranger."""
    while not relayed.notebook.poll(50):
        relayed.rank.send_multipart([b"notebook", b"here"])
    while relayed.notebook.poll(200):
        relayed.notebook.recv_multipart()
    while relayed.monitor.poll(200):
        relayed.monitor.recv_multipart()


def test_a_request_and_its_answer_arrive_and_the_hub_hears_of_both(relayed: Relayed) -> None:
    introduce(relayed)
    relayed.notebook.send_multipart([b"rank", b"<IDS|MSG>", b"request"])
    assert heard(relayed.rank) == [b"notebook", b"<IDS|MSG>", b"request"]
    assert heard(relayed.monitor) == [b"in", b"rank", b"notebook", b"<IDS|MSG>", b"request"]
    relayed.rank.send_multipart([b"notebook", b"<IDS|MSG>", b"answer"])
    assert heard(relayed.notebook) == [b"rank", b"<IDS|MSG>", b"answer"]
    assert heard(relayed.monitor) == [b"out", b"notebook", b"rank", b"<IDS|MSG>", b"answer"]


@pytest.mark.parametrize("short", [[b"x"], [b"rank"], [b""]], ids=repr)
def test_a_message_that_is_too_short_does_not_take_the_next_one_with_it(
    relayed: Relayed, short: list[bytes]
) -> None:
    introduce(relayed)
    relayed.notebook.send_multipart(short)
    relayed.notebook.send_multipart([b"rank", b"request"])
    assert heard(relayed.rank) == [b"notebook", b"request"]
    relayed.rank.send_multipart(short)
    relayed.rank.send_multipart([b"notebook", b"answer"])
    assert heard(relayed.notebook) == [b"rank", b"answer"]
    assert [heard(relayed.monitor)[0] for _ in range(2)] == [b"in", b"out"]
