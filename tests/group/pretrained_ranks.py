"""What the ranks run in test_pretrained: folders of weights into layouts and back, and memory."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.layout.from_pretrained import from_pretrained
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.weights import from_files, full_tensors, save_pretrained
from nbdist.shared.errors import NBDistError
from tests.group import models
from tests.group import tensor_parallel_ranks as tensor_parallel


def parallel() -> nn.Module:
    return tensor_parallel.make("gpt", torch.float32, seed=9)


class Stages(nn.Module):
    """A chain with a table, for every axis: blocks of a gate, in float32."""

    def __init__(self, width: int = 32, blocks: int = 4, tokens: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(GatedBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.table(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class GatedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def large() -> Stages:
    """104 MB: a table and a head of 8 MB each, and eight blocks of 11 MB."""
    return Stages(width=592, blocks=8, tokens=3464)


def normed() -> nn.Module:
    """A model whose mlp works across features: shapes fit tp, the numbers would not."""
    return tensor_parallel.GPT(tensor_parallel.block_of(mlp=tensor_parallel.NormedFeatures))


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "gpt": models.GPT,
    "conv": models.ConvNet,
    "parallel": parallel,
    "stages": Stages,
    "large": large,
    "normed": normed,
}


def state(layout: Layout) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors.tensors(layout)}


def loaded(kind: str, folder: str, layouts: list[str]) -> dict[str, bool]:
    """Say whether each layout holds, and trains on, what the folder's model is."""
    expected = torch.load(Path(folder) / "expected.pt")
    found = {}
    for text in layouts:
        layout = from_pretrained(FACTORIES[kind], text, weights=folder)
        mine = state(layout)
        found[text] = bool(mine) and all(torch.equal(mine[n], expected[n]) for n in mine)
        x, y = models.batch("conv" if kind == "conv" else "gpt", 0, 4, torch.float32)
        layout.step(x, y, lambda out, y: F.cross_entropy(out.flatten(0, -2), y.flatten()))
        held = [p for p in layout.model.parameters() if p.requires_grad]
        found[f"{text} trains"] = bool(held) and all(p.grad is not None for p in held)
    return found


def written(kind: str, source: str, target: str, layout: str, file_bytes: int) -> list[str]:
    spread = from_pretrained(FACTORIES[kind], layout, weights=source)
    spread.save_pretrained(target, file_bytes=file_bytes)
    dist.barrier()
    return sorted(path.name for path in Path(target).iterdir())


def refused(kind: str, folders: dict[str, str]) -> dict[str, str]:
    def load(folder: str) -> Layout:
        return from_pretrained(FACTORIES[kind], "zero3", weights=folder)

    texts = {label: text_of(lambda f=folder: load(f)) for label, folder in folders.items()}  # type: ignore[misc]
    texts["two"] = text_of(lambda: from_pretrained("a", "zero3", weights="b"))
    texts["no weights"] = text_of(lambda: from_pretrained(FACTORIES[kind], "zero3"))
    texts["a model"] = text_of(lambda: from_pretrained(Stages(), "zero3", weights="a"))
    texts["no config"] = text_of(lambda: from_pretrained(folders["empty"], "zero3"))
    return texts


def refused_plan(folder: str) -> str:
    return text_of(lambda: from_pretrained(normed, "tp=2", weights=folder))


def unreadable(folder: str, target: str) -> dict[str, str]:
    """Have a disk fail on one rank while it reads, then on rank 0 while it writes."""
    texts = {}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(from_files, "read_box", fail)
        texts["read"] = text_of(lambda: from_pretrained(Stages, "zero3", weights=folder))
    layout = from_pretrained(Stages, "zero3", weights=folder)
    layout.save_pretrained(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_pretrained, "_append", fail)
        texts["write"] = text_of(lambda: layout.save_pretrained(target))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_pretrained, "_index", fail)
        texts["index"] = text_of(lambda: layout.save_pretrained(target, file_bytes=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_describe", fail)
        texts["describe"] = text_of(lambda: layout.save_pretrained(target))
    texts["no folder"] = text_of(lambda: layout.save_pretrained(f"{target}/model.safetensors/a"))
    layout.model.register_buffer("odd", torch.zeros(3, dtype=torch.complex128))
    texts["dtype"] = text_of(lambda: layout.save_pretrained(target))
    return texts


def with_an_int16_buffer(target: str) -> None:
    """Save a pipeline with a dtype that gloo sends none of."""
    model = Stages()
    for block in model.blocks:
        block.register_buffer("order", torch.arange(3, dtype=torch.int16))
    parallelize(model, "pp=2").save_pretrained(target)


def fail(*_: object) -> None:
    raise OSError(5, "Input/output error")


def text_of(action: Callable[[], object]) -> str:
    try:
        action()
    except NBDistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def new_head(folder: str) -> dict[str, Any]:
    """Load a folder without the head; with and without being asked to make a new one."""
    found: dict[str, Any] = {}
    layout = from_pretrained(Stages, "zero3", weights=folder, new=["head.*"], skip=["old.*"])
    mine = state(layout)
    expected = torch.load(Path(folder) / "expected.pt")
    found["body"] = all(torch.equal(mine[n], t) for n, t in expected.items() if n != "head.weight")
    found["head"] = float(mine["head.weight"].std())
    alike = [torch.empty_like(mine["head.weight"]) for _ in range(dist.get_world_size())]
    dist.all_gather(alike, mine["head.weight"])
    found["alike"] = all(torch.equal(alike[0], other) for other in alike)
    return found


def of_transformers(folder: str, body: str, target: str, layouts: list[str]) -> dict[str, Any]:
    """Load a causal model and, of its body alone, a model with a head of another kind."""
    import transformers

    expected = logits_of(folder)
    found: dict[str, Any] = {}
    for text in layouts:
        layout = from_pretrained(folder, text)
        found[text] = type(layout.model).__name__, layout.model.training
        with torch.no_grad():
            logits = layout.model(input_ids=tokens()).logits.flatten()[:50]
        found[f"{text} error"] = float((logits - torch.tensor(expected)).abs().max())
        file_bytes = 20_000 if text == "tp=2" else 1 << 30
        layout.save_pretrained(f"{target}-{text}", file_bytes=file_bytes)
    config = transformers.AutoConfig.from_pretrained(folder)
    kinds: Any = transformers
    config.num_labels = 3
    classifier = from_pretrained(
        lambda: kinds.LlamaForSequenceClassification._from_config(config), "zero3", weights=body
    )
    mine = state(classifier)
    found["head"] = tuple(mine["score.weight"].shape), float(mine["score.weight"].std())
    bare = from_pretrained(lambda: kinds.LlamaModel._from_config(config), "zero3", weights=folder)
    found["body"] = sorted(state(bare))[0]
    return found


def peak(kind: str, folder: str, layout: str) -> tuple[float, float, float]:
    """Return (most memory over shard, shard in bytes, memory at the end over shard)."""
    # What is imported and connected once is no part of a model.
    warm = from_pretrained(Stages, layout, weights=f"{folder}-small")
    del warm
    gc.collect()
    dist.barrier()
    before = reset_peak()
    spread = from_pretrained(FACTORIES[kind], layout, weights=folder)
    most, now = memory("VmHWM"), memory("VmRSS")
    held = full_tensors.names(spread.model).values()
    shard = sum(part.nbytes for part in map(local, held))
    return (most - before) / shard, float(shard), (now - before) / shard


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def reset_peak() -> int:
    """Have the kernel count the peak anew, from what is resident; returns that, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def make_folder(kind: str, folder: str, seed: int = 9) -> None:
    """Write a model of random weights as transformers would, with safetensors' own library."""
    from safetensors.torch import save_model

    torch.manual_seed(seed)
    model = FACTORIES[kind]()
    Path(folder).mkdir(parents=True, exist_ok=True)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(torch.rand_like(buffer))
    save_model(model, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})
    torch.save(model.state_dict(), Path(folder) / "expected.pt")


def read_by_others(kind: str, source: str, target: str) -> bool:
    """Load into a plain model with safetensors' own library, from one file or from several."""
    from safetensors.torch import load_file, load_model

    expected = torch.load(Path(source) / "expected.pt")
    model = FACTORIES[kind]()
    if (Path(target) / "model.safetensors").exists():
        load_model(model, str(Path(target) / "model.safetensors"))
    else:
        found: dict[str, Tensor] = {}
        for path in Path(target).glob("model-*.safetensors"):
            found |= load_file(str(path))
        model.load_state_dict(found)
    mine = model.state_dict()
    return mine.keys() == expected.keys() and all(torch.equal(mine[n], expected[n]) for n in mine)


def without_head(source: str, target: str) -> None:
    from safetensors.torch import load_file, save_file

    held = load_file(f"{source}/model.safetensors")
    del held["head.weight"]
    Path(target).mkdir()
    save_file(held | {"old.weight": torch.ones(3)}, f"{target}/model.safetensors")
    torch.save(torch.load(f"{source}/expected.pt"), f"{target}/expected.pt")


def make_llama(causal: str, body: str) -> list[float]:
    """Have transformers write a small causal model, and its body alone; return some logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(causal)
    model.model.save_pretrained(body)
    return logits_of(causal)


def logits_of(folder: str) -> list[float]:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found: list[float] = model(input_ids=tokens()).logits.flatten()[:50].tolist()
    return found


def tokens() -> Tensor:
    return torch.arange(24).view(2, 12) % 60


def make_vit(folder: str) -> None:
    """Have transformers write a model whose weights have other names in the folder."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(**sizes, intermediate_size=64, image_size=32, patch_size=8)
    model: Any = ViTForImageClassification(config)
    model.save_pretrained(folder)


def read_vit(folder: str) -> bool:
    from transformers import ViTForImageClassification

    mine = state(from_pretrained(folder, "zero3"))
    model: Any = ViTForImageClassification.from_pretrained(folder)
    return all(torch.equal(mine[name], p) for name, p in model.named_parameters())
