"""How far a rank has come in a turn that a fault has ended. Plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbdist.engine.steps.followers.numbers import Number


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come in the turn that a fault has ended. Plain, but for its numbers.

    Attributes:
        has_stepped: An optimizer has stepped in it.
        lacking: What is due, has not moved, and should have, where one has.
        unknown: What may be lacking: the cell may change it, and no turn before shows when.
        optimizers: Of what is lacking: nothing can be made up for them once gradients are gone.
        ahead: What moves with the steps and has moved though none has stepped.
        did: What has moved with the newest step: in this turn, or in the one before it.
        kinds: Of all that is followed, the class; of numbers, "".
        began: The numbers that move with the steps, as this turn began.
        before: The same as the turn before began.
        now: The same as they are.
        stepped: The optimizers that have stepped in it.
        written: What the loop changes in weights after a step, where it does.
        is_open: An optimizer has stepped in it, and more of the loop's body was to come.
        beyond: What is not looked at, and may move with the steps.
    """

    has_stepped: bool = False
    lacking: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    did: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    began: Mapping[str, Number] = field(default_factory=dict)
    before: Mapping[str, Number] = field(default_factory=dict)
    now: Mapping[str, Number] = field(default_factory=dict)
    stepped: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    is_open: bool = False
    beyond: tuple[str, ...] = ()
