"""Say what was recorded, in a sentence. Pure."""

from collections.abc import Mapping, Sequence

from nbdist.client.metrics.profile.chosen import ChosenSteps, name_steps
from nbdist.shared.text import begin_with_ranks, counted

HOW_TO_OPEN = "https://ui.perfetto.dev or chrome://tracing opens it"

_ENDS = {
    "cell": "the cell ended",
    "limit": "recording ended because it took too long",
    "memory": "recording ended because it used too much memory",
    "own": "the cell started its own profiler",
}


def what_was_recorded(
    chosen: ChosenSteps,
    recorded: Mapping[int, tuple[Sequence[int], str]],
    missing: Mapping[int, str],
    steps_made: int,
) -> str:
    """Return what the traces hold, in sentences.

    Args:
        chosen: The steps that were asked for.
        recorded: Rank to the steps it recorded whole, and how its recording ended.
        missing: Ranks without a trace, and why, where that is known.
        steps_made: Optimizer steps of the cell, of the rank that made most.
    """
    if not recorded:
        return _nothing(chosen, missing, steps_made)
    steps, end = max(recorded.values(), key=lambda one: len(one[0]))
    said = _recorded(chosen, steps, end, steps_made)
    for why in dict.fromkeys(missing.values()):
        ranks = [rank for rank, text in missing.items() if text == why]
        said += f" {begin_with_ranks(ranks)} recorded no trace{f' ({why})' if why else ''}."
    return said


def _nothing(chosen: ChosenSteps, missing: Mapping[int, str], steps_made: int) -> str:
    whys = list(dict.fromkeys(why for why in missing.values() if why))
    if whys:
        return f"Nothing was recorded: {'; '.join(whys)}."
    if 0 < steps_made < chosen.first:
        ended = f"The cell ended after {counted(steps_made, 'step')}"
        return f"{ended}, so {chosen} could not be recorded."
    return "Nothing was recorded, because no rank finished a recording."


def _recorded(chosen: ChosenSteps, steps: Sequence[int], end: str, steps_made: int) -> str:
    if len(steps) == chosen.last - chosen.first + 1:
        said = f"{str(chosen).capitalize()} were recorded" if len(steps) > 1 else ""
        said = said or f"{str(chosen).capitalize()} was recorded"
        return f"{said}, which adds overhead."
    why = _ENDS[end]
    if steps:
        done = name_steps(range(steps[0], steps[-1] + 1))
        return f"Of {chosen}, {done} {'were' if len(steps) > 1 else 'was'} recorded, then {why}."
    if steps_made >= chosen.first - 1 and steps_made > 0:
        return f"Step {chosen.first} was recorded until {why}."
    whole = "only its beginning was recorded" if end == "limit" else "all of it was recorded"
    return f"The cell made no step, so {whole}."
