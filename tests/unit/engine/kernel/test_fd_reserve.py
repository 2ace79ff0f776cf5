"""Descriptors kept back for recoveries."""

import os
import resource
from collections.abc import Iterator

import pytest

from nbdist.engine.kernel import fd_reserve


@pytest.fixture
def few_descriptors() -> Iterator[list[int]]:
    """This process may open little more than it has, and has opened all of it."""
    fd_reserve.here.fill()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 10, hard))
    opened: list[int] = []
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        fd_reserve.here.release()


def test_what_is_kept_back_is_there_when_nothing_else_is(few_descriptors: list[int]) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        os.listdir("/dev/fd")
    fd_reserve.here.release()
    few_descriptors += [os.open(os.devnull, os.O_RDONLY) for _ in range(fd_reserve.COUNT)]


def test_less_is_held_where_there_is_less(few_descriptors: list[int]) -> None:
    fd_reserve.here.release()
    few_descriptors += [os.open(os.devnull, os.O_RDONLY) for _ in range(fd_reserve.COUNT - 1)]
    fd_reserve.here.fill()
    fd_reserve.here.release()
    os.close(os.open(os.devnull, os.O_RDONLY))
