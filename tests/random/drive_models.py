"""Make, train, keep and drop the models of a trial; the shadow follows."""

from collections.abc import Sequence
from dataclasses import replace

from tests.random import cells, training
from tests.random.acts import Drop, Keep, Make, Model, Train, whole_epochs
from tests.random.calls import Ran
from tests.random.expected import within
from tests.random.held import OPTIMIZER_REFUSED, REFUSED
from tests.random.shadow import Shadow
from tests.random.world import World


def make(world: World, models: Sequence[Model]) -> None:
    """Make models in one cell."""
    members = [world.members(model) for model in models]
    world.calls.row.layout = models[0].layout
    world.held.forget(models)
    world.calls.ran_well(cells.make(models, members))
    for model, ranks in zip(models, members, strict=True):
        world.models[model.name] = model
        shadow = Shadow(model, ranks)
        world.held.bind(
            model.name, {rank: shadow if rank in ranks else None for rank in range(world.n)}
        )


def train(world: World, act: Train) -> None:
    """Train models while a fault may strike, and judge what came of it."""
    shadows = _trained(world, act)
    if not shadows:
        return
    calls, first = world.calls, shadows[0]
    fault = within(act.fault, first.members, world.n)
    calls.row.layout, calls.row.fault = first.model.layout, fault.kind
    begins = [s.made for s in shadows]
    steps = act.steps
    if first.model.data == "loader":
        steps = whole_epochs(begins[0] + steps) - begins[0]
    if act.noise:
        calls.ran_well(cells.seed(act.noise))
    models = [s.model for s in shadows]
    code = cells.train(
        models, first.members, begins, steps, fault, calls.flag, act.style, act.noise
    )
    ran = calls.run(code, fault, retry=act.retry)
    attempts = 1 + act.retry
    must_retry = act.again or act.style != "apart" or first.model.data == "loader"
    if ran.error is not None and must_retry and not ran.is_refusal:
        ran = _again(world, act, code)
        attempts += 1
    ended = training.Ended(
        act, fault, shadows, steps, ran, attempts, world.replacements(), world.is_uneven
    )
    # Of a model that each attempt makes anew ranks may hold the one of either, or none.
    if act.style != "together" or ran.error is None:
        if act.model is not None:
            world.held.bind(act.model.name, dict.fromkeys(range(world.n), first))
        training.follow(ended, calls, world.held)
    training.judge(ended, calls, world.held)


def keep(world: World, act: Keep) -> None:
    """Let ranks keep a second name of a model."""
    ranks = _holding(world, act.of, act.ranks)
    if not ranks:
        return
    world.is_uneven |= len(ranks) < world.n
    world.calls.ran_well(f"if rank in {ranks}: {act.name}, o_{act.name} = {act.of}, o_{act.of}")
    by_rank = world.held.names[act.of]
    world.held.bind(act.name, {r: by_rank.get(r) if r in ranks else None for r in range(world.n)})


def drop(world: World, act: Drop) -> None:
    """Let ranks delete the names of a model."""
    ranks = _holding(world, act.name, act.ranks)
    if not ranks:
        return
    world.is_uneven = True
    world.calls.ran_well(cells.drop(act.name, ranks))
    world.held.unbind(act.name, ranks)


def _trained(world: World, act: Train) -> list[Shadow]:
    """Return what a cell trains: models that are there, or the one that it makes."""
    if act.model is None:
        ready = [_ready(world, name) for name in act.names]
        shadows = [shadow for shadow in ready if shadow is not None]
        return [s for s in shadows if s.members == shadows[0].members]
    model = _on(world.n, act.model)
    world.models[model.name] = model
    world.held.forget([model])
    return [Shadow(model, world.members(model))]


def _ready(world: World, name: str) -> Shadow | None:
    """Return a model to train, made again where it was refused, or not all ranks hold it."""
    shadow = world.held.common(name)
    if shadow is not None and shadow.trouble == OPTIMIZER_REFUSED:
        world.driven.story.append(f"### the optimizer of {name} again")
        world.calls.ran_well(cells.make_optimizer(shadow.model))
        shadow.renew_optimizer()
        shadow.trouble = ""
    elif (shadow is None or shadow.trouble == REFUSED) and name in world.models:
        model = _on(world.n, world.models[name])
        row = world.calls.row
        world.begin(Make((model,)))
        make(world, (model,))
        world.look()
        world.calls.row = row
        shadow = world.held.common(name)
    return shadow


def _on(n: int, model: Model) -> Model:
    """Return a model with a layout that `n` ranks can have."""
    return model if model.spread.n in (None, n) else replace(model, layout="zero3")


def _again(world: World, act: Train, code: str) -> Ran:
    if act.again == "by hand":
        return world.calls.run(code)
    return world.calls.call(world.session.retry)


def _holding(world: World, name: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return those ranks that hold a name; none, where it is not sure what it means."""
    by_rank = world.held.names.get(name)
    if by_rank is None or name in world.held.unsure:
        return ()
    return tuple(r for r in ranks if r < world.n and by_rank.get(r) is not None)
