"""`nbdist.AsyncSGD`: every rank trains at its own pace, on parameters that one rank keeps.

A step sends this rank's gradients to the server, which applies them at once with the wrapped
optimizer, and comes back with the newest parameters. No rank waits for slower ones, at the price of
*staleness*: gradients are computed on parameters that others have changed since (Dean et al.,
"Large Scale Distributed Deep Networks", NeurIPS 2012; the bound: see `staleness`).

All ranks run the same loop. The server's rank trains too, and its threads serve (`serving`).
Everything here runs on main threads.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbdist.engine.averaging import fit, messages, serving
from nbdist.engine.averaging.average import average, broadcast, check_equal
from nbdist.engine.averaging.master import Answer, Gradients, Master
from nbdist.engine.averaging.staleness import Staleness, Update
from nbdist.engine.compat import torch_live
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel import location
from nbdist.engine.steps import optimizer_wrapper
from nbdist.engine.steps.optimizer_wrapper import Closure, Wrapper
from nbdist.engine.training import training
from nbdist.shared.errors import ClusterError, LayoutError, LostStateError

_SHORTEST_S, _LONGEST_S = 0.001, 0.05  # between two questions of a worker that has to wait


class AsyncSGD(Wrapper):
    """Wrap an optimizer, so that ranks train without waiting for each other.

        opt = nbdist.AsyncSGD(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in batches:                  # as many as this rank has
            loss_fn(model(x), y).backward()
            opt.step(); opt.zero_grad()
        opt.finish()                          # all ranks: the final parameters

    The model is a plain module; every rank's weights and buffers become rank 0's here. All ranks
    call it. The wrapped optimizer steps only on the server, once per update; learning rates are the
    worker's at that moment, so that schedulers work. Gradients that a GradScaler found infinite are
    not sent.

    Args:
        optim: The optimizer with which the server applies updates.
        server: The rank that keeps the parameters; it trains too.
        max_staleness: The most other updates that may overtake an update: fast ranks wait. At
            least the number of ranks less one. None: no bound. With a bound, `finish` follows the
            loop at once: a rank that does something else first holds the others up.

    Raises:
        LayoutError: A number does not fit, ranks bring different models, or the model exchanges its
            gradients already.
    """

    unsaved = "what its server's optimizer remembers, as momentum, is not saved and begins anew"

    def __init__(self, optim: Optimizer, server: int = 0, max_staleness: int | None = None) -> None:
        fit.check(optim, "AsyncSGD")
        _check_numbers(server, max_staleness, dist.get_world_size())
        super().__init__(optim)
        bound = "" if max_staleness is None else f", max_staleness={max_staleness}"
        self.name = f"AsyncSGD({type(optim).__name__}, server={server}{bound})"
        self.server = server
        self.max_staleness = max_staleness
        self.modules = fit.modules_of(optim)
        whole = fit.whole_of(self.parameters(), self.modules)
        check_equal(whole, self.name)
        broadcast(whole)
        serving.make_groups(server)
        self._number = here.next_number()
        self._read = 0  # the version of the parameters in the model
        self._seen = Staleness()
        self._is_torn = False  # an exchange was interrupted
        self._unfinished: int | None = None  # the cell that stepped last, if nothing ended it
        if dist.get_rank() == server:
            master = Master(optim, range(dist.get_world_size()), max_staleness)
            here.masters[self] = master
            serving.here.serve(self._number, master)
        # A worker that came first would find no server of its parameters: the threads of an
        # older optimizer's server answer already.
        dist.barrier()

    def __repr__(self) -> str:
        return f"<{self.name}: staleness {self._seen}>"

    @property
    def staleness(self) -> Staleness:
        """The staleness of all workers' updates, as of this rank's last step."""
        return self._seen

    @property
    def order(self) -> list[Update]:
        """The updates in the order in which the server applied them; empty on other ranks."""
        master = here.masters.get(self)
        return [] if master is None else list(master.order)

    def step(self, closure: Closure | None = None) -> Any:
        """Send the gradients, wait until they are applied, and take the newest parameters.

        Raises:
            LostStateError: The server's process died, and the parameters with it.
            ClusterError: The number of ranks has changed, or an exchange was broken off.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._share()
        if self._has_overflowed():
            return result
        parameters = self.parameters()
        rates = [float(group["lr"]) for group in self.param_groups]
        self._unfinished = _cell()
        values = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        answer = self._ask(messages.UPDATE, Gradients(self._read, rates, values))
        for pause in _pauses():
            if answer.status != "wait":
                break
            time.sleep(pause)
            answer = self._ask(messages.ASK)
        self._take(answer)
        if self._seen.newest is not None:
            training.log(staleness=self._seen.newest)
        return result

    def finish(self) -> Staleness:
        """End the training: wait until no rank trains any longer, and take the final parameters.

        All ranks call it and get the same ones; running statistics become their mean. A rank whose
        cell has ended without it is not waited for. Further steps may follow.

        Returns:
            The staleness of the updates.
        """
        answer = self._ask(messages.FINISH)
        for pause in _pauses():
            if answer.status != "wait":
                break
            time.sleep(pause)
            answer = self._ask(messages.FINISH)
        self._take(answer)
        self._unfinished = None
        master = here.masters.get(self)
        while master is not None and not master.is_notified():  # it must live until then
            serving.here.check()
            time.sleep(_SHORTEST_S)
        if answer.status == "all done":
            average(list(fit.statistics_of(self.modules).values()))
        return self._seen

    def left_open(self) -> str:
        """Return a sentence if the running cell has stepped and not called `finish`, else ""."""
        if self._unfinished != _cell():
            return ""
        return (
            f"Ranks end {location.here.name_running()} with different models: {self.name} was not "
            "finished, so each rank has the parameters of its own last step. finish() of the "
            "optimizer, on all ranks, gives them the same, the final ones."
        )

    def leave(self) -> None:
        """Tell the server that no update follows for now: the cell has ended. Does not wait."""
        if self._is_torn:
            return
        master = here.masters.get(self)
        if master is not None:
            master.leave(dist.get_rank(), _cell())
            return
        group = serving.find_group(self.server, dist.get_rank())
        if group is not None:
            messages.send_request(group, self.server, messages.LEAVE, self._number, _cell())

    def after_fault(self) -> None:
        """Continue: both sides forget what was under way."""
        self._is_torn = False

    def restart(self) -> None:
        """Begin from the weights as they are: the server takes its rank's. All ranks."""
        master = here.masters.get(self)
        if master is not None:
            master.begin_from(self.parameters())
        self._read, self._seen = 0, Staleness()
        dist.barrier()  # an update that came first would be applied to the former ones

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Begin from the weights as they are, which a checkpoint has given the model."""
        self.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer: on the server's rank the one that steps."""
        master = here.masters.get(self)
        return super().state_dict() if master is None else dict(master.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`. Weights are loaded into the model before it is wrapped."""
        inner = {name: value for name, value in state_dict.items() if name != "wrapper"}
        super().load_state_dict(inner)
        master = here.masters.get(self)
        if master is not None:
            master.load_state_dict(inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters: the server has none of them."""
        if "optim" in self.__dict__:
            raise LayoutError(
                "AsyncSGD cannot take parameters later.",
                why="the server began with those of the wrapped optimizer",
                do="add the group to that optimizer, then wrap it again",
            )
        super().add_param_group(param_group)

    def _ask(self, kind: int, gradients: Gradients | None = None) -> Answer:
        """Ask the master, which answers at once."""
        rank = dist.get_rank()
        if rank == self.server:
            return self._ask_here(rank, kind, gradients)
        group = serving.find_group(self.server, dist.get_rank())
        if group is None:
            raise ClusterError(
                f"{self.name} cannot continue: its group no longer exists.",
                why="%dist scale has changed the number of ranks, or the program destroyed it",
                do="make the optimizer again, on all ranks",
            )
        if self._is_torn:
            raise ClusterError(
                f"{self.name} was interrupted in the middle of a message.",
                why="the server would take the rest of it for another message",
                do="let the cell end with its error: the groups are then re-created",
            )
        parameters = self.parameters()
        self._is_torn = True  # until the answer has arrived
        cell = _cell()
        messages.send_request(group, self.server, kind, self._number, cell, gradients, parameters)
        answer = messages.receive_answer(group, self.server, parameters)
        self._is_torn = False
        return self._checked(answer)

    def _ask_here(self, rank: int, kind: int, gradients: Gradients | None) -> Answer:
        master = here.masters.get(self)
        if master is None:
            return self._checked(None)
        serving.here.check()
        if gradients is not None:
            return master.update(rank, gradients)
        return master.finish(rank, _cell()) if kind == messages.FINISH else master.ask(rank)

    def _checked(self, answer: Answer | None) -> Answer:
        if answer is None:
            raise LostStateError(
                f"The parameters that {self.name} trains are lost.",
                why=f"rank {self.server} kept them, and its process died or made another optimizer",
                do="make the optimizer again, on all ranks: each still has a copy in its model",
            )
        return answer

    @torch.no_grad()
    def _take(self, answer: Answer) -> None:
        torch._foreach_copy_([p.detach() for p in self.parameters()], list(answer.parameters))
        self._read, self._seen = answer.version, answer.staleness


class Averaging(Component):
    """Wrapped optimizers that average now and then, and not at each step.

    Attributes:
        masters: Of the optimizers that this rank serves. Held here and not by the optimizer: what
            that holds is copied to replacement ranks.
    """

    def __init__(self) -> None:
        self.masters: WeakKeyDictionary[AsyncSGD, Master] = WeakKeyDictionary()
        self._count = 0  # the newest number

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """End the server's waits for this rank; return the wrappers' sentences about the cell."""
        for optimizer in _live():
            # After an abort, the server is notified when the groups have been re-created.
            with suppress(RuntimeError):
                optimizer.leave()
        return optimizer_wrapper.notices() if cell.has_succeeded else ()

    def restart(self) -> None:
        """Continue after a fault, when the groups have been re-created. Main thread, all ranks."""
        optimizers = _live()
        for optimizer in optimizers:
            optimizer.after_fault()
        if optimizers:
            serving.here.restart()

    def next_number(self) -> int:
        """Return an unused number of a master; the same on all ranks. Collective."""
        known = [0] * dist.get_world_size()  # a replacement rank's is behind
        dist.all_gather_object(known, self._count)
        self._count = max(known) + 1
        return self._count


def _live() -> list[AsyncSGD]:
    return [o for o in torch_live.here.live(Optimizer) if isinstance(o, AsyncSGD)]


def _cell() -> int:
    """Return the number of the cell that runs; 0 in a script."""
    return location.here.running or 0


def _check_numbers(server: int, max_staleness: int | None, ranks: int) -> None:
    if not (isinstance(server, int) and 0 <= server < ranks):
        raise LayoutError(f"server={server!r} is not a rank.", do=f"use one of 0 to {ranks - 1}")
    if max_staleness is not None and not (
        isinstance(max_staleness, int) and max_staleness >= ranks - 1
    ):
        raise LayoutError(
            f"max_staleness={max_staleness!r} is too little for {ranks} ranks.",
            why="ranks that begin together overtake each other by one less than there are",
            do=f"use {ranks - 1} or more, or LocalSGD(opt, every=1), where nothing is stale",
        )


def _pauses() -> Iterator[float]:
    """Yield the sleeping times of a worker that has to wait."""
    pause = _SHORTEST_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_S)


here = Averaging()
