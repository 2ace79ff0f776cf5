"""The names that ranks have, as rank 0 reports them, or last reported while it is silent.

Any thread. Rank 0 answers on its control thread, also while a cell runs; only C code that keeps
the GIL, or a stopped process, makes it silent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbdist.client.cluster.requests import PendingReply, Requests
from nbdist.shared.errors import NBDistError

_TIMEOUT_S = 0.5
_MOST_REMEMBERED = 100  # answers


class RankNames:
    """Requests of completion and help to rank 0, with a cache of its newest answers."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._remembered: dict[tuple[str, str], Any] = {}  # the one used last is last

    def members(self, path: str, timeout_s: float = _TIMEOUT_S) -> Mapping[str, str]:
        """Return the names after `path.` with their kinds; after "", the names of cells."""

        def ask() -> PendingReply:
            return self._requests.ask(0, "names.members", busy=True, path=path)

        answer: Mapping[str, str] = self._answer(("members", path), ask, timeout_s) or {}
        return answer

    def describe(self, path: str) -> str:
        """Return signature, type and docstring of a dotted name; "" when it is not known."""

        def ask() -> PendingReply:
            return self._requests.ask(0, "names.describe", busy=True, path=path)

        return self._answer(("describe", path), ask, _TIMEOUT_S) or ""

    def layout_words(self) -> Sequence[str]:
        """Return what the text of a layout is written of."""

        def ask() -> PendingReply:
            return self._requests.ask(0, "layout.words", busy=True)

        answer: Sequence[str] = self._answer(("layout", ""), ask, _TIMEOUT_S) or ()
        return answer

    def _answer(
        self, key: tuple[str, str], ask: Callable[[], PendingReply], timeout_s: float
    ) -> Any:
        pending = None
        try:
            pending = ask()
            answer = pending.result(timeout_s)
        except (TimeoutError, NBDistError):
            if pending is not None:
                pending.cancel()
            answer = self._remembered.get(key)
        # Another thread's completion may have changed it meanwhile: that costs an answer at most.
        self._remembered.pop(key, None)
        if answer:
            self._remembered[key] = answer
        for oldest in list(self._remembered)[:-_MOST_REMEMBERED]:
            self._remembered.pop(oldest, None)
        return answer
