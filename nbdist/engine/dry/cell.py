"""One rank of a dry cell, in a process of its own."""

import os
import random
import signal
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

import nbdist
from nbdist.engine.compat import torch_dry, torch_fakes
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.dry import asked_rank, dry_names, refused, unknown
from nbdist.engine.dry.live_bytes import LiveBytes
from nbdist.engine.dry.loops import Loops, rewritten
from nbdist.engine.dry.place import CELL, file_of, in_words, place
from nbdist.engine.dry.rank_log import Ask, NeverComesError, RankLog
from nbdist.engine.dry.unknown import NotKnownError
from nbdist.engine.dry.values import Values
from nbdist.engine.dry.watched import Calls, Numbers
from nbdist.shared import side
from nbdist.shared.error_text import named
from nbdist.study.dry import Trace

SECONDS = 20.0  # of a core, for one rank
# Words of errors that a rank would not meet; no GPU is asked for here.
_OF_DRY = ("FakeTensor", "fake tensor", "Unknown", "meta tensor", "data-dependent", "cuda")
_NAMES = "a dry run has what earlier cells of ranks define and what pushes give as code"


@dataclass(frozen=True, slots=True)
class AskedCell:
    """A cell to be run.

    Attributes:
        code: Its, with lines as in the notebook.
        before: Numbers and code of cells that ran before it.
        world_size: Ranks.
        ranks_on_host: Of them, on a host.
        memory: Bytes that a rank may have; 0 for any.
    """

    code: str
    before: tuple[tuple[int, str], ...]
    world_size: int
    ranks_on_host: int
    memory: int = 0


class _TimeUpError(BaseException):
    pass


def run(asked: AskedCell, rank: int, answers: dict[str, str], ask: Ask) -> tuple[Trace, list[str]]:
    """Run a cell as a rank; return what it did, and what was left out, in words.

    Called once in a process, which is no use for anything else then.

    Args:
        asked: The cell.
        rank: Which to be.
        answers: By place, how branches decide; see `RankLog`.
        ask: Gives what the peers bring.
    """
    log = RankLog(rank, answers, ask)
    return _DryRank(asked, rank, log).trace()


def warm() -> None:
    """Import and cache, before forks, what most cells need."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.ReLU())
    with (
        torch_dry.settled_pipelines(),
        torch_dry.fake_group(2, 0),
        torch_dry.fake_tensors() as mode,
    ):
        made = [torch.nn.Parameter(mode.from_tensor(p.detach())) for p in model.parameters()]
        outputs = torch.nn.functional.linear(torch.randn(2, 4), made[0], made[1])
        loss = torch.nn.functional.mse_loss(outputs.relu(), torch.randn(2, 4))
        loss.backward()
        for optimizer in (torch.optim.SGD(made[:2]), torch.optim.AdamW(made[:2])):
            optimizer.step()
        dist.all_reduce(torch.ones(2))


class _DryRank:
    def __init__(self, asked: AskedCell, rank: int, log: RankLog) -> None:
        self._asked, self._rank, self._log = asked, rank, log
        self._values = Values(rank)
        self._loops = Loops(log, self._values, lambda: data_shard().index)
        self._live = LiveBytes()
        self._over = self._seeded = ""

    def trace(self) -> tuple[Trace, list[str]]:
        end, where, said = "end", "", ""
        try:
            self._run()
        except NeverComesError:
            end = "waits"
        except _TimeUpError as error:
            end, where, said = (
                "time",
                _place_of(error),
                f"it takes more than {SECONDS:.0f} s without numbers",
            )
        except (NotKnownError, *torch_fakes.ASKED_NUMBERS) as error:
            is_fake = isinstance(error, torch_fakes.ASKED_NUMBERS)
            said = "the shape of a result, or a decision, follows from numbers" if is_fake else ""
            end, where, said = "unknown", _place_of(error), said or str(error)
        except SystemExit:
            pass
        except BaseException as error:
            end, where, said = "error", _place_of(error), named(error)
            if not (self._log.is_on and where) or _is_of_dry(error):
                end, where = "unknown", where or "its beginning"
            elif isinstance(error, NameError):
                end, said = "unknown", f"{error}: {_NAMES}"
            elif isinstance(error, FileNotFoundError):
                end, said = "unknown", f"{said}; what a dry cell writes goes nowhere"
            elif self._loops.left_out:
                end, said = "unknown", f"{said}, after turns of a loop that were left out"
        trace = Trace(
            tuple(self._log.calls),
            end,  # type: ignore[arg-type]
            where,
            said,
            tuple(self._log.branches),
            self._live.peak,
            self._over,
            tuple(self._log.brought),
            self._log.asks_rank or self._drawn() != self._seeded,
        )
        return trace, sorted({*self._loops.left_out, *self._log.notes})

    def _run(self) -> None:
        self._prepare()
        n = self._asked.world_size
        with ExitStack() as stack:
            stack.enter_context(torch_dry.fake_group(n, self._rank))
            stack.enter_context(torch_dry.fake_tensors())
            stack.enter_context(torch_fakes.grouped_products())
            stack.enter_context(torch_dry.settled_pipelines())
            stack.enter_context(self._live.resizing())
            stack.enter_context(Calls(self._log, self._values, self._look))
            stack.enter_context(Numbers(self._log, self._values))
            dry_names.install(self._log, self._values)
            asked_rank.watch(self._log)
            names = self._names()
            self._log.is_on = False
            for number, code in self._asked.before:
                exec(rewritten(code, file_of(number)), names)
            self._log.is_on = True
            self._live.restart()
            exec(rewritten(self._asked.code, CELL), names)

    def _prepare(self) -> None:
        side.settle("rank")
        here = self._rank % self._asked.ranks_on_host
        os.environ |= {
            "RANK": str(self._rank),
            "LOCAL_RANK": str(here),
            "WORLD_SIZE": str(self._asked.world_size),
            "LOCAL_WORLD_SIZE": str(self._asked.ranks_on_host),
            "GROUP_RANK": str(self._rank // self._asked.ranks_on_host),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        random.seed(self._rank)
        numpy.random.seed(self._rank)
        torch.manual_seed(self._rank)
        self._seeded = self._drawn()
        refused.refuse()
        unknown.in_math()
        self._loops.take_over()

        def time_up(*_: Any) -> None:
            raise _TimeUpError

        signal.signal(signal.SIGPROF, time_up)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)

    def _drawn(self) -> str:
        """Return what changes where random numbers are drawn that are known."""
        return f"{random.getstate()}{numpy.random.get_state()}"

    def _names(self) -> dict[str, Any]:
        return {
            "__name__": "__main__",
            "rank": self._rank,
            "this_rank": self._rank,
            "local_rank": self._rank % self._asked.ranks_on_host,
            "world_size": self._asked.world_size,
            "device": torch.device("cpu"),
            "torch": torch,
            "dist": dist,
            "nbdist": nbdist,
            "display": lambda *_: None,
            **self._loops.names(),
        }

    def _look(self, *operation: Any) -> None:
        """Count what an operation has made, and note where memory ends."""
        self._live.count(*operation)
        if self._asked.memory and not self._over and self._live.now > self._asked.memory:
            self._over = place()


def _is_of_dry(error: BaseException) -> bool:
    """Return whether an error comes of what a dry rank lacks."""
    return any(word.lower() in str(error).lower() for word in _OF_DRY)


def _place_of(error: BaseException) -> str:
    """Return the innermost place in a cell that an error came through; "" without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return in_words(error.filename, error.lineno)
    steps = traceback.extract_tb(error.__traceback__)
    return next((w for s in reversed(steps) if (w := in_words(s.filename, s.lineno))), "")
