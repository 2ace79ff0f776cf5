"""Models of PEFT, diffusers and torch_geometric, small and with random weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.of_transformers import TRANSFORMERS
from tests.models.trained import CLASSES, Batch, Samples, Trained, graphs, images

STEPS = 100  # of a diffusion


class Denoiser(nn.Module):
    """A model of diffusers that tells the noise in an image: (count, 3, 16, 16) to the same."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, times: Tensor, kinds: Tensor) -> Tensor:
        return self.inner(x, times, class_labels=kinds).sample[:, :3]


def noisy(count: int) -> Samples:
    """Draw images, steps of a diffusion and kinds of images."""
    times = torch.randint(0, STEPS, (count,))
    return {**images(count, 16), "times": times, "kinds": torch.randint(0, CLASSES, (count,))}


def denoised(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["times"], batch["kinds"]), batch["x"])


def diffusion_transformer() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return Denoiser(
        DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=3,
            out_channels=3,
            num_layers=2,
            sample_size=16,
            patch_size=4,
            norm_num_groups=4,
            num_embeds_ada_norm=CLASSES,
        )
    )


def diffusion_unet() -> nn.Module:
    from diffusers import UNet2DModel

    return Denoiser(
        UNet2DModel(
            sample_size=16,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
            num_class_embeds=CLASSES,
        )
    )


class Restored(nn.Module):
    """The autoencoder of a latent diffusion, which is not asked to draw."""

    def __init__(self) -> None:
        from diffusers import AutoencoderKL

        super().__init__()
        self.inner: Any = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sample


class OfGraphs(nn.Module):
    """Two layers of torch_geometric over dense neighbours, and their mean."""

    def __init__(self, layer: str) -> None:
        from torch_geometric import nn as geometric

        super().__init__()
        kind = getattr(geometric, layer)
        self.first, self.second = kind(16, 16), kind(16, CLASSES)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x, near)), near).mean(1)


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["near"]), batch["labels"])


def adapted(base: str, kind: str, **options: object) -> nn.Module:
    """A model of transformers with an adapter that does something from the first step on."""
    import peft

    made = peft.get_peft_model(TRANSFORMERS[base].make(), getattr(peft, f"{kind}Config")(**options))
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "lora_B" in name or "ia3" in name:
                param.add_(torch.randn_like(param), alpha=0.05)
    return made


def _adapted(base: str, kind: str, **options: object) -> Trained:
    plain = TRANSFORMERS[base]
    return Trained(partial(adapted, base, kind, **options), plain.samples, plain.loss, "peft")


def _of(library: str, make: Callable[[], nn.Module]) -> Trained:
    draw, loss = (noisy, denoised) if library == "diffusers" else (graphs, classified)
    return Trained(make, draw, loss, library)


_DRAWN = Trained(
    Restored, partial(images, size=16), lambda m, b: F.mse_loss(m(b["x"]), b["x"]), "diffusers"
)

LIBRARIES = {
    "lora of llama": _adapted("llama", "Lora", target_modules=["q_proj", "v_proj"]),
    "lora of bert": _adapted("bert", "Lora", target_modules="all-linear", modules_to_save=[]),
    "ia3 of llama": _adapted(
        "llama", "IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "diffusion transformer": _of("diffusers", diffusion_transformer),
    "diffusion unet": _of("diffusers", diffusion_unet),
    "diffusion autoencoder": _DRAWN,
    "gcn of geometric": _of("torch_geometric", partial(OfGraphs, "DenseGCNConv")),
    "sage of geometric": _of("torch_geometric", partial(OfGraphs, "DenseSAGEConv")),
    "graphs of geometric": _of("torch_geometric", partial(OfGraphs, "DenseGraphConv")),
}
