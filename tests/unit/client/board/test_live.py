"""The board's thread while a cell runs: how often it looks, and when it rests."""

import threading
import time
from types import SimpleNamespace
from typing import Any

from nbdist.client.board import live
from nbdist.client.metrics.telemetry import IDLE_S


class Board(live.LiveBoard):
    """Counts what it would show, and says when it has begun to rest."""

    def __init__(self, telemetry: Any) -> None:
        super().__init__(telemetry, None, None, None, "ranks")  # type: ignore[arg-type]
        self.words: list[float] = []
        self.has_words = threading.Semaphore(0)

    def _load(self) -> None:
        pass

    def _look(self) -> Any:
        return None

    def _show_words(self, scene: Any) -> None:
        self.words.append(time.monotonic())
        self.has_words.release()

    def _draw(self) -> None:
        pass


def test_of_a_training_that_is_quiet_words_are_renewed_once_a_second() -> None:
    quiet = SimpleNamespace(count=7, trained_s=time.monotonic() - IDLE_S)
    board = Board(quiet)
    board._shown.set()
    for _ in range(3):
        assert board.has_words.acquire(timeout=30)
    board.stop()
    apart = [later - sooner for sooner, later in zip(board.words, board.words[1:], strict=False)]
    assert min(apart) >= 0.9 * live.WORDS_S
