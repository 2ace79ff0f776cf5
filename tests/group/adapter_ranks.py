"""What the ranks run in test_adapters: PEFT's adapters on tiny models of transformers."""

# B batch, T sequence

import copy
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.axes.tp import local_parameters, plain_cuts
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.policies import TensorParallel

STEPS, GLOBAL_BATCH, WORDS, LENGTH = 3, 8, 64, 12
_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {"vocab_size": WORDS, "intermediate_size": 64, "max_position_embeddings": 32, **_HIDDEN}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
# The class, its configuration, and the values.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2, **_TEXT, **_ENDS}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_GPT2, **_ENDS},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**_STILL, **_TEXT, **_ENDS}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"dropout_rate": 0.0, "decoder_start_token_id": 0, **_T5},
    ),
}
# Columns and rows; of gpt2 what is packed.
ATTENTION = {
    "llama": ["q_proj", "v_proj", "o_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "bert": ["query", "value", "attention.output.dense"],
    "t5": ["q", "v", "o"],
}


def base(name: str) -> Any:
    """Return a plain model, in float64: sums differ less there than a mistake does."""
    import transformers

    kind, config, values = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**values)).double()


def adapted(name: str, kind: str = "Lora", **options: Any) -> Any:
    """Return a model with an adapter of PEFT, of numbers with which it changes something."""
    import peft

    chosen: dict[str, Any] = {"target_modules": ATTENTION[name], **options}
    if kind == "Lora":
        chosen = {"r": 4, "init_lora_weights": False, **chosen}
    model: Any = peft.get_peft_model(base(name), getattr(peft, kind + "Config")(**chosen))
    if kind != "Lora":
        shake(model)
    return model.double()


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Change what is trained a little: new adapters are zeros or ones."""
    numbers = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=numbers) / 10)


def batch(name: str, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of a step, all ranks together, and its targets (B, T)."""
    numbers = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(3, WORDS, (GLOBAL_BATCH, LENGTH), generator=numbers)
    targets_BT = torch.randint(3, WORDS, (GLOBAL_BATCH, LENGTH), generator=numbers)
    inputs = {"input_ids": ids_BT}
    return (inputs | {"decoder_input_ids": targets_BT} if name == "t5" else inputs), targets_BT


def part(name: str, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return this rank's part of a step."""
    inputs, targets = batch(name, step)
    shard = data_shard()
    own = {key: t.chunk(shard.count)[shard.index] for key, t in inputs.items()}
    return own, targets.chunk(shard.count)[shard.index]


def loss_of(out: Any, y: Tensor) -> Tensor:
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def trained_plain(model: Any, name: str, steps: int = STEPS) -> dict[str, Tensor]:
    """Train in one process on whole batches; return its state."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for step in range(steps):
        inputs, targets = batch(name, step)
        loss_of(model(**inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: t.detach() for key, t in model.state_dict().items()}


def trained_spread(layout: Any, name: str, steps: int = STEPS) -> dict[str, Tensor]:
    """Train the same on a layout; return the whole state, on rank 0."""
    optimizer = layout.optimizer(torch.optim.AdamW, lr=0.01)
    for step in range(steps):
        layout.step(*part(name, step), loss_of)
        optimizer.step()
        optimizer.zero_grad()
    return layout.state_dict()


def distance(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the largest difference of two states; 0 on ranks that have none."""
    if not found:
        return 0.0
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())[:4]
    differences = [(expected[key] - found[key]).abs().max().item() for key in expected]
    return max(differences)


def policies(name: str, layout: str) -> list[Any]:
    """Return what a layout needs beside its text: an example of two inputs."""
    inputs, _ = batch(name, 0)
    is_guessed = name != "t5" or "tp" not in layout
    return [] if is_guessed else [TensorParallel(example={k: t[:2] for k, t in inputs.items()})]


def parity(name: str, layouts: list[str], options: dict[str, Any]) -> dict[str, float | str]:
    """Return by layout how far it ends from one process, or why it was refused."""
    found: dict[str, float | str] = {}
    expected = trained_plain(adapted(name, **options), name)

    def of(text: str) -> float:
        layout = parallelize(adapted(name, **options), text, *policies(name, text))
        return distance(expected, trained_spread(layout, name))

    for text in layouts:
        found[text] = attempt(partial(of, text))
    return found


def attempt(work: Callable[[], Any]) -> Any:
    """Return what it gives, or its error as a text."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def several(calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    return [globals()[name](*arguments) for name, arguments in calls]


# ---- Two adapters, in turns --------------------------------------------------------------------


def two_adapters(name: str) -> Any:
    """Return a model with the adapters "default" and "b"."""
    from peft import LoraConfig

    model = adapted(name)
    options: Any = {"r": 2, "target_modules": ATTENTION[name], "init_lora_weights": False}
    model.add_adapter("b", LoraConfig(**options))
    model.set_adapter("default")
    return model.double()


def turns(
    model: Any,
    name: str,
    step: Callable[[int], None],
    optimizer: Callable[[], Any],
    *,
    once: bool,
    pipelined: bool = False,
) -> Tensor:
    """Train the adapters in turns; return logits (B, T, V) without any, of a forward in between."""
    one = optimizer() if once else None
    plain = torch.empty(0)
    for turn, adapter in enumerate(("default", "b", "default")):
        model.set_adapter(adapter)
        stepped = one or optimizer()
        for each in range(2):
            step(2 * turn + each)
            stepped.step()
            stepped.zero_grad()
        if not pipelined:
            with model.disable_adapter(), torch.no_grad():
                plain = model(**batch(name, 0)[0]).logits
    return plain


def in_turns(name: str, layouts: list[str], once: bool) -> dict[str, Any]:
    """Return by layout how far states and logits are from one process, and what has changed."""
    found: dict[str, Any] = {}
    model = two_adapters(name)
    before = {key: t.clone() for key, t in model.state_dict().items()}

    def plain_step(step: int) -> None:
        inputs, targets = batch(name, step)
        loss_of(model(**inputs), targets).backward()

    def plain_optimizer() -> Any:
        trained = [p for p in model.parameters() if once or p.requires_grad]
        return torch.optim.SGD(trained, lr=0.5, momentum=0.9)

    logits = turns(model, name, plain_step, plain_optimizer, once=once)
    expected = {key: t.detach() for key, t in model.state_dict().items()}
    moved = {key for key, t in expected.items() if not torch.equal(t, before[key])}
    assert moved == {key for key in expected if "lora_" in key}

    def of(text: str) -> Any:
        layout: Any = parallelize(two_adapters(name), text)

        def optimizer() -> Any:
            trained = [p for p in layout.model.parameters() if p.requires_grad]
            chosen = None if once or text == "zero1" else trained
            return layout.optimizer(torch.optim.SGD, chosen, lr=0.5, momentum=0.9)

        def step(number: int) -> None:
            layout.step(*part(name, number), loss_of)

        pipelined = layout.pipeline is not None
        seen = turns(layout.model, name, step, optimizer, once=once, pipelined=pipelined)
        return (
            distance(expected, layout.state_dict()),
            0.0 if pipelined else (seen - logits).abs().max().item(),
        )

    for text in layouts:
        found[text] = attempt(partial(of, text))
    return found


def proven_in_turns(name: str, layouts: list[str]) -> dict[str, Any]:
    """Return by layout what proofs say of each adapter, and how far off a copy's logits are."""

    def of(text: str) -> Any:
        layout: Any = parallelize(two_adapters(name), text, *policies(name, text))
        said = []
        for adapter in ("default", "b", "default"):
            layout.model.set_adapter(adapter)
            said.append(attempt(lambda: layout.verify(part(name, 0), loss_of, steps=1).verdict))
        layout.model.set_adapter("b")
        return [*said, *(copied(layout, name) if text in ("ddp", "zero1") else [])]

    return {text: attempt(partial(of, text)) for text in layouts}


@torch.no_grad()
def copied(layout: Any, name: str) -> list[Any]:
    """Return whether a copy of the model uses the adapter that the model uses."""
    inputs, _ = batch(name, 0)
    expected = layout.model(**inputs).logits
    found = copy.deepcopy(layout.model)(**inputs).logits
    return ["equal" if torch.equal(found, expected) else "a copy differs"]


# ---- Nothing for what is frozen ----------------------------------------------------------------


def held_and_sent(name: str, layouts: list[str], kind: str) -> dict[str, dict[str, int]]:
    """Return by layout the bytes of gradients, states and traffic, and of what is trained.

    Traffic is that of an optimizer step, by collective, as the tap counts it.
    """
    from nbdist.engine.tap import tap

    tap.install("full")
    found = {}
    for text in layouts:
        layout = parallelize(adapted(name, kind), text)
        optimizer = layout.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
        x, y = part(name, 0)
        for _ in range(2):
            layout.step(x, y, loss_of)  # DDP's buckets are laid anew in the second
            optimizer.step()
            optimizer.zero_grad()
        loss = loss_of(layout.model(**x), y)
        tap.take()
        loss.backward()
        in_backward = tap.take().bytes
        gradients = bytes_of(p.grad for p in layout.model.parameters())
        optimizer.step()
        in_step = tap.take().bytes
        inner = getattr(optimizer, "optim", optimizer)
        states = bytes_of(v for state in inner.state.values() for v in state.values())
        trained = bytes_of(p for p in layout.model.parameters() if p.requires_grad)
        whole = bytes_of(p for p in adapted(name, kind).parameters() if p.requires_grad)
        found[text] = {
            "backward": in_backward,
            "step": in_step,
            "gradients": gradients,
            "states": states,
            "trained": trained,
            "whole": whole,
            "blocks": bytes_of(
                p for name in layout.blocks for p in layout.model.get_submodule(name).parameters()
            ),
        }
    return found


def bytes_of(tensors: Any) -> int:
    parts = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None)
    return sum(t.nbytes for t in parts if isinstance(t, Tensor))


# ---- Saved -------------------------------------------------------------------------------------


def saved(name: str, layout: str) -> dict[str, bool]:
    """Train, save both ways; return what plain PEFT finds in the folders, bit for bit."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        return _saved(name, layout, made[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])


def _saved(name: str, layout: str, folder: str) -> dict[str, bool]:
    import peft

    spread: Any = parallelize(two_adapters(name), layout)
    spread.model.set_adapter("b")
    trained_spread(spread, name)
    state = spread.state_dict()
    spread.save_pretrained(f"{folder}/adapters")
    spread.save_pretrained(f"{folder}/merged", merged=True)
    own = attempt(lambda: spread.model.save_pretrained(f"{folder}/own"))
    is_whole = layout in ("ddp", "zero1")
    found = {"its own save is refused": is_whole or "layout.save_pretrained" in str(own)}
    if not state:
        return found
    written = {p.relative_to(folder).as_posix() for p in Path(folder).rglob("adapter_*")}
    ends = ("adapter_config.json", "adapter_model.safetensors")
    expected_files = {f"adapters/{below}{end}" for below in ("", "b/") for end in ends}
    found["files"] = expected_files == {path for path in written if path.startswith("adapters")}
    plain: Any = peft.PeftModel.from_pretrained(base(name), f"{folder}/adapters")
    plain.load_adapter(f"{folder}/adapters/b", "b")
    inputs, _ = batch(name, 0)
    expected = two_adapters(name)
    expected.load_state_dict(state)
    loaded = plain.state_dict()
    found["adapters"] = all(torch.equal(loaded[k], t) for k, t in state.items() if "lora_" in k)
    found["same names"] = loaded.keys() == state.keys()
    for adapter in ("default", "b"):
        expected.set_adapter(adapter)
        plain.set_adapter(adapter)
        found[adapter] = torch.equal(plain(**inputs).logits, expected(**inputs).logits)
    whole = type(base(name)).from_pretrained(f"{folder}/merged").state_dict()
    merged = expected.merge_and_unload().state_dict()
    found["merged"] = all(torch.equal(whole[key], t) for key, t in merged.items())
    found["changed"] = any(
        not torch.equal(t, base(name).state_dict()[k]) for k, t in merged.items()
    )
    return found


# ---- Adapters that transformers itself has put on ----------------------------------------------


def of_transformers() -> Any:
    """Return a model of transformers that has got an adapter by `add_adapter`."""
    from peft import LoraConfig

    model = base("llama")
    options: Any = {"r": 4, "target_modules": ATTENTION["llama"], "init_lora_weights": False}
    model.add_adapter(LoraConfig(**options))
    return model.double()


def without_peft_model(layouts: list[str]) -> dict[str, Any]:
    """Return by layout how far training ends from one process, whether saved is loaded, and words.

    The words are what is said of a merged model, and of an adapter that comes later.
    """
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    expected = trained_plain(of_transformers(), "llama")

    def of(text: str) -> dict[str, Any]:
        layout: Any = parallelize(of_transformers(), text, *policies("llama", text))
        off = distance(expected, trained_spread(layout, "llama"))
        state, folder = layout.state_dict(), f"{made[0]}/{text}"
        layout.save_pretrained(folder)
        found = {
            "off": off,
            "merged": attempt(lambda: layout.save_pretrained(folder, merged=True)),
            "later": attempt(lambda: later(text)),
        }
        if dist.get_rank() == 0:
            plain = base("llama")
            plain.load_adapter(folder)
            loaded = plain.double().state_dict()
            found["loads"] = loaded.keys() == state.keys() and all(
                torch.equal(loaded[name], tensor) for name, tensor in state.items()
            )
        return found

    try:
        return {text: attempt(partial(of, text)) for text in layouts}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])


def later(layout: str) -> None:
    """Give a model of transformers an adapter after `parallelize`, and train it alone."""
    from peft import LoraConfig

    spread: Any = parallelize(base("llama"), layout, *policies("llama", layout))
    spread.model.add_adapter(LoraConfig(r=4, target_modules=ATTENTION["llama"]))
    one_step(spread)


# ---- Mistakes ----------------------------------------------------------------------------------


def new_adapter(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter("new", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("new")


def one_step(layout: Any, name: str = "llama") -> None:
    optimizer = layout.optimizer(torch.optim.SGD, lr=0.1)
    layout.step(*part(name, 0), loss_of)
    optimizer.step()


def wrapped_later() -> None:
    """Put an adapter on a model in shards, and train it alone, as TRL's `peft_config` does."""
    from peft import LoraConfig, get_peft_model

    spread: Any = parallelize(base("llama"), "zero3")
    model: Any = get_peft_model(spread.model, LoraConfig(r=2, target_modules=["q_proj"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    inputs, targets = part("llama", 0)
    loss_of(model(**inputs), targets).backward()
    optimizer.step()


def unlike(layout: str) -> None:
    spread: Any = parallelize(two_adapters("llama"), layout)
    spread.model.set_adapter(["default", "b"][dist.get_rank()])
    one_step(spread)


def frozen(layout: str) -> None:
    model = adapted("llama")
    model.requires_grad_(False)
    one_step(parallelize(model, layout))


def merged(layout: str) -> None:
    spread: Any = parallelize(adapted("llama"), layout)
    spread.model.merge_adapter()
    one_step(spread)


def forgotten_sum() -> Any:
    """Plant the mistake that a whole parameter keeps the gradient of its rank's part."""
    right = vars(plain_cuts)["partial_of"]
    try:
        vars(plain_cuts)["partial_of"] = local_parameters.local_of
        spread: Any = parallelize(adapted("llama"), "tp=2")
    finally:
        vars(plain_cuts)["partial_of"] = right
    return str(spread.verify(part("llama", 0), loss_of, steps=1))


def spread_adapted(layout: str, *given: Any, **options: Any) -> Any:
    return parallelize(adapted("llama", **options), layout, *given).model


def mistakes() -> dict[str, Any]:
    """Return what is said of each mistake, by its name."""
    base_alone = {
        f"base_model.model.model.layers.*.mlp.{name}.base_layer": style
        for name, style in (("gate_proj", "column"), ("up_proj", "column"), ("down_proj", "row"))
    }
    on_mlp = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    ddp = parallelize(adapted("llama"), "ddp")
    new_adapter(ddp.model)
    calls: dict[str, Callable[[], Any]] = {
        "added, ddp": lambda: one_step(ddp),
        "added, zero3": lambda: new_adapter(spread_adapted("zero3")),
        "added, tp": lambda: new_adapter(spread_adapted("tp=2")),
        "wrapped later, zero3": wrapped_later,
        "own save, zero3": lambda: spread_adapted("zero3").save_pretrained("nowhere"),
        "own save, pp": lambda: spread_adapted("pp=2").save_pretrained("nowhere"),
        "unload, tp": lambda: spread_adapted("tp=2").merge_and_unload(),
        "merge, pp": lambda: spread_adapted("pp=2").merge_adapter(),
        "frozen, zero3": lambda: frozen("zero3"),
        "frozen, ddp": lambda: frozen("ddp"),
        "frozen, tp": lambda: frozen("tp=2"),
        "merged, zero3": lambda: merged("zero3"),
        "merged, ddp": lambda: merged("ddp"),
        "DoRA on a row": lambda: spread_adapted("tp=2", use_dora=True),
        "a plan for the base": lambda: spread_adapted(
            "tp=2", TensorParallel(plan=base_alone), **on_mlp
        ),
        "gradients of parts": forgotten_sum,
    }
    return {label: attempt(call) for label, call in calls.items()}


def unlike_ranks(layout: str) -> Any:
    return attempt(lambda: unlike(layout))
