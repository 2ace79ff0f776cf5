"""What a pod writes comes out at once, in whatever order its frames arrive."""

from typing import Any

import pytest
from kubernetes.stream.ws_client import WSClient

from nbdist.host.kubernetes import pod_exec


class Stream(WSClient):
    """The client's own reading of channels, over frames that have arrived."""

    def __init__(self, *frames: tuple[int, bytes]) -> None:
        self.binary = True
        self._connected = True
        self._channels: dict[int, bytes] = {}
        self._closed_channels: set[int] = set()
        self._frames = list(frames)

    def update(self, timeout: float | None = 0) -> None:
        if self._frames:
            channel, data = self._frames.pop(0)
            self._channels[channel] = self._channels.get(channel, b"") + data
        elif timeout is None:
            raise TimeoutError("there is no other frame to wait for")


def test_an_answer_that_comes_with_another_is_not_left_until_the_next(capfd: Any) -> None:
    stream = Stream((1, b"hello\n"), (1, b"listening\n"))
    assert pod_exec._pass_output(stream) == 255
    out, err = capfd.readouterr()
    assert out == "hello\nlistening\n"
    assert err == "the stream of the pod ended: there is no other frame to wait for\n"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_both_channels_come_out(order: tuple[int, int], capfd: Any) -> None:
    frames = [(channel, b"out\n" if channel == 1 else b"err\n") for channel in order]
    pod_exec._pass_output(Stream(*frames))
    out, err = capfd.readouterr()
    assert out == "out\n"
    assert err.startswith("err\n")
