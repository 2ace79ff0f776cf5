"""What this rank's experts computed in the step that is being made: who spreads them notes it.

Numbers that the host has already, so that nothing waits for a GPU. Forwards that train alone count,
each once: not those of an evaluation, nor those that a checkpoint of activations runs again.
"""

EVERY_NS = 1_000_000_000
MOST = 256  # experts told of one by one; of more, each second mixture's, or each third's


class ExpertLoad:
    """The tokens of this rank's experts since the newest step ended. Main thread."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, list[int]]] = {}  # the first expert's number, and tokens
        self._even = 0.0
        self._next_ns = 0

    def note(self, mixture: str, first: int, counts: list[int], even: float) -> None:
        """Note a forward of some experts of a mixture.

        Args:
            mixture: The qualified name of the module.
            first: The number of the first of them.
            counts: Tokens of each.
            even: Tokens of all of them, had all ranks as many.
        """
        known_first, known = self._counts.get(mixture, (first, []))
        if (known_first, len(known)) != (first, len(counts)):  # nothing, or of another layout
            known = [0] * len(counts)
        self._counts[mixture] = first, [a + b for a, b in zip(known, counts, strict=True)]
        self._even += even

    def begin_cell(self) -> None:
        """Begin a cell: its first step tells of each expert."""
        self.forget()
        self._next_ns = 0

    def forget(self) -> None:
        """Forget the step that is being made."""
        self._counts, self._even = {}, 0.0

    def take(self, now_ns: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the values of a step's record, and of one of kind "experts"; begin again.

        The second is empty less than a second after the last one; both are where no forward was.
        """
        counts, even = self._counts, self._even
        self.forget()
        if not counts:
            return {}, {}
        tokens = float(sum(sum(of) for _, of in counts.values()))
        values = {"expert_tokens": tokens, "expert_even": even}
        if now_ns < self._next_ns:
            return values, {}
        self._next_ns = now_ns + EVERY_NS
        every = -(-sum(len(of) for _, of in counts.values()) // MOST)
        return values, {
            f"{mixture}:{first + place}": float(count)
            for mixture, (first, of) in list(counts.items())[::every]
            for place, count in enumerate(of)
        }


here = ExpertLoad()
