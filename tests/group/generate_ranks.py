"""What the ranks run in test_generate: text out of tiny models under each layout."""

# B batch, T sequence, V vocabulary

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint, Precision
from nbdist.engine.layout.policies.policies import ContextParallel, TensorParallel
from nbdist.shared.errors import LayoutError
from tests.group import adapter_ranks
from tests.group.adapter_ranks import WORDS

NEW = 7
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20}
BEAMS: dict[str, Any] = {"num_beams": 3}


class GPT(nn.Module):
    """A decoder without `generate`: `model(ids)` returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(WORDS, 32), nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, WORDS)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.token(ids_BT) + self.place(torch.arange(ids_BT.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.v, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(-2)))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def make(name: str) -> Any:
    """Return a model, in float64, of weights with which its next tokens differ."""
    if name == "gpt":
        torch.manual_seed(0)
        model: Any = GPT().double()
    elif name == "lora":
        model = adapter_ranks.adapted("llama")
    elif name == "sliding":  # a cache that keeps the newest tokens alone
        model = sliding()
    else:
        model = adapter_ranks.base(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model


def sliding() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    values = adapter_ranks.MODELS["llama"][2]
    return MistralForCausalLM(MistralConfig(**values, sliding_window=5)).double()


def prompts(part: int) -> Tensor:
    """Return the ids of three prompts of one length (B, T), others for each part of the data."""
    numbers = torch.Generator().manual_seed(part)
    return torch.randint(3, WORDS, (3, 4 + part), generator=numbers)


def padded(part: int) -> dict[str, Tensor]:
    """Return prompts of unequal lengths, padded on the left, as a tokenizer does."""
    ids = prompts(part)
    mask = torch.ones_like(ids)
    ids[0, :2], mask[0, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def alone(model: Any, given: Any, options: dict[str, Any]) -> Tensor:
    """Return the tokens of one process: transformers' own, or the plainest loop."""
    model.eval()
    torch.manual_seed(5)
    if not isinstance(model, GPT):
        given = given if isinstance(given, dict) else {"input_ids": given}
        return model.generate(**given, max_new_tokens=NEW, **options)
    ids = given
    with torch.no_grad():
        for _ in range(NEW):
            scores = model(ids)[:, -1]
            if options.get("do_sample"):
                scores = (scores.float() / options["temperature"]).double()
                for row in scores:
                    row[row < row.sort(descending=True).values[options["top_k"] - 1]] = -torch.inf
                chosen = torch.multinomial(scores.float().softmax(-1), 1)
            else:
                chosen = scores.argmax(-1, keepdim=True)
            ids = torch.cat([ids, chosen], 1)
    return ids


def refusal(run: Callable[[], Any]) -> str:
    try:
        run()
    except LayoutError as error:
        return str(error)
    return "nothing was refused"


def equal(name: str, layout: str) -> dict[str, tuple[bool, int]]:
    """Return, by how tokens are chosen, whether they are those of one process, and of how many."""
    plain = make(name)
    live = parallelize(copy.deepcopy(plain), layout)
    part = data_shard().index
    found = {}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "greedy": (prompts(part), GREEDY),
        "sampled": (prompts(part), SAMPLED),
    }
    if name != "gpt":
        ways["beams"] = (prompts(part), BEAMS)
        ways["padded"] = (padded(part), GREEDY)
        ways["no cache"] = (prompts(part), {"use_cache": False})
    for way, (given, options) in ways.items():
        expected = alone(plain, given, options)
        tokens = live.generate(given, max_new_tokens=NEW, seed=5, **options)
        found[way] = torch.equal(tokens, expected), expected[:, -NEW:].unique().numel()
    return found


def several(cases: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Run functions of this module one after the other, in one group."""
    return [globals()[name](*arguments) for name, arguments in cases]


def unequal_lengths(name: str) -> bool:
    """Ranks make other numbers of tokens, one of them none at all after its prompt's end."""
    plain = make(name)
    live = parallelize(copy.deepcopy(plain), "zero3")
    rank = dist.get_rank()
    ids = prompts(rank)
    ending = alone(plain, ids, GREEDY)[:, ids.shape[1]].tolist()
    longest = 2 + (NEW - 2) * rank
    same = []
    for options in ({}, {"eos_token_id": ending[0], "pad_token_id": 1}):
        tokens = live.generate(ids, max_new_tokens=longest, **options)
        if name == "gpt":
            expected = ended(alone(plain, ids, GREEDY), ids.shape[1], **options)
            expected = expected[:, : ids.shape[1] + longest]
            if options and bool((tokens == ending[0]).any(1).all()):
                expected = expected[:, : tokens.shape[1]]  # where all end before, nothing follows
        else:
            expected = plain.generate(input_ids=ids, max_new_tokens=longest, **options)
        same.append(torch.equal(tokens, expected))
    return all(same)


def ended(ids_BT: Tensor, start: int, eos_token_id: int = -1, pad_token_id: int = 0) -> Tensor:
    """Return sequences with padding behind their first end."""
    has_ended = (ids_BT[:, start:] == eos_token_id).cumsum(1)
    after = F.pad(has_ended, (1, -1)) > 0
    return torch.cat([ids_BT[:, :start], ids_BT[:, start:].masked_fill(after, pad_token_id)], 1)


def trained(name: str, layout: str, with_text: bool) -> list[Tensor]:
    """Return this rank's weights after three steps with dropout, with texts in between or not."""
    torch.manual_seed(0)
    model = make(name)
    live = parallelize(model, layout)
    optimizer = live.optimizer(torch.optim.AdamW, lr=0.01)

    def text() -> None:
        if with_text:
            for options in (GREEDY, SAMPLED):
                live.generate(prompts(data_shard().index), max_new_tokens=3, **options)
            assert model.training
            assert torch.is_grad_enabled()

    text()
    for step in range(3):
        inputs, targets = adapter_ranks.part(name, step)
        given = inputs if name != "gpt" else (inputs["input_ids"],)
        live.step(given, targets, adapter_ranks.loss_of)
        text()
        optimizer.step()
        optimizer.zero_grad()
        text()
    state = [p.detach() for p in model.parameters()]
    return [getattr(t, "_local_tensor", t).clone() for t in [*state, torch.rand(3)]]


def training_goes_on(name: str, layout: str) -> bool:
    """Whether texts between steps change nothing, to the last bit."""
    with_text, without = (trained(name, layout, is_on) for is_on in (True, False))
    return all(map(torch.equal, with_text, without)) and len(with_text) > 1


class Letters:
    """A tokenizer of two bytes a letter, of which the first alone is none."""

    def decode(self, ids: list[int]) -> str:
        data = b"".join(bytes([0xC3, 0xA0 + i % 32]) for i in ids[:-1])
        return (data + b"\xc3").decode(errors="replace")


def shown(name: str, layout: str) -> tuple[list[str], str]:
    """Return what was written, piece by piece, and the text of the tokens."""
    live = parallelize(make(name), layout)

    out = Pieces()
    with contextlib.redirect_stdout(out):
        tokens = live.generate(prompts(0), max_new_tokens=4, tokenizer=Letters())
    return [text for text in out.written if text], Letters().decode(tokens[0].tolist())


class Pieces(io.StringIO):
    """Keeps each piece that is written by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)


def refusals() -> dict[str, str]:
    """Return what is said to what cannot be."""
    rank = dist.get_rank()
    llama, gpt = (make(name) for name in ("llama", "gpt"))
    found = {}

    def refused(what: str, live: Any, given: Any = None, **options: Any) -> None:
        given = prompts(0) if given is None else given
        found[what] = refusal(lambda: live.generate(given, max_new_tokens=2, **options))

    ddp = parallelize(copy.deepcopy(llama), "ddp")
    refused("assistant", ddp, assistant_model=llama)
    tp = parallelize(copy.deepcopy(llama), "tp=2")
    refused("other prompts", tp, prompts(rank))
    refused("other seeds", tp, seed=rank)
    pp = parallelize(copy.deepcopy(llama), "pp=2")
    refused("hidden states", pp, output_hidden_states=True)
    refused("static cache", pp, cache_implementation="static")
    refused("sequence", parallelize(copy.deepcopy(llama), "tp=2", TensorParallel(sequence=True)))
    refused("cp", parallelize(copy.deepcopy(gpt), "cp=2", ContextParallel("gather")))
    refused("encoder", parallelize(make("t5"), "pp=2"))
    plain = parallelize(copy.deepcopy(gpt), "ddp")
    refused("beams of a plain module", plain, num_beams=2)
    refused("padded for a plain module", plain, padded(0))
    refused("no logits", parallelize(nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten()), "ddp"))
    refused("no text", parallelize(adapter_ranks.base("bert"), "ddp"))
    return found


def with_policies() -> dict[str, bool]:
    """Whether policies that change a forward leave tokens as they are."""
    plain = make("llama")
    expected = alone(plain, prompts(0), GREEDY)
    found = {}
    for layout, policy in (
        ("zero3", ActivationCheckpoint()),
        ("tp=2", TensorParallel(loss=True)),
    ):
        live = parallelize(copy.deepcopy(plain), layout, policy)
        tokens = live.generate(prompts(0), max_new_tokens=NEW)
        found[f"{layout} {type(policy).__name__}"] = torch.equal(tokens, expected)
    compiled = copy.deepcopy(plain)
    compiled.model.layers[0].compile()
    live = parallelize(compiled, "zero3")
    found["compiled"] = torch.equal(live.generate(prompts(0), max_new_tokens=NEW), expected)
    for name in ("llama", "lora", "t5"):
        plain = make(name).float()
        live = parallelize(copy.deepcopy(plain), "ddp", Precision("bf16"))
        with torch.autocast("cpu", torch.bfloat16):
            expected = alone(plain, prompts(0), GREEDY)
        found[f"bf16 {name}"] = torch.equal(live.generate(prompts(0), max_new_tokens=NEW), expected)
    return found


def on_one_rank() -> bool:
    """Whether a replica makes text by itself."""
    live = parallelize(make("llama"), "ddp")
    if dist.get_rank():
        return True
    return torch.equal(
        live.generate(prompts(0), max_new_tokens=NEW), alone(make("llama"), prompts(0), GREEDY)
    )
