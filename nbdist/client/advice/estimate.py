"""`nbdist.estimate`: what a layout would hold and send on any number of ranks, without a cluster.

A process of its own runs the layout's real code on tensors without numbers (`engine/dry`).
"""

import json
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from nbdist.client.cells import estimates
from nbdist.shared import errors
from nbdist.shared.errors import LayoutError, UsageError
from nbdist.shared.payload import pack
from nbdist.study.estimate import Estimate, RankEstimate, Traffic, shapes_of

TIMEOUT_S = 300.0
_MOST_LINES = 12  # of what a process said that ended without an answer


def estimate(
    model_factory: Callable[[], Any],
    batch: Any,
    layout: str,
    world_size: int,
    *policies: object,
    device: str = "cpu",
    ranks_on_host: int = 8,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: type | None = None,
    options: Mapping[str, Any] | None = None,
) -> Estimate:
    """Return what each rank of a layout would hold and send in a step. Needs no cluster.

    A process of its own makes the model without memory, spreads it over a world of `world_size`
    ranks of which it is one, and runs two steps without numbers: the code is that of a real rank.
    It takes seconds, whatever the size of model and world.

    Args:
        model_factory: Makes the model, such as `lambda: Model(config)`. Weights that it loads from
            files are read.
        batch: What one rank's step gets: the model's inputs, as a tensor, a tuple of arguments or
            a dict of keywords; with `loss` a pair of inputs and targets. Only shapes count:
            `torch.empty(8, 1024, dtype=torch.long, device="meta")` needs no memory.
        layout: As `nbdist.parallelize` takes it.
        world_size: Ranks, from 1 on.
        policies: As `nbdist.parallelize` takes them.
        device: "cpu" counts bytes as gloo sends them; "cuda" as nccl does, and memory in the
            pieces of CUDA's allocator.
        ranks_on_host: Ranks of one host, as `"hsdp"` asks.
        loss: Makes the loss of `(outputs, targets)`. Without it the outputs' `loss` is taken, else
            the mean of the first output.
        optimizer: A class of optimizers; AdamW without it.
        options: Its arguments.

    Raises:
        LayoutError: The layout refuses the model, as `parallelize` does.
        UsageError: The model, its loss or the optimizer cannot run without numbers.
        TransferError: Something cannot be sent to the process.
    """
    with EstimateProcess() as process:
        return process.estimate(
            *(model_factory, batch, layout, world_size, *policies),
            device=device,
            ranks_on_host=ranks_on_host,
            loss=loss,
            optimizer=optimizer,
            options=options,
        )


class EstimateProcess:
    """A process that makes one estimate after another, so that torch is imported once.

    One thread at a time; a context manager.
    """

    def __init__(self) -> None:
        """Start it."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - what the model's own code prints
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nbdist.engine.dry.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def __enter__(self) -> "EstimateProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more: the model's own code has ended it, or took too long."""
        return self._process.poll() is not None

    @property
    def has_crashed(self) -> bool:
        """Whether native code has ended it."""
        return self._process.poll() in (-signal.SIGSEGV, -signal.SIGABRT)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def estimate(
        self,
        model_factory: Callable[[], Any],
        batch: Any,
        layout: str,
        world_size: int,
        *policies: object,
        device: str = "cpu",
        ranks_on_host: int = 8,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: type | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Estimate:
        """Return an estimate, as the function of that name does."""
        is_class = isinstance(model_factory, type)
        if not callable(model_factory) or (hasattr(model_factory, "parameters") and not is_class):
            raise UsageError(
                "nbdist.estimate got a model where a function that makes one should be.",
                why="it makes the model without memory",
                do="nbdist.estimate(lambda: Model(config), batch, layout, world_size)",
            )
        if not isinstance(world_size, int) or world_size < 1:
            raise UsageError(f"An estimate is for 1 rank or more, and not for {world_size!r}.")
        if device not in ("cpu", "cuda"):
            raise UsageError(f'nbdist.estimate knows no device "{device}".', do='"cpu" or "cuda"')
        asked = {
            "factory": model_factory,
            "batch": shapes_of(batch),
            "layout": layout,
            "policies": policies,
            "world_size": world_size,
            "ranks_on_host": min(ranks_on_host, world_size),
            "loss": loss,
            "optimizer": optimizer,
            "options": dict(options or {}),
            "backend": "nccl" if device == "cuda" else "gloo",
        }
        found = self._ask(asked)
        ranks = tuple(
            RankEstimate(**{**one, "traffic": {a: Traffic(**t) for a, t in one["traffic"].items()}})
            for one in found["ranks"]
        )
        named = found["model"], found["parameter_count"], tuple(found["notes"])
        result = Estimate(found["layout"], world_size, ranks, *named, found["experts"])
        estimates.here.add(result)
        return result

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        request = pickle.dumps({"path": sys.path, "buffers": [bytes(b) for b in pack(asked)]})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(TIMEOUT_S, end)
        timer.start()
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            said = self._process.stdout.readline()
        except BrokenPipeError:  # it has ended, and below is why
            said = b""
        finally:
            timer.cancel()
        if late.is_set():
            raise UsageError(
                f"There is no estimate after {TIMEOUT_S:.0f} s.",
                why="the model's own code takes as long, or never ends, where tensors have no "
                "numbers",
                do="estimate a smaller model or batch",
            )
        if not said:
            raise UsageError("The process of the estimate ended without one.", why=self._last())
        answer: dict[str, Any] = json.loads(said)
        if "error" in answer:
            raise _refused(answer["kind"], *answer["error"])
        return answer

    def _last(self) -> str:
        """Return what the process printed last."""
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_MOST_LINES:])


class EstimatePool:
    """A few of these processes, each started when it is needed. Any thread; a context manager.

    Attributes:
        count: How many: each takes a core.
    """

    def __init__(self, count: int = 2) -> None:
        """Start none yet."""
        self._free: SimpleQueue[EstimateProcess | None] = SimpleQueue()
        self.count = count
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> "EstimatePool":
        return self

    def __exit__(self, *_: object) -> None:
        for _place in range(self.count):
            if (process := self._free.get()) is not None:
                process.close()

    def estimate(self, *given: Any, **how: Any) -> Estimate:
        """Return an estimate, as the function of that name does, when a process is free."""
        earlier = process = self._free.get()
        try:
            process = process or EstimateProcess()
            try:
                return process.estimate(*given, **how)
            except UsageError:
                if earlier is None or not earlier.has_crashed:
                    raise
            # Tensors without numbers end torch at times, by what earlier estimates have left.
            earlier.close()
            process = EstimateProcess()
            return process.estimate(*given, **how)
        finally:
            if process is not None and process.has_ended:
                process.close()
                process = None
            self._free.put(process)


def _refused(kind: str, what: str, why: str, do: str) -> errors.NBDistError:
    if kind:
        return getattr(errors, kind, LayoutError)(what, why=why, do=do)
    return UsageError(
        "A step of the model does not run, so there is no estimate.",
        why=what,
        do="see that model(batch) runs, and with loss= that batch is a pair of inputs and targets; "
        "what needs numbers in tensors, as .item() does, cannot run here",
    )
