"""What nbdist says in a trial, held against what is so. Pure: texts and plain values."""

import re
from collections.abc import Collection, Iterator

from tests.random.acts import GLOBAL_BATCH, STEPS_OF_EPOCH, Fault

_LOST = re.compile(r"Ranks? [\d, -]+(?:and \d+ )?had lost step (\d+)[^\n]*?copied the model[^.]*")
_OURS = re.compile(r"[^\n]*nbdist[/\\](?:client|engine|host)[/\\][\w/\\]+\.py[^\n]*")
_AT_STEP = re.compile(r"at step (\d+)")
_PLACE = re.compile(r"The cell continues: its loader is at sample ([\d,]+) of epoch (\d+)[^\n]*")
_START_OVER = "The cell starts over: it creates its optimizer again"
_SIGNALS = {
    "SIGKILL": "SIGKILL",
    "SIGSEGV": "SIGSEGV",
    "SIGABRT": "SIGABRT",
    "two ranks killed": "SIGKILL",
    "second in the repair": "SIGKILL",
}


def plain(text: str) -> str:
    """Return a text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def raw(text: str) -> list[str]:
    """Return the lines that show nbdist's own frames, which explain nothing to a user."""
    return _OURS.findall(text)


def false_loss(text: str, steps: Collection[int]) -> list[str]:
    """Return the sentences that tell of a lost step when no rank can have lost it.

    Args:
        text: What was said.
        steps: Those that some rank may have made, and another not.
    """
    return [m.group(0) for m in _LOST.finditer(text) if int(m.group(1)) not in steps]


def rolled_back_to(text: str) -> set[int]:
    """Return the steps to which models are told to have gone back, or at which they are to stay."""
    back = re.findall(r"rolled back \d+ steps?, to step (\d+)", text)
    stay = [_AT_STEP.findall(line) for line in re.findall(r"stays as it is, ([^\n]*?),? is ", text)]
    return {int(step) for step in [*back, *(step for steps in stay for step in steps)]}


def false_start_over(text: str, *, is_made: bool) -> list[str]:
    """Return the sentence that a cell makes its optimizer anew, when it does not."""
    return [_START_OVER] if _START_OVER in text and not is_made else []


def false_place(text: str, steps: Collection[int]) -> list[str]:
    """Return the sentences that let a loader go on where no rank can have stood."""
    return list(_false_places(text, {_position(step) for step in steps}))


def _false_places(text: str, right: Collection[tuple[int, int]]) -> Iterator[str]:
    for found in _PLACE.finditer(text):
        consumed, epoch = int(found.group(1).replace(",", "")), int(found.group(2))
        end = STEPS_OF_EPOCH * GLOBAL_BATCH
        at = (epoch + 1, 0) if consumed == end else (epoch, consumed)
        if at not in right:
            yield found.group(0)


def _position(step: int) -> tuple[int, int]:
    epoch, nth = divmod(step, STEPS_OF_EPOCH)
    return epoch, nth * GLOBAL_BATCH


def missing_cause(text: str, fault: Fault) -> list[str]:
    """Return what should be told of a fault that struck, and is not."""
    wanted = []
    if fault.kind in _SIGNALS:
        wanted = [_SIGNALS[fault.kind]]
    elif fault.kind == "raise":
        wanted = ["struck on rank"]
    elif fault.kind.startswith("os._exit"):
        wanted = ["died"]
    elif fault.kind == "sys.exit":
        wanted = ["sys.exit"]
    return [word for word in wanted if word not in text]
