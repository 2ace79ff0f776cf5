"""A rule on models of which one rank computes in another mode: train() here, eval() there."""

from nbdist.client.metrics.checks.planting import rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Step, Uses, where_told
from nbdist.shared.text import name_ranks


def _by_evaluating(step: Step) -> dict[float, list[int]]:
    """Return ranks by how many modules evaluate in a step, where that differs; else nothing.

    Ranks with other modules are not compared: a stage of a pipeline may freeze its statistics.
    """
    groups: dict[tuple[float, float], dict[float, list[int]]] = {}
    for rank, count in step.of("in_eval").items():
        values = step.by_rank[rank]
        if "part" in values:  # of a model that is spread, and not of one that a rank has alone
            alike = values["modal_names"], values.get("shared_by", -1.0)
            groups.setdefault(alike, {}).setdefault(count, []).append(rank)
    return next((found for found in groups.values() if len(found) > 1), {})


@where_told("in_eval")
def _differs(seen: Seen) -> str:
    apart = [_by_evaluating(step) for step in seen.steps]
    if len(apart) < 2 or not all(apart[-2:]):
        return ""
    (least, usual), *_, (most, ranks) = sorted(apart[-1].items())
    count = int(seen.last.by_rank[ranks[0]]["modal"])
    fewer = f"{int(least)} of them" if least else "none"
    return (
        "Ranks train one model in different modes: of the modules that act by their mode, as "
        f"dropout and batch norm do, {name_ranks(sorted(ranks))} had {int(most)} of {count} in "
        f"evaluation mode at step {seen.last.number:,}, and {name_ranks(sorted(usual))} {fewer}. "
        "Call model.train() on all ranks before they train, also after a model.eval() that some "
        "of them make alone."
    )


_MODEL = """model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
nbdist.parallelize(model, "ddp")
torch.manual_seed(1 + rank)
if rank == 0:
    model.eval()
    print(model(torch.ones(1, 4)).sum().item())"""
_MODES = {"part": 0, "parts": 2, "modal": 3, "modal_names": 7}

ONE_RANK_IN_EVAL = Rule(
    "one-rank-in-eval",
    "some ranks train a model in evaluation mode, and others in training mode",
    Uses,
    _differs,
    remedy="Call model.train() on all ranks before they train.",
    planted=rows("use", _MODES | {"in_eval": 3}, _MODES | {"part": 1, "in_eval": 0}, (2, 5)),
    sound=rows("use", _MODES | {"in_eval": 1}, _MODES | {"part": 1, "in_eval": 1}, (2, 5)),
    example=training(_MODEL),
    mended=training(f"{_MODEL}\nmodel.train()"),
    sources=(
        "https://github.com/shubhamagarwal92/mmd/issues/14",
        "https://github.com/pytorch/tutorials/issues/1624",
        "https://github.com/tk-rusch/coRNN/issues/1",
    ),
)
