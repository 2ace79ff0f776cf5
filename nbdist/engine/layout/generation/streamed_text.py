"""Print the text of a sequence while it is generated: as a streamer of transformers is called."""

from typing import Any, Protocol

import torch


class Tokenizer(Protocol):
    """What makes text of tokens; each tokenizer of transformers does."""

    def decode(self, ids: Any, /) -> str:
        """Return the text of a list of tokens."""


class StreamedText:
    """The text of the first sequence of a batch, printed as far as it is certain.

    All ranks are given the tokens, and one shows them. What a later token may still change, the
    first bytes of a character, waits for it.
    """

    def __init__(self, tokenizer: Any, *, is_shown: bool) -> None:
        self._tokenizer = tokenizer
        self._options = (
            {"skip_special_tokens": True} if hasattr(tokenizer, "all_special_ids") else {}
        )
        self._is_shown = is_shown
        self._ids: list[int] = []
        self._printed = ""

    def put(self, tokens: torch.Tensor) -> None:
        """Take what was given, (B, T), or the next token of each sequence, (B,)."""
        if self._is_shown:
            self._ids += tokens[0].reshape(-1).tolist()
            self._print(self._text().rstrip("\ufffd"))

    def end(self) -> None:
        """Print the rest, and end the line."""
        if self._is_shown:
            self._print(self._text())
            print("" if self._printed.endswith("\n") else "\n", end="", flush=True)

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, **self._options))

    def _print(self, text: str) -> None:
        if text.startswith(self._printed):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text
