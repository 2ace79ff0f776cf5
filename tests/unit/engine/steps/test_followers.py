"""What moves with the steps is found by what names lead to, and known by when it has moved."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR

from nbdist.engine.steps import keep
from nbdist.engine.steps.followers.code_names import loop_targets, reached, stored
from nbdist.engine.steps.followers.find_followers import search
from nbdist.engine.steps.followers.followers import Followers
from nbdist.engine.steps.followers.history import History
from nbdist.engine.steps.followers.marks import mark
from nbdist.engine.steps.step_state import OptimizerSteps


class Average:
    """As users write it: deep, and without a word of its state."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self.kept = {"weights": {n: p.detach().clone() for n, p in module.named_parameters()}}

    def update(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.kept["weights"][name].data.mul_(0.5).add_(parameter.detach())


class Holder:
    """A user's object that holds others."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


Training = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"model": model, "opt": optimizer}
    monkeypatch.setattr(keep.here, "_names", lambda: names)
    return model, optimizer, names


def found(names: dict[str, Any], optimizer: torch.optim.Optimizer) -> set[str]:
    return set(search({}, names, [optimizer]).followers)


def test_what_names_lead_to_is_found_whatever_its_class(training: Training) -> None:
    model, optimizer, names = training
    names["plain"] = ReduceLROnPlateau(optimizer)
    names["held"] = Holder(
        parts={"a": [SequentialLR(optimizer, [LinearLR(optimizer), LinearLR(optimizer)], [2])]}
    )
    names["ema"] = torch.optim.swa_utils.AveragedModel(model)
    names["average"] = Average(model)
    names["loss"], names["criterion"] = nn.MSELoss(), nn.Linear(2, 2)

    assert found(names, optimizer) == {"plain", "held.parts['a'][0]", "ema", "average", "criterion"}


def test_what_an_optimizer_trains_is_no_follower(training: Training) -> None:
    _, optimizer, names = training
    names["again"] = nn.Sequential(names["model"])

    assert found(names, optimizer) == set()


def test_a_mark_tells_moves_of_deep_tensors_also_past_their_version(training: Training) -> None:
    model, _, _ = training
    average = Average(model)
    before = mark(average)
    assert mark(average) == before
    average.update(model)
    assert mark(average) != before


def test_a_scalers_mark_is_of_its_scale_and_not_of_the_step_that_runs() -> None:
    scaler = torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    before = mark(scaler)
    scaler.step(optimizer)
    assert mark(scaler) == before
    scaler.update()
    assert mark(scaler) != before


@pytest.mark.parametrize(
    ("moves", "turn", "is_due"),
    [
        ([1, 2, 3], 4, True),
        ([2, 4, 6], 7, False),
        ([2, 4, 6], 8, True),
        ([6], 7, False),  # an epoch's, which began with it
        ([6], 12, True),
        ([1, 2, 3], 30, False),  # it has ceased
        ([], 1, True),  # nobody can tell
        ([], 5, False),
    ],
)
def test_what_is_due_is_told_from_when_it_has_moved(
    moves: list[int], turn: int, is_due: bool
) -> None:
    history = History(born=1)
    for moved in moves:
        history = history.after_move(moved)
    assert history.is_due(turn) == is_due


def test_what_moves_with_an_optimizer_is_not_due_where_another_one_steps() -> None:
    history = History(born=1)
    for turn in range(1, 4):
        history = history.after_move(turn, frozenset({"opt"}))
    assert history.is_due(4, frozenset({"opt", "other"}))
    assert not history.is_due(4, frozenset({"other"}))


class Loop:
    """A training that steps, with what a fault leaves undone at its end."""

    def __init__(self, training: Training) -> None:
        self.model, self.optimizer, self.names = training
        self.steps = OptimizerSteps()
        self.all_steps = {self.optimizer: self.steps}
        self.told: list[str] = []
        self.followers = Followers(self.all_steps, self.told.append)
        self.loader = Holder()
        self.followers.begin_cell()

    def step(self) -> None:
        self.followers.gave_batch(self.loader)
        self.followers.before_step(self.steps)
        self.steps.whole += 1
        self.optimizer.step()
        self.followers.after_step(self.steps, self.optimizer)


def test_a_step_lacks_what_is_due_and_has_not_moved(training: Training) -> None:
    loop = Loop(training)
    loop.names.update(sched=ExponentialLR(loop.optimizer, 0.9), n=0, seen=7)
    loop.followers.begin_cell()
    for _ in range(3):
        loop.step()
        loop.names["n"] += 1
        loop.names["sched"].step()
    loop.step()
    loop.names["n"] += 1

    progress = loop.followers.progress()

    assert (progress.has_stepped, progress.lacking) == (True, ("sched",))
    assert (progress.began["n"], progress.now["n"]) == (3, 4)
    assert "seen" not in progress.began
    loop.names["sched"].step()
    assert loop.followers.progress().lacking == ()


def test_numbers_go_back_where_the_turn_has_no_step(training: Training) -> None:
    loop = Loop(training)
    loop.names.update(n=0, i=0)
    loop.followers.begin_cell()
    for i in range(3):
        loop.names["i"] = i
        loop.names["n"] += 1
        loop.step()
    loop.followers.gave_batch(loop.loader)
    loop.names["i"] = 3
    loop.names["n"] += 1
    loop.followers.end_cell("for i in range(9):\n    n += 1", is_failed=True)

    assert loop.followers.progress().ahead == ("n",)  # a loop sets `i` anew
    loop.followers.put_numbers({"n": loop.followers.progress().began["n"]})
    assert (loop.names["n"], loop.names["i"]) == (3, 3)


def test_numbers_of_the_first_turn_go_back_to_its_batch_though_they_never_moved(
    training: Training,
) -> None:
    loop = Loop(training)
    loop.names.update(n=0, tries=0, world_size=3)
    loop.followers.begin_cell()
    loop.names["tries"] = 1  # before the loop: run again, the cell does it again
    loop.followers.gave_batch(loop.loader)
    loop.names["n"] = 1
    loop.names["world_size"] = 2  # not the cell's: ranks have come or gone
    loop.followers.end_cell("tries += 1\nfor x in loader:\n    n += 1", is_failed=True)

    progress = loop.followers.progress()
    assert (progress.ahead, progress.began["n"]) == (("n",), 0)


RATE = "opt.param_groups[0]['lr']"
HALVE = "for g in opt.param_groups: g['lr'] *= 0.5"


def test_a_rate_that_the_loop_sets_is_lacking_until_it_is_set(training: Training) -> None:
    loop = Loop(training)
    for _ in range(3):
        loop.step()
        exec(HALVE, loop.names)
    loop.step()

    assert loop.followers.progress().lacking == (RATE,)
    exec(HALVE, loop.names)
    assert loop.followers.progress().lacking == ()


def test_a_rate_goes_back_where_the_turn_has_no_step_from_the_first_on(training: Training) -> None:
    loop = Loop(training)
    for rate in (0.1, 0.05):
        loop.followers.gave_batch(loop.loader)
        exec(HALVE, loop.names)
        loop.followers.look()
        progress = loop.followers.progress()
        assert (progress.ahead, progress.began[RATE]) == ((RATE,), rate)
        loop.followers.put_numbers({RATE: rate})
        assert loop.optimizer.param_groups[0]["lr"] == rate
        exec(HALVE, loop.names)
        loop.step()


def test_of_an_optimizer_with_a_scheduler_the_scheduler_alone_is_followed(
    training: Training,
) -> None:
    loop = Loop(training)
    loop.step()
    loop.names["sched"] = ExponentialLR(loop.optimizer, 0.5)  # in a turn that noted the rate
    loop.followers.begin_cell()
    for _ in range(3):
        loop.step()
        loop.names["sched"].step()
    loop.step()
    progress = loop.followers.progress()
    assert progress.lacking == ("sched",)
    assert RATE not in progress.kinds


def test_whether_a_rate_is_due_that_changes_now_and_then_is_unknown(training: Training) -> None:
    loop = Loop(training)
    for turn in range(1, 10):
        loop.step()
        if turn in (2, 6):
            exec(HALVE, loop.names)
    progress = loop.followers.progress()
    assert (progress.lacking, progress.unknown) == ((), (RATE,))


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        (HALVE, (RATE,)),
        ("for g in opt.param_groups: g.update(lr=g['lr'] / 2)", (RATE,)),
        ("opt.step(); print(opt.param_groups[0]['lr'])", ()),
    ],
)
def test_a_rate_that_an_older_cell_has_set_is_due_in_one_that_may_set_it(
    training: Training, source: str, lacking: tuple[str, ...]
) -> None:
    loop = Loop(training)
    for _ in range(3):
        loop.step()
        exec(HALVE, loop.names)
    loop.followers.end_cell(HALVE, is_failed=False)
    loop.followers.begin_cell()
    loop.step()
    loop.followers.end_cell(source, is_failed=True)
    assert loop.followers.progress().lacking == lacking


@pytest.mark.parametrize(
    ("source", "unknown"),
    [
        ("for x in loader:\n    opt.step()\n    n += 1", ("n",)),
        ("for x in loader:\n    opt.step()\n    print(n)", ()),
        ("for n in range(3):\n    opt.step()", ()),  # a loop sets it anew
        ("for x in loader:\n    opt.step()\n    count()", ("n",)),
        (f"opt.step()\n{HALVE}", (RATE,)),
        ("train(other)", ()),
        ("for x in loader:\n    averages.update(n)", ("averages",)),
    ],
)
def test_in_the_first_turn_nobody_knows_of_what_the_code_sets_whether_it_follows(
    training: Training, source: str, unknown: tuple[str, ...]
) -> None:
    loop = Loop(training)
    exec("def count():\n    global n\n    n += 1", loop.names)
    loop.names.update(n=0, averages={"weight": torch.zeros(2)})
    loop.followers.begin_cell()
    loop.step()
    loop.followers.end_cell(source, is_failed=True)
    assert loop.followers.progress().unknown == unknown

    loop.names["n"] += 1
    loop.followers.begin_cell()  # a turn has shown it
    loop.step()
    loop.followers.end_cell(source, is_failed=True)
    assert "n" not in loop.followers.progress().unknown


def test_an_object_keeps_its_name_when_a_loop_binds_another_one(training: Training) -> None:
    loop = Loop(training)
    loop.names["plans"] = [ExponentialLR(loop.optimizer, 0.9)]
    loop.followers.look()
    loop.names["plan"] = loop.names.pop("plans")[0]
    loop.followers.look()

    assert "plans[0]" in loop.followers.living()
    assert "plan" not in loop.followers.living()


def test_what_lies_beyond_the_search_is_told_once_by_its_name(training: Training) -> None:
    loop = Loop(training)
    averages = [torch.optim.swa_utils.AveragedModel(loop.model) for _ in range(65)]
    loop.names.update(averages=averages, losses=[0.5] * 100)
    for _ in range(3):
        loop.followers.look()

    (told,) = loop.told
    assert told == (
        "averages holds 65 items, of which 64 are searched for what follows the steps. Not "
        "searched is AveragedModel: give it to nbdist.keep, so that it follows them after a fault."
    )


def test_what_is_trained_or_found_elsewhere_does_not_lie_beyond(training: Training) -> None:
    model, optimizer, names = training
    names["layers"] = [nn.ReLU() for _ in range(64)] + [model]
    names["average"] = torch.optim.swa_utils.AveragedModel(model)
    names["parts"] = [0] * 64 + [names["average"], ExponentialLR(optimizer, 0.9)]
    assert search({}, names, [optimizer]).beyond == {}


def test_a_search_that_ends_early_is_told_with_the_names_where_it_ended(training: Training) -> None:
    loop = Loop(training)
    loop.names["grid"] = {i: [Holder(at=(i, k)) for k in range(60)] for i in range(64)}
    for _ in range(3):
        loop.followers.look()

    (told,) = loop.told
    assert "ends after 4,000 objects. Not all that is in grid was searched" in told


def test_what_moved_with_an_older_optimizer_of_the_name_is_not_due(training: Training) -> None:
    loop = Loop(training)
    loop.names["old"] = ExponentialLR(loop.optimizer, 0.9)
    loop.followers.begin_cell()
    for _ in range(3):
        loop.step()
        loop.names["old"].step()
    loop.optimizer = loop.names["opt"] = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.steps = loop.all_steps[loop.optimizer] = OptimizerSteps()
    loop.followers.begin_cell()
    loop.followers.look()
    loop.step()
    assert loop.followers.progress().lacking == ()

    # It may go on beside the new one: from its next move on it is due again.
    loop.names["old"].step()
    loop.step()
    assert loop.followers.progress().lacking == ("old",)


def test_a_name_leads_to_what_has_it_now_also_while_what_had_it_lives_on(
    training: Training,
) -> None:
    loop = Loop(training)
    old = loop.names["scaler"] = torch.amp.GradScaler("cpu")
    loop.followers.look()
    loop.names.update(scaler=torch.amp.GradScaler("cpu"), before=old)

    loop.followers.look()

    living = loop.followers.living()
    assert (living["scaler"], living["before"]) == (loop.names["scaler"], old)


def test_names_that_loops_bind_are_read_from_the_cell() -> None:
    assert loop_targets("for i, (a, b) in x:\n    for j in y: n += 1") == {"i", "a", "b", "j"}
    assert loop_targets("%magic\nfor") == frozenset()


@pytest.mark.parametrize(
    ("source", "lacking"), [("step()", ()), ("n += 1", ("n",)), ("print(i); n += 1", ("i", "n"))]
)
def test_what_an_older_cell_has_moved_is_due_in_one_that_leads_to_it(
    training: Training, source: str, lacking: tuple[str, ...]
) -> None:
    loop = Loop(training)
    loop.names.update(i=0, n=0)
    loop.followers.begin_cell()
    for _ in range(3):
        loop.step()
        loop.names["i"] += 1
        loop.names["n"] += 1
    loop.followers.end_cell("for i in range(3): n += 1", is_failed=False)

    loop.followers.begin_cell()
    loop.step()
    loop.followers.end_cell(source, is_failed=True)

    assert loop.followers.progress().lacking == lacking


def test_a_cell_leads_to_what_its_functions_and_objects_name() -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(
        "def train(): return [sched.step() for _ in '1']\n"
        "class Trainer:\n def fit(self): train()\n"
        "trainer = Trainer()",
        names,
    )
    assert {"trainer", "train", "sched"} <= (reached("trainer.fit()", names) or set())
    assert "sched" not in (reached("print(other)", names) or {"sched"})
    assert {"trainer", "train", "sched"} <= (reached("%time trainer.fit()", names) or set())
    assert reached("def f(:", names) is None


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.sleep(0)\nn += 1",
        "async with lock:\n    n += 1",
        "%time n += 1",
        "!ls\nn += 1",
        "n += 1\nreturn n",
        "n = \0",
    ],
)
def test_whatever_ipython_runs_as_a_cell_ends_one_that_failed(
    training: Training, source: str
) -> None:
    loop = Loop(training)
    loop.names.update(n=0)
    loop.step()
    loop.followers.end_cell(source, is_failed=True)
    assert loop.followers.progress().has_stepped


def test_a_cell_that_awaits_sets_the_names_that_it_sets() -> None:
    source = "import asyncio\nawait asyncio.sleep(0)\nn = 1"
    assert "n" in (stored(source, reached(source, {}), {}) or ())


def test_weights_that_a_loop_writes_after_each_step_are_lacking_where_it_has_not(
    training: Training,
) -> None:
    loop = Loop(training)
    for _ in range(4):
        loop.step()
        next(loop.model.parameters()).data.add_(1)
    loop.step()
    change = "the change of the weights after opt.step()"
    assert change in loop.followers.progress().lacking
    next(loop.model.parameters()).data.add_(1)
    assert change not in loop.followers.progress().lacking


def test_of_weights_that_a_loop_writes_now_and_then_nobody_knows_whether_it_has(
    training: Training,
) -> None:
    loop = Loop(training)
    for turn in range(4):
        loop.step()
        if turn % 2 == 0:
            next(loop.model.parameters()).data.add_(1)
    loop.step()
    progress = loop.followers.progress()
    change = "the change of the weights after opt.step()"
    assert change in progress.unknown
    assert change not in progress.lacking


def test_a_second_optimizers_step_is_no_change_by_the_loop(training: Training) -> None:
    loop = Loop(training)
    other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.all_steps[other] = OptimizerSteps()
    for _ in range(3):
        loop.step()
        next(loop.model.parameters()).data.add_(1)
    loop.step()
    next(loop.model.parameters()).data.add_(1)  # by the other's step, and nothing after it
    loop.followers.after_step(loop.all_steps[other], other)
    loop.step()
    change = "the change of the weights after opt.step()"
    progress = loop.followers.progress()
    assert change in progress.unknown  # not each step was followed by one
    assert change not in progress.lacking
