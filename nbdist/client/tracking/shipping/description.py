"""What a run's page in MLflow says of it: the board's picture, numbers, verdict, layout, proof.

MLflow shows the tag `mlflow.note.content` as Markdown. It sanitizes it: a picture may have an
address and no size, so `board.png` is as large as it is to be shown. Pure.
"""

from collections.abc import Collection, Mapping, Sequence

from nbdist.client.metrics.analysis.values import RECENT
from nbdist.client.tracking.shipping import view
from nbdist.shared.text import counted, figure

TAG = "mlflow.note.content"
RUN_ID, EXPERIMENT_ID = "{run_id}", "{experiment_id}"  # whoever sends the run knows them
MOST_CHARACTERS = 4700  # below the least limit that MLflow's stores have for a tag: ids are longer
_BREAK = "  \n"  # a new line of the same paragraph
_SIGNS = str.maketrans({sign: "\\" + sign for sign in "\\`*_[]<>#$|~"})


def description(
    outcome: str,
    steps: int,
    values: Mapping[str, float],
    facts: Mapping[str, str],
    verdicts: Sequence[str],
    changes: Sequence[str] = (),
    *,
    keys: Collection[str] = (),
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
        changes: What was changed by hand, in words.
        keys: Its metrics in MLflow.
        attempt: Which attempt at its cell it is; those before it have failed.
        has_picture: Whether `board.png` is among its artifacts.
    """
    links = _links(keys)
    picture = (
        [f"![The board](get-artifact?path=board.png&run_uuid={RUN_ID})"] if has_picture else []
    )
    room = MOST_CHARACTERS - sum(map(len, [*picture, *links]))  # no address is cut
    ended = _ended(outcome, steps, values, verdicts, attempt)[:room]
    made = _made(facts, changes)[: room - len(ended)]
    return "\n\n".join([*picture, ended, *([made] if made else []), *links])


def addressed(text: str, run_id: str, experiment_id: str) -> str:
    """Return a description whose addresses are those of MLflow."""
    return text.replace(RUN_ID, run_id).replace(EXPERIMENT_ID, experiment_id)


def _ended(
    outcome: str, steps: int, values: Mapping[str, float], verdicts: Sequence[str], attempt: int
) -> str:
    """Return what a run came to, and below it who made others wait."""
    first = [f"**{_escaped(sentence)}**" for sentence in verdicts]
    if not first and steps >= RECENT and values.get("wait_pct") is not None:
        first = [f"No rank stands out over the last {RECENT} steps."]
    numbers = ", ".join([counted(steps, "step"), *_numbers(values)])
    again = f" in attempt {attempt} ({attempt - 1} failed before)" if attempt > 1 else ""
    return _BREAK.join([f"{outcome.capitalize()}{again} after {numbers}.", *first])


def _made(facts: Mapping[str, str], changes: Sequence[str]) -> str:
    """Return what a run's ranks and layout are, and what was changed by hand."""
    ranks = counted(int(facts.get("world_size", 1)), "rank")
    layout = facts.get("layout")
    said = [f"**Layout:** {_escaped(layout)} on {ranks}" if layout else f"**Ranks:** {ranks}"]
    if changes:
        said.append(f"**Changed by hand:** {_escaped('; '.join(changes))}")
    if proof := facts.get("proof"):
        said.append(f"**Proof** (`layout.verify`): {_escaped(proof)}")
    return "\n\n".join(said)


def _links(keys: Collection[str]) -> list[str]:
    """Return where a run's ranks stand in one chart, and where all runs do."""
    pages = view.rank_pages(RUN_ID, EXPERIMENT_ID, keys)
    ranks = ", ".join(_link(quantity, page) for quantity, page in pages.items())
    # A run's page forgets that its site is MLflow's for training, and not the one for language
    # models; this link leads back.
    back = _link("Charts of all runs", view.page(EXPERIMENT_ID))
    return [f"**Ranks in one chart:** {ranks}", back] if ranks else [back]


def _link(text: str, page: str) -> str:
    return f"[{text}]({page.lstrip('/')})"


def _numbers(values: Mapping[str, float]) -> list[str]:
    """Return a run's numbers with the digits that the board gives them."""
    texts = []
    if "loss" in values:
        texts.append(f"last loss {figure(values['loss'])}")
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
