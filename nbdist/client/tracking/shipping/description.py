"""What a run's page in MLflow says of it: verdict, numbers, layout, proof, and the board's picture.

MLflow shows the tag `mlflow.note.content` as Markdown. It sanitizes it: a picture may have an
address and no size, so `board.png` is as large as it is to be shown. Pure.
"""

from collections.abc import Mapping, Sequence

from nbdist.client.metrics.analysis.values import RECENT
from nbdist.client.tracking.shipping import view
from nbdist.shared.text import counted, figure

TAG = "mlflow.note.content"
RUN_ID, EXPERIMENT_ID = "{run_id}", "{experiment_id}"  # whoever sends the run knows them
MOST_CHARACTERS = 4000  # below the least limit that MLflow's stores have for a tag
_BREAK = "  \n"  # a new line of the same paragraph
_SIGNS = str.maketrans({sign: "\\" + sign for sign in "\\`*_[]<>#$|~"})


def description(
    outcome: str,
    steps: int,
    values: Mapping[str, float],
    facts: Mapping[str, str],
    verdicts: Sequence[str],
    *,
    attempt: int = 1,
    has_picture: bool,
) -> str:
    """Return a run's description, in Markdown.

    Args:
        outcome: "finished", "failed" or "interrupted".
        steps: How many it made.
        values: Its last numbers, by their names in MLflow.
        facts: What is known of its ranks, such as `layout` and `proof`, and `world_size`.
        verdicts: Who made others wait, in sentences.
        attempt: Which attempt at its cell it is; those before it have failed.
        has_picture: Whether `board.png` is among its artifacts.
    """
    first = [f"**{_escaped(sentence)}**" for sentence in verdicts]
    if not first and steps >= RECENT and values.get("wait_pct") is not None:
        first = [f"No rank stands out over the last {RECENT} steps."]
    numbers = ", ".join([counted(steps, "step"), *_numbers(values)])
    again = f" in attempt {attempt} ({attempt - 1} failed before)" if attempt > 1 else ""
    # A run's page folds all behind three lines: numbers take the first one, the verdict follows.
    said = [_BREAK.join([f"{outcome.capitalize()}{again} after {numbers}.", *first])]
    ranks = counted(int(facts.get("world_size", 1)), "rank")
    layout = facts.get("layout")
    said.append(f"**Layout:** {_escaped(layout)} on {ranks}" if layout else f"**Ranks:** {ranks}")
    if proof := facts.get("proof"):
        said.append(f"**Proof** (`layout.verify`): {_escaped(proof)}")
    text = "\n\n".join(said)[:MOST_CHARACTERS]
    # A run's page forgets that its site is MLflow's for training, and not the one for language
    # models; this link leads back.
    text += f"\n\n[Charts of all runs]({view.page(EXPERIMENT_ID).lstrip('/')})"
    if has_picture:
        text += f"\n\n![The board](get-artifact?path=board.png&run_uuid={RUN_ID})"
    return text


def addressed(text: str, run_id: str, experiment_id: str) -> str:
    """Return a description whose addresses are those of MLflow."""
    return text.replace(RUN_ID, run_id).replace(EXPERIMENT_ID, experiment_id)


def _numbers(values: Mapping[str, float]) -> list[str]:
    """Return a run's numbers with the digits that the board gives them."""
    texts = []
    if "loss" in values:
        texts.append(f"loss {figure(values['loss'])}")
    if "step_ms" in values:
        texts.append(f"{figure(values['step_ms'])} ms per step")
    if "comm_pct" in values:
        texts.append(f"{values['comm_pct']:.0f} % of it in communication")
    if values.get("data_pct", 0.0) >= 20:
        texts.append(f"{values['data_pct']:.0f} % waiting for data")
    return texts


def _escaped(text: str) -> str:
    """Return a text so that Markdown shows it as it is."""
    return " ".join(text.split()).translate(_SIGNS)
