"""A rule on parameters that a model has got after its optimizer was made."""

from nbdist.client.metrics.checks.planting import both, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Uses, where_told
from nbdist.shared.text import name_ranks

_NAMED = "unowned:"


@where_told("unowned")
def _has_no_optimizer(seen: Seen) -> str:
    found = seen.last.of("unowned")
    if not found:
        return ""
    ranks = sorted(found)
    names = [n for n in seen.last.by_rank[ranks[0]] if n.startswith(_NAMED)]
    name, count = names[0].removeprefix(_NAMED), int(found[ranks[0]])
    more = f" and {count - 1} more" if count > 1 else ""
    on = "" if len(ranks) == len(seen.last.by_rank) else f" on {name_ranks(ranks)}"
    get, them = ("get", "them") if more else ("gets", "it")
    if seen.last.of("frozen"):
        return (
            f"{name}{more} {get} gradients{on}, and the optimizer that steps has only what is "
            f"frozen: until step {seen.last.number:,} nothing has changed {them}. Another adapter "
            "or part is trained now than when it was made: step the one that was made for it."
        )
    return (
        f"{name}{more} {get} gradients{on}, and no optimizer has {them}: until step "
        f"{seen.last.number:,} nothing has changed {them}. The model has got or thawed {them} "
        "after its optimizer was made. Make the optimizer then, or give it the new ones by "
        "optimizer.add_param_group."
    )


_MODEL = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))"
_HEAD = "model[1] = torch.nn.Linear(4, 2)"
_OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
_SPREAD = 'nbdist.parallelize(model, "ddp")\n'
_MENDED = training(f"model = {_MODEL}\n{_HEAD}\n{_SPREAD}".rstrip())

PARAMETERS_WITHOUT_OPTIMIZER = Rule(
    "parameters-without-optimizer",
    "a model has got or thawed parameters after its optimizer was made, and they never step",
    Uses,
    _has_no_optimizer,
    remedy="Make the optimizer once the model is complete, or give it what is new.",
    planted=both("use", (5,), unowned=2, **{"unowned:1.weight": 1}),
    sound=both("use", (5,)),
    example=_MENDED.replace(_OPTIMIZER, "").replace(_HEAD, f"{_OPTIMIZER}{_HEAD}"),
    mended=_MENDED,
    sources=(
        "https://github.com/pytorch/pytorch/issues/14467",
        "https://github.com/huggingface/pytorch-openai-transformer-lm/pull/6",
    ),
)
