"""Relay messages between the notebook and ranks one whole message at a time.

ipyparallel relays with pyzmq's `monitored_queue`, which reads frames: where both sides are ROUTER
it takes the first two of a message for the addresses of its sender and receiver. Of a message that
has no third frame it goes on reading, and takes the request that comes next for the rest of it.
Whoever reaches the port can send such a one without a secret, by chance even (to libzmq random
bytes are a message of its oldest protocol), and a cell would wait for an answer for ever.
"""

from typing import Any

import zmq
from zmq.devices import ProcessMonitoredQueue

# A sender, a receiver, and something to say: of less there is nothing to relay.
_LEAST_FRAMES = 3


class WholeMessageQueue(ProcessMonitoredQueue):
    """pyzmq's monitored queue in a process, which between two ROUTERs drops what is too short."""

    def run_device(self) -> None:
        """Relay until the context ends. Runs in the queue's own process."""
        if self.in_type == self.out_type == zmq.ROUTER:
            ins, outs, monitor = self._setup_sockets()  # type: ignore[no-untyped-call]
            _relay({ins: (outs, self._in_prefix), outs: (ins, self._out_prefix)}, monitor)
        else:
            super().run_device()  # type: ignore[no-untyped-call]


def _relay(routes: dict[Any, tuple[Any, bytes]], monitor: Any) -> None:
    """Send what each socket gets to the other, and a copy, with a prefix, to `monitor`."""
    poller = zmq.Poller()
    for source in routes:
        poller.register(source, zmq.POLLIN)
    while True:
        for source, _ in poller.poll():
            frames = source.recv_multipart(copy=False)
            if len(frames) < _LEAST_FRAMES:
                continue
            sender, receiver, *rest = frames
            target, prefix = routes[source]
            target.send_multipart([receiver, sender, *rest], copy=False)
            monitor.send_multipart([prefix, receiver, sender, *rest], copy=False)


def install(controller: Any) -> None:
    """Have ipyparallel's `controller` relay in this way. Call before it is initialized."""
    controller.mq_class = f"{__name__}.{WholeMessageQueue.__name__}"
