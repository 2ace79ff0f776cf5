"""Token after token out of a module that has no `generate`: `model(ids)` returns logits.

Each forward gets the whole sequence, for such a module has no cache.
"""

# B batch, T sequence, V vocabulary

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.shared.errors import LayoutError


class Streamer(Protocol):
    """What is given tokens as they are made; see `StreamedText`."""

    def put(self, tokens: Tensor) -> None:
        """Take tokens."""

    def end(self) -> None:
        """There are no more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the next token is chosen, by the names of transformers.

    Attributes:
        max_new_tokens: The most that are made.
        do_sample: Whether it is drawn, or the most likely one.
        temperature: By which logits are divided before.
        top_k: Of how many it is drawn; None or 0: of all.
        eos_token_id: Ends a sequence; None: nothing does.
        pad_token_id: What follows its end; None: `eos_token_id`.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        wrong = {
            "temperature": self.do_sample and not self.temperature > 0,
            "top_k": self.top_k is not None and self.top_k < 0,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise LayoutError(
                    f"layout.generate got {name}={getattr(self, name)!r}.",
                    do="give a number above 0; do_sample=False takes the most likely token"
                    if name == "temperature"
                    else "give of how many tokens it is drawn; 0 or None: of all",
                )

    def next_of(self, logits_BV: Tensor) -> Tensor:
        """Return the next token of each sequence, (B,)."""
        if not self.do_sample:
            return logits_BV.argmax(-1)
        scores_BV = logits_BV.float() / self.temperature
        if self.top_k:
            least = scores_BV.topk(min(self.top_k, scores_BV.shape[-1])).values[:, -1:]
            scores_BV = scores_BV.masked_fill(scores_BV < least, -torch.inf)
        return torch.multinomial(scores_BV.softmax(-1), 1).squeeze(1)


@torch.no_grad()
def run(
    call: Callable[[Tensor], Any],
    ids_BT: Tensor,
    choice: Choice,
    *,
    streamer: Streamer | None,
    is_synced: bool,
) -> Tensor:
    """Return the sequences with what was made of them, (B, T).

    Args:
        call: The model.
        ids_BT: What they begin with.
        choice: Of the next token.
        streamer: Is given what is there, and each token.
        is_synced: Have all ranks make as many forwards as the one that makes most. Collective.

    Raises:
        LayoutError: The model does not return logits.
    """
    ended_B = torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)
    ending = choice.eos_token_id
    padding = ending if choice.pad_token_id is None else choice.pad_token_id
    goes_on, made = choice.max_new_tokens > 0, 0
    if streamer is not None:
        streamer.put(ids_BT.cpu())
    while _any_rank(goes_on, ids_BT.device) if is_synced else goes_on:
        logits_BV = _last_logits(call(ids_BT), ids_BT)
        if not goes_on:
            continue  # another rank's forward needs this one
        next_B = choice.next_of(logits_BV)
        if ending is not None:
            next_B = next_B.masked_fill(ended_B, padding or 0)
            ended_B |= next_B == ending
        ids_BT = torch.cat([ids_BT, next_B[:, None]], 1)
        if streamer is not None:
            streamer.put(next_B.cpu())
        made += 1
        goes_on = made < choice.max_new_tokens and not bool(ended_B.all())
    if streamer is not None:
        streamer.end()
    return ids_BT


def _last_logits(out: Any, ids_BT: Tensor) -> Tensor:
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or len(logits) != len(ids_BT):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise LayoutError(
            f"The model returned {found} where logits (batch, sequence, vocabulary) are needed.",
            why="a module without transformers' generate is called as model(ids)",
            do="have forward return them when it gets the ids alone",
        )
    return logits[:, -1]


def _any_rank(goes_on: bool, device: torch.device) -> bool:
    """Return whether any rank goes on. Collective."""
    count = torch.tensor(float(goes_on), device=device)
    dist.all_reduce(count)
    return bool(count)
