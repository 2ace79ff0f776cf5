"""Ask ranks for signs of life while one joins, and then hardly ever.

ipyparallel counts a rank as registered once it has answered a ping. That is all that pings are for
here, for the parent sees a rank end (`controller.arguments`). At a period that is short enough for
a start they took half a per cent of a core for good, and woke three threads of each rank. So pings
follow one another quickly from the moment when somebody connects until everyone has answered, and
otherwise come every few seconds, for a rank that was stopped meanwhile.

Runs in the controller's process for heartbeats, where that is forked. Elsewhere, and should
ipyparallel name its monitor otherwise, it pings at the period that it was told.
"""

import time
from collections.abc import Sequence
from typing import Any

import zmq
from ipyparallel.controller import heartmonitor
from tornado.ioloop import PeriodicCallback
from zmq.eventloop.zmqstream import ZMQStream

JOINING_MS = 30  # between pings while one joins
JOINING_S = 5.0  # after a connection: one that has not answered by then is asked less often
QUIET_MS = 3000  # ipyparallel's own


class JoiningMonitor(heartmonitor.HeartMonitor):  # type: ignore[misc]
    """ipyparallel's monitor of hearts, at two periods."""

    _connected = 0  # how often somebody has, to answer pings
    _joining_until = 0.0

    def start(self) -> None:
        """Begin to ping."""
        self._often = PeriodicCallback(self._ping_joining, JOINING_MS)
        # Before all else: whoever connects from here on is seen.
        events = self.pong_stream.socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._connections = ZMQStream(events)
        self._connections.on_recv(self._has_connected)
        self.period = QUIET_MS
        super().start()

    def handle_pong(self, msg: Sequence[bytes]) -> None:
        """Take an answer; who gives the first one is registered now, not at the next ping."""
        super().handle_pong(msg)
        if new := self.responses - self.hearts:
            self.handle_new_hearts(new)

    def _has_connected(self, _event: Any) -> None:
        self._connected += 1
        self._joining_until = time.monotonic() + JOINING_S
        if not self._often.is_running():
            self._often.start()

    def _ping_joining(self) -> None:
        if len(self.hearts) >= self._connected or time.monotonic() > self._joining_until:
            self._often.stop()
        else:
            self.beat()


def install() -> None:
    """Have the controllers that this process becomes, or forks, ping in this way."""
    heartmonitor.HeartMonitor = JoiningMonitor
