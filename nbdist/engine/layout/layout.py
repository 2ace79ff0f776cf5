"""The `Layout` that `nbdist.parallelize` returns, and that its model holds."""

import copy
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.compat import torch_modules, torch_reducers, torch_sharded
from nbdist.engine.data.batches import Shard
from nbdist.engine.layout import peft_calls, plain_copy
from nbdist.engine.layout.axes import unused, zero1
from nbdist.engine.layout.axes.axis import Axis, Spreading
from nbdist.engine.layout.axes.pp.stages import Stage
from nbdist.engine.layout.explain import BatchSize, Explanation
from nbdist.engine.layout.generation import generate
from nbdist.engine.layout.generation.streamed_text import Tokenizer
from nbdist.engine.layout.plan import adapted, cost
from nbdist.engine.layout.plan.inputs import Inputs, as_inputs, samples_in
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import eight_bits
from nbdist.engine.layout.policies.activation_checkpoint import Checkpointed
from nbdist.engine.layout.trainable import LossFunction, Trainable
from nbdist.engine.layout.verify import preconditions, verify
from nbdist.engine.layout.verify.report import Looked, Proof
from nbdist.engine.layout.weights import load, save_adapters, save_pretrained
from nbdist.engine.layout.weights.gather import state_of
from nbdist.engine.tap import counters
from nbdist.shared.errors import CheckpointError, LayoutError
from nbdist.shared.text import name_bytes

_KEY = "_nbdist_layout"  # where a model keeps its layout; in __dict__, so no part of its state


class Layout(Trainable):
    """How one model is spread over the ranks.

    Attributes:
        model: The model, the same object that was given.
        shape: Sizes of the axes.
        mesh: torch's DeviceMesh: the axes larger than 1, outermost first.
        blocks: Qualified names of the units that fsdp gathers one by one; empty without fsdp.
        size: Bytes and count of the parameters of the whole model.
        local: The same for a rank of tp; without tp, the same as `size`.
        backend: "gloo" or "nccl": the backend of this model's collectives.
        plan: The modules that tp cuts; None without tp.
        experts: How many ep shares out of each mixture; 0 without ep.
        context: The plan of cp; None without cp.
        policies: The policies beside the text.
        no_skeleton: Why there is none.
        last_step: The last batch and loss of `step`; `%dist verify` proves with them.
        pipeline: The pipeline's steps; None without pp.
        proof: The last result of `verify`; None before. A run reports it.
        scaler: A GradScaler, for `Precision("fp16")`; otherwise it passes everything on unchanged,
            so that one loop serves all: `layout.scaler.scale(loss).backward()`,
            `layout.scaler.step(opt)`, `layout.scaler.update()`.
    """

    def __init__(
        self,
        work: Spreading,
        axes: tuple[Axis, ...],
        size: cost.ModelSize,
        local: cost.ModelSize,
        backend: str,
        forgetting: Mapping[str, Checkpointed],
    ) -> None:
        super().__init__(
            work.model, work.shape, work.mesh, work.policies, work.pipeline, work.context
        )
        self.blocks = tuple(work.blocks) if work.shape.fsdp > 1 else ()
        self.size = size
        self.local = local
        self.backend = backend
        self.plan = work.plan
        self.experts = work.experts
        self._skeleton = work.skeleton
        self.no_skeleton = work.no_skeleton
        self.proof: Proof | None = None
        self._axes = axes
        self._forgetting = dict(forgetting)
        self._number = here.next_number()
        world = dist.group.WORLD
        self._made_at = (0, 0) if world is None else counters.moment(world)
        if self.shape.is_cut:
            self.model.register_load_state_dict_pre_hook(_before_load)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the last batch: a new rank has not made that step."""
        return {**self.__dict__, "last_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register as a living layout, on a rank that received it from another one."""
        self.__dict__.update(state)
        here.number_after(self._number)
        self._begin()

    def _begin(self) -> None:
        here.add(self)
        unused.here.watch(self.model)
        if self.shape.shards_states:
            zero1.here.watch(self.model)

    @property
    def skeleton(self) -> nn.Module | None:
        """The plain model as it was, without weights, with the adapters that are in use now.

        None where it cannot be copied.
        """
        if self._skeleton is not None:
            adapted.follow(self._skeleton, self.model)
        return self._skeleton

    @property
    def name_on_ranks(self) -> str:
        """A name that is the same on all ranks, also on one that has replaced another.

        It is of the collectives that had been made, as those of other wrapped models are: what a
        rank has lost it does not count. Where nothing counts them, the number of the layout.
        """
        generation, collectives = self._made_at
        return f"layout {generation}/{collectives or f'number {self._number}'}"

    @property
    def number(self) -> int:
        """Its place in the order in which layouts were made, also on a rank that received them."""
        return self._number

    @property
    def can_follow(self) -> bool:
        """Whether it can continue with another number of ranks: each holds the whole model."""
        return set(self.shape.axes) == {"dp"} and not self.shape.shards_states

    def follow(self) -> None:
        """Average over all ranks of the default group from here on, however many. No collective."""
        world = dist.group.WORLD
        reducer = torch_modules.reducer_of(self.model)
        assert world is not None
        assert reducer is not None, "a layout that can follow has one"
        torch_reducers.move_ddp(reducer, world)
        self.shape = MeshShape(dp=dist.get_world_size())
        self.mesh = DeviceMesh.from_group(world, self.mesh.device_type, mesh_dim_names=("dp",))

    @property
    def name(self) -> str:
        """The canonical text: "ddp", "zero1", "zero3", "dp=2 fsdp=4"."""
        return self.shape.name

    def __repr__(self) -> str:
        axes = " ".join(f"{axis}={n}" for axis, n in self.shape.axes.items())
        known = "" if self.name == axes else f" ({axes})"
        units = f", {len(self.blocks)} blocks" if self.blocks else ""
        held = name_bytes(cost.resident_bytes(self.local, self.shape))
        return (
            f"<Layout {self.name}{known}: {self.size.parameters:,} parameters{units}, "
            f"{held} of parameters and gradients a rank>"
        )

    def explain(self, batch: Any = None) -> "Explanation":
        """Return a description of the layout, and its cost per rank and step.

        Args:
            batch: What the model is called with on this rank, as in `step`: its size tells how much
                tp, cp, ep and pp send. Without one they are given per token.

        Raises:
            LayoutError: `batch` holds no tensor.
        """
        return Explanation(
            self.name,
            self.shape,
            self._axes,
            self.size,
            self.local,
            self.backend,
            None if batch is None else BatchSize.of(batch),
            self.policies,
            {name: block.input_bytes for name, block in self._forgetting.items()},
            self._compressed(),
            eight_bits.words(self.model, self.mesh.device_type),
        )

    def _compressed(self) -> float:
        """Return the part of gradients' bytes that is sent, once compression has started."""
        policy = self.policies.compress
        if policy is None:
            return 1.0
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if policy.method == "powersgd":
            return cost.power_sgd_share([p.shape for p in trained], policy.rank)
        return 2 * sum(p.numel() for p in trained) / self.local.gradient_bytes

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the pipeline, with the names of their parameters; none without pp."""
        return self.pipeline.runner.plan.stages if self.pipeline else ()

    def load_from(self, other: "Layout | nn.Module | Mapping[str, torch.Tensor] | None") -> None:
        """Copy weights and buffers into this model, by name; dtypes stay this model's. Collective.

        Optimizers keep the state of the old weights: create new ones, or continue if
        the weights are nearly the same.

        Args:
            other: Another layout on the same ranks, or its model; or a plain module or a state
                dict, of which rank 0's counts, and other ranks may give None.

        Raises:
            LayoutError: Names or shapes differ; nothing was changed.
        """
        source = layout_of(other) if isinstance(other, nn.Module) else other
        if isinstance(source, Layout):
            load.from_spread(self, source)
        elif other is None or isinstance(other, nn.Module | Mapping):
            plain = torch_modules.uncompiled(other) if isinstance(other, nn.Module) else other
            load.from_one(self, plain)
        else:
            raise LayoutError(
                f"load_from got a {type(other).__name__}.",
                do="give another layout, a module or a state_dict",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the plain model's `state_dict`, whole, on rank 0; an empty dict on other ranks.

            state = layout.state_dict()  # on all ranks
            if rank == 0:
                torch.save(state, "model.pt")

        Copies on the CPU, under the names of the model as it was: a plain model loads them with
        `load_state_dict`, any layout with `load_from`. Collective.
        """
        return state_of(self, self.skeleton)

    def save_pretrained(
        self, folder: str | Path, *, merged: bool = False, file_bytes: int = 5 * 10**9
    ) -> None:
        """Write the weights as `model.safetensors` into a folder, one at a time. Collective.

            layout.save_pretrained("gpt")  # on all ranks

        transformers' `from_pretrained` reads the folder of one of its models, which gets its
        `config.json`, `safetensors.torch.load_model` that of any plain model, and
        `nbdist.from_pretrained` both, into any layout. Names are those of the plain model, dtypes
        stay, and what is tied is written once. Rank 0 writes, and needs room for one whole weight
        beside its own parts.

        Of a model with adapters of PEFT these are written, as PEFT does:
        `PeftModel.from_pretrained` reads the folder.

        Args:
            folder: Made where it is not there; weights in it are replaced once all are written.
            merged: Of a model of PEFT write the base, with the adapters in use merged into it, as
                after `merge_and_unload`. Rank 0 needs room for the whole model.
            file_bytes: The most in one file, but for a single weight that is larger. Where there
                are several files, `model.safetensors.index.json` tells what lies in which.

        Raises:
            CheckpointError: Rank 0 cannot write there, or a weight does not go into such files; the
                same on all ranks, and says what of it is as it was.
        """
        there = Path(folder).expanduser()
        if save_adapters.has_adapters(self.model):
            write = save_adapters.save_merged if merged else save_adapters.save
            write(self, self.skeleton, there)
            return
        if merged:
            raise CheckpointError(
                f"{torch_sharded.plain_name(self.model)} is no model of PEFT: it has no adapters.",
                do="layout.save_pretrained(folder)",
            )
        plain = self.skeleton or self.model
        save_pretrained.save(self, plain, there, file_bytes, self._describe)

    def _describe(self, folder: Path) -> None:
        """Write the configuration of a model of transformers."""
        config = getattr(self.model, "config", None)
        if config is None or not callable(getattr(config, "save_pretrained", None)):
            return
        config = copy.deepcopy(config)
        config.architectures = [torch_sharded.plain_name(self.model)]
        config.save_pretrained(folder)
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)

    def generate(
        self,
        inputs: Any,
        *,
        max_new_tokens: int,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Any:
        """Return tokens from the model as it is spread: its text, in evaluation. Collective.

            layout.generate(ids, max_new_tokens=40, tokenizer=tokenizer)  # on all ranks

        Of a model of transformers, or one of PEFT around it, that is its own `generate`, with a
        cache and all its options; any other module is called as `model(ids)`, with the whole
        sequence for each token. Afterwards modes and random numbers are as before, so that it may
        stand between two steps.

        Ranks that share samples (tp, pp) are given the same prompts. Others may have prompts of
        their own: each rank gets its own text, and with equal prompts an equal one. Under `"ddp"`
        and `"zero1"` a rank may also call it alone.

        Args:
            inputs: Ids of the prompts, (batch, sequence) or (sequence,), or a dict of keywords, as
                a tokenizer gives it.
            max_new_tokens: The most tokens that are added.
            seed: Random numbers begin from it, for `do_sample=True`: another gives another text.
            tokenizer: Shows the text of rank 0's first prompt while it is made, by its `decode`.
            options: Those of transformers' `generate`, such as `do_sample`, `top_k` or `num_beams`;
                of another module `do_sample`, `temperature`, `top_k`, `eos_token_id` and
                `pad_token_id`.

        Returns:
            What transformers' `generate` returns: the prompts and what follows them, (batch,
            sequence), on every rank; of an encoder and decoder what was decoded.

        Raises:
            LayoutError: The layout (cp, sequence parallel) or an option, such as `assistant_model`,
                is refused, or ranks that share samples got other prompts.
        """
        return generate.generate(self, inputs, max_new_tokens, seed, tokenizer, options)

    def verify(
        self,
        batch: tuple[Any, Any],
        loss_fn: LossFunction,
        steps: int = 3,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Proof:
        """Prove that the layout computes what one process does on the same split. Collective.

        Some shadow steps are made on this model and, on rank 0, on the plain one with the same
        weights. Gradients, buffers and losses are compared on every rank; then all is put back:
        weights, gradients, statistics, modes, random numbers. No optimizer is used, unless yours is
        to be proven, too: then a new one of its class and options steps on the layout's parts, and
        one on the plain model, both with the same gradients, and their updates are compared.

        Rank 0 also computes the loss of some pieces in one. Where it is not their mean, as that of
        a masked mean, the proof says so.

        With `Precision` the one process computes in it, too. `Compress` is switched off for it, and
        the proof tells by how much it changes gradients.

        Args:
            batch: This rank's `(x, y)`, as in `step`.
            loss_fn: Makes the mean loss of `(model(x), y)`.
            steps: How many are made.
            optimizer: The one that trains the model; it and its states are not touched. The
                learning rate is at least 0.01 meanwhile.

        Returns:
            A proof, the same on every rank: `ok`, and printed, what differs, where and by how much.

        Raises:
            LayoutError: It cannot be proven; the text says why. A difference is no error.
        """
        self.proof = verify.verify(self, self._task(batch, loss_fn), steps, optimizer)
        return self.proof

    def look_into(self, batch: tuple[Any, Any], loss_fn: LossFunction) -> Looked:
        """Prove one step, with what every module returns. Collective; as `verify`."""
        return verify.look_into(self, self._task(batch, loss_fn))

    def _task(self, batch: tuple[Any, Any], loss_fn: LossFunction) -> preconditions.Task:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise LayoutError(
                f"verify got a {type(batch).__name__} where (x, y) should be.",
                do="layout.verify((x, y), loss_fn) with this rank's inputs and targets",
            )
        inputs = as_inputs(batch[0])
        return preconditions.Task(
            (inputs.args, inputs.keywords, batch[1]),
            inputs.samples or samples_in(batch[1]),
            loss_fn,
            lambda given, loss_of: self._step(Inputs(*given[:2]), given[2], loss_of),
            lambda model, given, loss_of: loss_of(Inputs(*given[:2]).run(model), given[2]),
            _whole_batch if self.pipeline is None else self.pipeline.runner.cut,
            () if self.pipeline is None else ("", *self.pipeline.elsewhere),
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a DDP communication hook, as on `DistributedDataParallel`; before training.

        Raises:
            LayoutError: The layout has no reducer: fsdp's traffic has no such hooks.
        """
        reducer = torch_modules.reducer_of(self.model)
        if reducer is None:
            raise LayoutError(
                f'Layout "{self.name}" has no communication hooks.',
                why="they belong to DDP's reducer, and fsdp and tp communicate without it",
                do='use "ddp" for hooks',
            )
        reducer.register_comm_hook(state, hook)


def _whole_batch(inputs: Any) -> list[Any]:
    """Return a rank's part unchanged: without pp it is one forward."""
    return [inputs]


def layout_of(model: nn.Module) -> Layout | None:
    """Return the layout that `parallelize` gave to a model, if it did."""
    known: Layout | None = torch_modules.uncompiled(model).__dict__.get(_KEY)
    return known


def _before_load(
    model: nn.Module, state: Mapping[str, Any], prefix: str, _about: Any, strict: bool, *_: Any
) -> None:
    """Refuse what `load_state_dict` cannot load; torch calls it before."""
    layout = layout_of(model)
    if layout is not None:
        held = dict(model.named_parameters(remove_duplicate=False))
        names = {name for stage in layout.stages for name in stage.parameters} if strict else set()
        load.refuse_whole(layout, state, prefix, sorted(names - held.keys()))


def attach(layout: Layout) -> None:
    """Attach a layout to its model, and have copies of the model leave it out."""
    layout.model.__dict__[_KEY] = layout
    plain_copy.provide(layout.model, layout.name, layout.skeleton, layout.no_skeleton)
    peft_calls.refuse(layout.model, layout.shape, layout.name)


def layout_facts(known: Layout) -> dict[str, str]:
    """Return the facts of a layout for a run."""
    proven = {} if known.proof is None else {"proof": known.proof.verdict}
    return proven | {
        "layout": known.name,
        "model": torch_sharded.plain_name(known.model),
        "parameters": str(known.size.parameters),
        "layout_explained": repr(known.explain()),
    }


class Layouts:
    """The layouts of a process, made here or received from another rank."""

    def __init__(self) -> None:
        self._living: weakref.WeakSet[Layout] = weakref.WeakSet()
        self._next_number = 0

    def next_number(self) -> int:
        """Return the number of a layout that is made."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def number_after(self, number: int) -> None:
        """Number the next layout after one that this rank received from another."""
        self._next_number = max(self._next_number, number + 1)

    def add(self, layout: Layout) -> None:
        """Note a layout, as long as its model lives."""
        self._living.add(layout)

    def forget(self, layout: Layout) -> None:
        """Let a layout be none of those that live, before its model is gone."""
        self._living.discard(layout)

    def newest(self) -> Layout | None:
        """Return the one that was made last, of those whose models are alive."""
        return max(self._living, key=lambda layout: layout.number, default=None)

    def in_order(self) -> list[Layout]:
        """Return those whose models are alive, in the order in which they were made."""
        return sorted(self._living, key=lambda layout: layout.number)


def live_layouts() -> list[Layout]:
    """Return the layouts of this process whose models are alive, in the order of making."""
    return here.in_order()


def data_shard() -> Shard | None:
    """Return this rank's part of every batch, by the newest living layout."""
    newest = here.newest()
    if newest is None or newest.shape.world_size != dist.get_world_size():
        return None  # the group has another size since: scaling it has set the part
    return Shard(*newest.shape.data_part(dist.get_rank()))


here = Layouts()
