"""`Precision("fp8")` and `"mxfp8"`: products of linear layers with operands of eight bits.

A layer stays the module that it is, with its weight and bias under their names: only its forward
rounds input, weight and the gradient of its output, in the midst of a model that computes in
bfloat16. What optimizers step on, what ranks send and what is saved is as with "bf16".

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; OCP Microscaling Formats, 2023.
"""

from collections.abc import Iterable

import torch
from torch import nn

from nbdist.engine.compat import torch_quantized
from nbdist.engine.compat.libraries import torchao_products
from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.layout.policies.efficiency import Precision
from nbdist.engine.steps import step_state
from nbdist.shared.errors import LayoutError

_MULTIPLES = {"fp8": 16, "mxfp8": 32}  # of which both sizes of a layer have to be
_CAPABLE = {"fp8": (8, 9), "mxfp8": (10, 0)}


class EightBits(Around):
    """A linear layer whose products are of eight bits; what it returns is bfloat16.

    Attributes:
        kind: "fp8" or "mxfp8".
    """

    def __init__(self, layer: nn.Linear, kind: str, *, emulates: bool) -> None:
        super().__init__(layer)
        self.kind = kind
        self._emulates = emulates

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        assert isinstance(self._module, nn.Linear), "it is around one"
        weight, bias = self._module.weight, self._module.bias
        multiply = torchao_products.product(self.kind, emulates=self._emulates)
        with torch.autocast(x.device.type, enabled=False):  # it is done by hand
            out = multiply(x.to(torch.bfloat16), weight.to(torch.bfloat16))
            return out if bias is None else out + bias.to(out.dtype)


def layers_of(model: nn.Module, policy: Precision, tp: int = 1) -> list[str]:
    """Return the names of the layers that would compute so; none under another policy.

    Plain Linears whose sizes are multiples of 16 (mxfp8: 32), inside repeated blocks; in a model
    without blocks all but the last, for a head's logits want more than eight bits.

    Args:
        model: Before it is spread.
        policy: Of which kind.
        tp: Over so many ranks an axis may cut them, whose parts have to be such multiples, too.
    """
    if policy.compute not in _MULTIPLES:
        return []
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    blocks = find_blocks(model)
    inside = [n for n in linears if any(f"{n}.".startswith(f"{block}.") for block in blocks)]
    by = _MULTIPLES[policy.compute] * tp
    return [
        name
        for name in (inside if blocks else list(linears)[:-1])
        if linears[name].in_features % by == linears[name].out_features % by == 0
        and linears[name].weight.is_floating_point()
        and not torch_quantized.is_quantized(linears[name].weight)
    ]


def check(model: nn.Module, policy: Precision, shape: MeshShape) -> None:
    """Refuse what cannot compute so.

    Raises:
        LayoutError: There is no torchao, an axis cuts layers or their inputs, or no layer fits.
    """
    kind = policy.compute
    if kind not in _MULTIPLES:
        return
    # 32 numbers of one scale lie in one rank's part of a weight, and of an input that goes with it.
    unfit = ("cp", "pp") if kind == "mxfp8" else ("tp", "cp", "pp")
    cutting = [axis for axis in unfit if shape.sizes[axis] > 1]
    if cutting:
        raise LayoutError(
            f'Precision("{kind}") does not go with {cutting[0]}.',
            why="in fp8 one scale is made of all of a weight, or an input, of which a rank of tp "
            "has a part"
            if cutting[0] == "tp"
            else f"with {cutting[0]} nothing of eight bits is proven",
            do='"ddp", "zero1", "zero2", "zero3" and "hsdp" take it, Precision("mxfp8") tp; or '
            f'Precision("bf16") with {cutting[0]}',
        )
    if why := torchao_products.why_not(kind):
        raise LayoutError(
            f'There are no products in {kind} here, for Precision("{kind}").',
            why=why,
            do='pip install "torchao>=0.18", and start the cluster again; or Precision("bf16")',
        )
    if not layers_of(model, policy, shape.tp):
        by = _MULTIPLES[kind] * shape.tp
        raise LayoutError(
            f'No layer of this model computes in {kind}, so Precision("{kind}") would be "bf16".',
            why=f"it takes torch.nn.Linear with in_features and out_features that are multiples of "
            f"{by}, inside repeated blocks; without blocks, all but the last",
            do='Precision("bf16")',
        )


def check_device(policy: Precision, device_type: str) -> None:
    """Refuse a GPU that has no such products.

    Raises:
        LayoutError: This one has none.
    """
    kind = policy.compute
    if kind not in _CAPABLE or device_type != "cuda":
        return
    has, needs = torch.cuda.get_device_capability(), _CAPABLE[kind]
    if has < needs:
        raise LayoutError(
            f"This GPU ({torch.cuda.get_device_name()}) has no products in {kind}.",
            why=f"they need compute capability {needs[0]}.{needs[1]}, and it has {has[0]}.{has[1]}",
            do='Precision("bf16")',
        )


def apply(model: nn.Module, names: Iterable[str], policy: Precision, device_type: str) -> None:
    """Have these layers compute so, in place."""
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), "`layers_of` names such"
        EightBits(layer, policy.compute, emulates=is_emulated(device_type))


def say(policy: Precision, device_type: str) -> None:
    """Say, at the end of the cell, that there is no speed in it here."""
    if policy.compute in _MULTIPLES and is_emulated(device_type):
        step_state.here().tell(
            f"{policy.compute} is emulated on CPUs: numbers are rounded as on a GPU, and a step "
            "takes longer than in bf16."
        )


def is_emulated(device_type: str) -> bool:
    """Return whether products are rounded and then computed in bfloat16."""
    return device_type != "cuda"


def words(model: nn.Module, device_type: str) -> str:
    """Return which layers compute so, in a few words; "" where none does."""
    names = list(found(model))
    if not names:
        return ""
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    how = ", emulated and so not faster" if is_emulated(device_type) else ""
    return f"{len(names)} of {linears} Linear layers ({shown}) in {kind_in(model)}{how}; "


def kind_in(model: nn.Module) -> str:
    """Return in what some of its layers multiply, "fp8" or "mxfp8"; "" where none does so."""
    return next((one.kind for one in found(model).values()), "")


def found(model: nn.Module) -> dict[str, EightBits]:
    """Return the layers that compute so, by name."""
    layers = {}
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        while isinstance(forward, Around) and not isinstance(forward, EightBits):
            forward = forward._native
        if isinstance(forward, EightBits):
            layers[name] = forward
    return layers
