"""What the ranks run in test_quantized_base: adapters of PEFT on weights that torchao quantized."""

import shutil
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.policies import TensorParallel
from tests.group import adapter_ranks
from tests.group.adapter_ranks import ATTENTION, attempt, loss_of, part

NAME = "llama"


def several(calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    return [globals()[name](*arguments) for name, arguments in calls]


def quantized(kind: str = "int8", left: str = "lm_head") -> Any:
    """Return a plain model in float32 with its Linear layers quantized, but those left."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup

    how = {
        "int8": lambda: Int8WeightOnlyConfig(),
        "int4": lambda: IntxWeightOnlyConfig(
            weight_dtype=vars(torch)["int4"], granularity=PerGroup(32)
        ),
        "fp8": lambda: Float8WeightOnlyConfig(),
    }
    model = adapter_ranks.base(NAME).float()

    def is_chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and left not in name

    quantize_(model, how[kind](), filter_fn=is_chosen)
    return model


def adapted(kind: str = "int8", left: str = "lm_head", *, double: bool = False) -> Any:
    """Return a quantized model with LoRA on it; torchao's int8 also computes in float64."""
    import peft

    options: Any = {"r": 4, "init_lora_weights": False, "target_modules": ATTENTION[NAME]}
    torch.manual_seed(1)
    config = peft.LoraConfig(**options)
    model: Any = peft.get_peft_model(quantized(kind, left), config, autocast_adapter_dtype=False)
    if double:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.double()
        for parameter in model.parameters():
            if not torch_quantized.is_quantized(parameter):
                parameter.data = parameter.data.double()
    return model


def unlike(model: Any) -> Any:
    """Give a model other numbers on each rank, the quantized ones too."""
    for tensor in torch_quantized.parts(model.state_dict()).values():
        tensor.mul_(dist.get_rank() + 1)
    return model


def distance(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the largest difference of two states, quantized weights by what they consist of."""
    states = (torch_quantized.parts(state) for state in (expected, found))
    return adapter_ranks.distance(*({k: t.double() for k, t in one.items()} for one in states))


def parity(layouts: list[str], kind: str, double: bool) -> dict[str, Any]:
    """Return by layout how far training ends from one process, what a proof says, and the cost."""
    expected = adapter_ranks.trained_plain(adapted(kind, double=double), NAME)

    def of(text: str) -> tuple[float, str, str]:
        layout: Any = parallelize(unlike(adapted(kind, double=double)), text)
        said = str(layout.verify(part(NAME, 0), loss_of, steps=1).verdict)
        off = distance(expected, adapter_ranks.trained_spread(layout, NAME))
        return off, said, repr(layout.explain())

    return {text: attempt(partial(of, text)) for text in layouts}


def written(layouts: list[str]) -> dict[str, Any]:
    """Return by layout what of its files and its state is what plain PEFT and torch read."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        return {text: attempt(partial(_written, text, made[0])) for text in layouts}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])


def _written(text: str, home: str) -> dict[str, Any]:
    layout: Any = parallelize(lambda: unlike(adapted()), text)
    adapter_ranks.trained_spread(layout, NAME)
    state, folder = layout.state_dict(), f"{home}/{text}"
    layout.save_pretrained(folder)
    found = {
        "merged": attempt(lambda: layout.save_pretrained(folder, merged=True)),
        "itself": attempt(lambda: str(layout.model.load_state_dict(layout.model.state_dict()))),
    }
    other: Any = parallelize(unlike(adapted()), "ddp")
    for label, source in (("from a layout", layout), ("from a state", state)):
        adapter_ranks.shake(other.model)
        other.load_from(source)
        found[label] = distance(state, other.state_dict())
    return found | (_read(state, folder) if state else {})


def _read(state: dict[str, Tensor], folder: str) -> dict[str, Any]:
    import peft

    plain: Any = peft.PeftModel.from_pretrained(quantized(), folder, autocast_adapter_dtype=False)
    bare = adapted()
    bare.load_state_dict(state)
    # What the refusal of a merged model advises.
    precise: Any = peft.PeftModel.from_pretrained(adapter_ranks.base(NAME).float(), folder)
    merged = precise.merge_and_unload().state_dict()
    return {
        "files": distance(state, plain.state_dict()),
        "plain": distance(state, bare.state_dict()),
        "merges": any("q_proj.weight" in name for name in merged),
    }


def with_tp() -> dict[str, Any]:
    """Return what tp says of quantized weights, and of a plan that leaves them out."""
    layers = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
    plan = {f"base_model.model.model.layers.*.mlp.{name}": way for name, way in layers.items()}
    expected = adapter_ranks.trained_plain(adapted(left="mlp", double=True), NAME)

    def of_the_rest() -> float:
        model = unlike(adapted(left="mlp", double=True))
        layout: Any = parallelize(model, "tp=2", TensorParallel(plan=plan))
        return distance(expected, adapter_ranks.trained_spread(layout, NAME))

    return {
        "refused": attempt(lambda: parallelize(adapted(), "tp=2")),
        "its plan": attempt(of_the_rest),
    }
