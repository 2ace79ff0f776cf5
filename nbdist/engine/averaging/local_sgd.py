"""`nbdist.LocalSGD`: ranks train by themselves and average their models every few steps.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019). With `every=1` and plain SGD
it computes what DDP does, but for the order of summation. Averages of averages, inside a host often
and between hosts seldom: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020),
hierarchical local SGD.

The optimizer's parameters and the running statistics of batch norm are averaged; states
of the optimizer (momentum) stay local. Main thread.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.engine.averaging import fit, groups
from nbdist.engine.averaging.average import average, broadcast, check_equal
from nbdist.engine.averaging.rounds import Rounds
from nbdist.engine.kernel import location
from nbdist.engine.steps.optimizer_wrapper import ApartWrapper, Closure
from nbdist.shared.errors import LayoutError


class InRounds(ApartWrapper):
    """Base of the wrappers that train in rounds: ranks are equal when a round ends."""

    def __init__(self, optim: Optimizer, rounds: Rounds, asked: str) -> None:
        super().__init__(optim)
        self.rounds = rounds
        self.steps = 0
        self._met_at = 0  # steps when all ranks were equal last
        self._cell = 0  # that made the newest step
        self.name = asked
        self._is_checked = False  # that nothing has spread the model since
        self.modules = fit.modules_of(optim)
        whole = fit.whole_of(self.parameters(), self.modules)
        check_equal(whole, asked)
        broadcast(whole)

    def __repr__(self) -> str:
        parameters = self.parameters()
        statistics = fit.statistics_of(self.modules)
        size = sum(p.nbytes for p in parameters)
        also = f" and {len(statistics)} running statistics" if statistics else ""
        return f"<{self.name}: averages {len(parameters)} parameters ({size:,} bytes){also}>"

    def step(self, closure: Closure | None = None) -> Any:
        """Make a step of the optimizer inside, and average where a round ends with it.

        Every rank makes as many: a rank that ends a round waits for the others.

        Raises:
            LayoutError: The model was spread over the ranks after it was wrapped.
        """
        if not self._is_checked:
            fit.refuse_spread(self.optim, type(self).__name__)
            self._is_checked = True
        self._cell = location.here.running or 0
        result = self._step_inside(closure)
        self.steps += 1
        due = self.rounds.due(self.steps)
        if due == "inside":
            average(self._averaged(), self._near())
        elif due == "all":
            self.end_round()
        return result

    def end_round(self) -> None:
        """Average over all ranks now, as at the end of a round. All ranks at once.

        Such as after the last step, if its number is not a multiple of a round's.
        """
        self._meet()
        self._met_at = self.steps

    def left_open(self) -> str:
        """Return a sentence if the running cell has stepped and leaves ranks different, else ""."""
        since = self.steps - self._met_at
        if self._cell != (location.here.running or 0) or not since:
            return ""
        steps = "1 step" if since == 1 else f"{since} steps"
        return (
            f"Ranks end {location.here.name_running()} with different models: {self.name} has made "
            f"{steps} since all were averaged. end_round() of the optimizer, on all ranks, makes "
            "them equal; so does further training in the next cell."
        )

    def next_meeting(self, ahead: int) -> int:
        """Return the number of steps, at least `ahead`, after which all ranks are equal again."""
        return self.rounds.next_for_all(self.steps, ahead)

    def between_meetings(self) -> int:
        """Return the most steps that a rank can be ahead of another one."""
        return self.rounds.length

    def own_state(self) -> dict[str, Any]:
        """Return the number of steps made, and of those after which all ranks were equal last."""
        return {"steps": self.steps, "met_at": self._met_at}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Continue at this number of steps."""
        self.steps = int(state["steps"])
        self._met_at = int(state.get("met_at", self.steps))

    def _averaged(self) -> list[torch.Tensor]:
        return [*self.parameters(), *fit.statistics_of(self.modules).values()]

    def _near(self) -> Any:
        """Return the group of near ranks."""
        raise NotImplementedError

    def _meet(self) -> None:
        """Make all ranks equal."""
        average(self._averaged())


class LocalSGD(InRounds):
    """Wrap an optimizer, so that ranks train independently and average now and then.

        opt = nbdist.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=8)

    The model is a plain module; every rank's weights and buffers become rank 0's here. All ranks
    call it, and make the same number of steps.

    Args:
        optim: The optimizer that makes the steps.
        every: Steps from one averaging to the next.
        warmup_steps: The first steps, each of which is followed by an averaging over all ranks.
        between: Steps between averages over all ranks, a multiple of `every`; the others are then
            taken inside groups of near ranks.
        group_size: Neighbouring ranks in a group; without it, those of one host.

    Raises:
        LayoutError: A number does not fit, ranks bring different models, or the model exchanges its
            gradients already.
    """

    def __init__(
        self,
        optim: Optimizer,
        every: int,
        warmup_steps: int = 0,
        *,
        between: int | None = None,
        group_size: int | None = None,
    ) -> None:
        fit.check(optim, "LocalSGD")
        rounds = Rounds(every, warmup_steps, between)
        self.group_size = group_size
        if group_size is not None and between is None:
            raise LayoutError(
                f"group_size={group_size} needs `between`, the steps between averages over all.",
                do=f"add between={4 * every}, say",
            )
        said = {"every": every, "warmup_steps": warmup_steps or None, "between": between}
        said["group_size"] = group_size
        words = ", ".join(f"{k}={v}" for k, v in said.items() if v is not None)
        super().__init__(optim, rounds, f"LocalSGD({type(optim).__name__}, {words})")
        if between is not None:
            self._near()  # raises here, if it is refused

    def _near(self) -> Any:
        return groups.inside(self.group_size)
