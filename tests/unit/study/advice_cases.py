"""What the field does with 32 jobs on given machines: written down before any rule of ours.

A job and a machine are plain numbers. What is expected is the family of a layout, as the axes that
it has, and never its sizes: sources agree on the first, and their sizes come from other kernels.
Where a source leaves two families open, both are named. `also` has what the answer must say beside
the layout.

Sources marked * were cited from memory and not read again.
"""

from dataclasses import dataclass
from typing import Any

GB = 1e9
NOTHING_FITS, ONE = "nothing fits", "one device"


@dataclass(frozen=True, slots=True)
class Case:
    """One job on one machine.

    Attributes:
        name: In a few words.
        job: Of the model and its training; bytes and operations are of one sample.
        machine: Bytes, operations a second, seconds.
        families: The right ones; empty where `uses` says enough.
        uses: Axes that the layout must have.
        also: Words that must be in the answer: "accumulate", "checkpoint", a dtype, a rule.
        source: Who says so.
    """

    name: str
    job: dict[str, Any]
    machine: dict[str, Any]
    families: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    source: str = ""


def transformer(
    parameters: float,
    blocks: int,
    width: int,
    tokens: int,
    *,
    vocabulary: int = 32_000,
    active: float = 0.0,
    experts: int = 0,
    chosen: int = 2,
    mixtures: int = 0,
    trainable: float = 1.0,
    frozen_bytes: int = 4,
    **job: Any,
) -> dict[str, Any]:
    """Return the job of a decoder.

    With `experts` each token meets `active` parameters, and goes to `chosen` experts in each of
    the `mixtures`, by default one a block: a vector there and one back, forward and backward.

    Operations: 6 for a parameter and token, 4 where it is frozen, and those of attention (Narayanan
    2021, appendix). Activations in 16 bits: 34 bytes for a token, block and width, with an
    attention that keeps no scores (Korthikanti 2022, table 2), and the logits.
    """
    for_one = 6 if trainable == 1 else 4
    attention = 6 * blocks * tokens**2 * width  # causal: half of 12
    return {
        "parameters": parameters,
        "experts": experts,
        "in_experts": (parameters - active) / (1 - chosen / experts) if experts else 0.0,
        "exchanged": 4 * chosen * 2 * (mixtures or blocks) * tokens * width if experts else 0.0,
        "trainable": trainable,
        "frozen_bytes": frozen_bytes,
        "blocks": blocks,
        "tokens": tokens,
        "flops": for_one * (active or parameters) * tokens + attention,
        "activations": 34 * blocks * tokens * width + 6 * tokens * vocabulary,
        "kept": 2 * blocks * tokens * width,
        "head": 6 * tokens * vocabulary,
        **job,
    }


def convolutions(parameters: float, flops: float, activations: float, **job: Any) -> dict[str, Any]:
    """Return the job of a model without equal blocks: it can be cut by samples only."""
    return {"parameters": parameters, "flops": flops, "activations": activations, **job}


def gpus(
    memory: float,
    tflops: float,
    dtype: str,
    inside: float,
    devices: int = 8,
    hosts: int = 1,
    between: float = 0.0,
) -> dict[str, Any]:
    """Return a machine.

    `inside` is what a device sends to others of its host, `between` what a whole host sends.
    """
    return {
        "memory": memory * GB,
        "flops": tflops * 1e12,
        "dtype": dtype,
        "devices": devices,
        "hosts": hosts,
        "inside": (3e-6, inside * GB),
        "between": (10e-6, between * GB),
    }


H100 = gpus(80, 989, "bf16", 450)  # NVIDIA, H100 data sheet: SXM, dense, NVLink one way
TITAN = gpus(96, 989, "bf16", 450)  # torchtitan's H100 of 96 GB
A100, A100_40 = gpus(80, 312, "bf16", 300), gpus(40, 312, "bf16", 300)
V100, V100_32 = gpus(16, 125, "fp16", 150), gpus(32, 125, "fp16", 150)
RTX_4090 = gpus(24, 165, "bf16", 20, devices=4)  # PCIe 4, no NVLink


def hosts(machine: dict[str, Any], number: int, between: float, **other: Any) -> dict[str, Any]:
    """Return several hosts of a kind; `between` in GB/s of a host."""
    return machine | {"hosts": number, "between": (10e-6, between * GB)} | other


IMAGENET = 1_281_167 * 90
RESNET = {"flops": 3 * 8.2e9, "parameters": 25.6e6, "activations": 50e6, "optimizer": "sgd"}
LLAMA_8B = {"blocks": 32, "width": 4096, "vocabulary": 128_256}
LLAMA_405B = {"blocks": 126, "width": 16384, "vocabulary": 128_256}
ENDLESS = 10**9  # samples of a run that takes months

CASES = [
    # You do not need distributed training.
    Case(
        "MNIST on 8 A100",
        convolutions(1.2e6, 6 * 12e6, 0.2e6, global_batch=64, samples=60_000 * 14),
        A100,
        (ONE,),
        source="PyTorch Distributed Overview 2.0*: single-device training if data and model fit "
        "and speed is not a concern. https://docs.pytorch.org/tutorials/beginner/dist_overview.html",
    ),
    Case(
        "BERT-base, MRPC, 8 A100",
        transformer(110e6, 12, 768, 128, vocabulary=2, global_batch=32, samples=3_668 * 3),
        A100,
        (ONE,),
        source="google-research/bert, README*: minutes on most GPUs. "
        "https://github.com/google-research/bert",
    ),
    Case(
        "a small perceptron on two CPU ranks",
        convolutions(1e5, 6e5, 4e3, global_batch=32, samples=ENDLESS),
        gpus(4, 0.02, "fp32", 1.0, devices=2) | {"inside": (50e-6, 1 * GB)},
        (ONE,),
        source="Li et al., PyTorch Distributed, 2020*, section 2: communication can take longer "
        "than it saves. https://arxiv.org/abs/2006.15704",
    ),
    Case(
        "GPT-2 on two hosts with 1 Gbit Ethernet",
        transformer(124e6, 12, 768, 1024, vocabulary=50_304, global_batch=16, samples=ENDLESS),
        hosts(A100_40 | {"devices": 1}, 2, 0.117),
        (ONE,),
        source="karpathy/nanoGPT, README*: without InfiniBand multinode training will most likely "
        "crawl. https://github.com/karpathy/nanoGPT",
    ),
    Case(
        "adapters of 7B, 10,000 short samples, 24 GB cards",
        transformer(
            6.7e9,
            32,
            4096,
            512,
            trainable=0.003,
            frozen_bytes=2,
            global_batch=16,
            samples=10_000,
        ),
        RTX_4090,
        (ONE,),
        source="Hu et al., LoRA, 2021*; LoRA tunes 7B in 24 GB: https://www.capstok.com/learn/"
        "machine-learning/advanced-ai-engineering/fine-tuning-fundamentals/"
        "full-fine-tune-vs-lora-vs-qlora-memory-time-quality-tradeoffs",
    ),
    Case(
        "ResNet-50, batch 1,024, the only GPU",
        RESNET | {"global_batch": 1024, "samples": IMAGENET},
        gpus(16, 65, "fp16", 10, devices=1),
        (ONE,),
        also=("accumulate", "fp16"),
        source="Hugging Face, methods for one GPU*: gradient accumulation. "
        "https://huggingface.co/docs/transformers/perf_train_gpu_one",
    ),
    Case(
        "1.3B, 16,384 tokens, the only GPU",
        transformer(1.3e9, 24, 2048, 16_384, global_batch=8, samples=ENDLESS),
        A100_40 | {"devices": 1},
        (ONE,),
        also=("checkpoint", "accumulate", "bf16"),
        source="Chen et al., Sublinear Memory Cost, 2016*. https://arxiv.org/abs/1604.06174",
    ),
    # It fits on one device, which is too slow.
    Case(
        "ResNet-50, 8 V100",
        RESNET | {"global_batch": 256, "samples": IMAGENET},
        V100,
        ("ddp",),
        also=("fp16", "linear"),
        source="Lightning, When NOT to use model-parallel strategies: ResNet50. "
        "https://lightning.ai/docs/pytorch/latest/advanced/model_parallel.html",
    ),
    Case(
        "ResNet-50, batch 8,192, 256 P100, 50 Gbit Ethernet",
        RESNET | {"activations": 100e6, "global_batch": 8192, "samples": IMAGENET},
        gpus(16, 10.6, "fp32", 20, hosts=32, between=6.25),
        ("ddp",),
        also=("fp32", "linear"),
        source="Goyal et al., ImageNet in 1 Hour, 2017*. https://arxiv.org/abs/1706.02677",
    ),
    Case(
        "BERT-large, 8 A100",
        transformer(340e6, 24, 1024, 512, vocabulary=30_522, global_batch=256, samples=ENDLESS),
        A100_40,
        ("ddp",),
        also=("bf16", "sqrt"),
        source="Lightning, as above: model parallelism from roughly 500M parameters; You et al., "
        "LAMB, 2019*, for the rate",
    ),
    Case(
        "GPT-2, 8 A100",
        transformer(124e6, 12, 768, 1024, vocabulary=50_304, global_batch=480, samples=ENDLESS),
        A100_40,
        ("ddp",),
        source="karpathy/nanoGPT, README: one node of 8 A100 40GB, DDP; "
        "https://www.mintlify.com/karpathy/nanoGPT/training/distributed-training",
    ),
    Case(
        "adapters of 8B, a million samples, 8 A100",
        transformer(
            8e9,
            **LLAMA_8B,
            tokens=2048,
            trainable=0.003,
            frozen_bytes=2,
            global_batch=128,
            samples=1_000_000,
        ),
        A100,
        ("ddp",),
        source="Hugging Face, Parallelism methods: fits on a single GPU, so DDP or ZeRO. "
        "https://huggingface.co/docs/transformers/perf_train_gpu_many",
    ),
    Case(
        "1.7B, 32 A100",
        transformer(1.7e9, 24, 2304, 2048, vocabulary=51_200, global_batch=512, samples=ENDLESS),
        hosts(A100, 4, 200),
        ("ddp",),
        source="Narayanan et al., 2021*, table 1: tensor 1, pipeline 1. "
        "https://arxiv.org/abs/2104.04473",
    ),
    # It does not fit on one device.
    Case(
        "2B, 8 V100 of 32 GB",
        transformer(2e9, 40, 2048, 1024, vocabulary=50_304, global_batch=256, samples=ENDLESS),
        V100_32,
        ("zero1",),
        source="Rajbhandari et al., ZeRO, 2020*, table 2: the baseline ends at 1.4B, Pos does not; "
        "the lowest stage that fits: https://huggingface.co/docs/transformers/deepspeed",
    ),
    Case(
        "13B, 8 A100",
        transformer(13e9, 40, 5120, 2048, global_batch=128, samples=ENDLESS),
        A100,
        ("zero2", "zero3"),
        source="Hugging Face, Parallelism methods: does not fit on a single GPU, so ZeRO; PyTorch "
        "FSDP, Zhao et al., 2023. https://huggingface.co/papers/2304.11277",
    ),
    Case(
        "30B, 8 A100",
        transformer(30e9, 48, 7168, 2048, vocabulary=50_272, global_batch=64, samples=ENDLESS),
        A100,
        ("zero3",),
        also=("checkpoint",),
        source="ZeRO*, table 1: 16 bytes a parameter over 8 devices are 60 GB; stage 3 alone",
    ),
    Case(
        "8B, 8 H100",
        transformer(8e9, **LLAMA_8B, tokens=8192, global_batch=16, samples=ENDLESS),
        TITAN,
        ("zero2", "zero3"),
        source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1: FSDP",
    ),
    Case(
        "8B, 128 H100",
        transformer(8e9, **LLAMA_8B, tokens=8192, global_batch=256, samples=ENDLESS),
        hosts(TITAN, 16, 400),
        ("zero2", "zero3", "hsdp"),
        source="torchtitan, as above, table 3: FSDP",
    ),
    Case(
        "adapters of 70B, 8 H100",
        transformer(
            70e9,
            80,
            8192,
            2048,
            trainable=0.002,
            frozen_bytes=2,
            global_batch=64,
            samples=1_000_000,
        ),
        H100,
        ("zero3",),
        source="Hugging Face PEFT, Use PEFT and FSDP: Llama-70B on 8xH100 80GB. "
        "https://huggingface.co/docs/peft/accelerate/fsdp",
    ),
    Case(
        "3B, two hosts of 8 A100 with 25 Gbit Ethernet",
        transformer(3e9, 32, 2560, 2048, vocabulary=50_304, global_batch=256, samples=ENDLESS),
        hosts(A100_40, 2, 3.1),
        ("hsdp",),
        source="PyTorch FSDP, HYBRID_SHARD: shards within a node, replicas between nodes. "
        "https://discuss.pytorch.org/t/fsdp-hsdp-with-device-mesh-multiple-replica-intra-node/"
        "209096",
    ),
    Case(
        "70B, 8 H100",
        transformer(70e9, 80, 8192, 2048, global_batch=64, samples=ENDLESS),
        H100,
        (NOTHING_FITS,),
        source="ZeRO*, table 1: 16 bytes a parameter are 140 GB a device",
    ),
    Case(
        "8B, four 24 GB cards",
        transformer(8e9, **LLAMA_8B, tokens=2048, global_batch=64, samples=ENDLESS),
        RTX_4090,
        (NOTHING_FITS,),
        source="ZeRO*, table 1: 16 bytes a parameter are 32 GB a device",
    ),
    # A batch has fewer samples than there are devices, or the network is in the way.
    Case(
        "13B, two samples a step, 8 A100",
        transformer(13e9, 40, 5120, 2048, global_batch=2, samples=ENDLESS),
        A100,
        ("fsdp tp",),
        source="Narayanan et al., 2021*, section 3: data parallelism ends at the batch, tensor "
        "parallelism inside a server",
    ),
    Case(
        "405B, 512 H100",
        transformer(405e9, **LLAMA_405B, tokens=8192, global_batch=256, samples=ENDLESS),
        hosts(TITAN, 64, 400),
        ("fsdp tp", "pp fsdp tp"),
        source="torchtitan, as above, table 5: FSDP 8, TP 8, PP 8; the Ultra-Scale Playbook* has "
        "TP with ZeRO-3, too. https://huggingface.co/spaces/nanotron/ultrascale-playbook",
    ),
    Case(
        "405B, 16,384 H100",
        transformer(405e9, **LLAMA_405B, tokens=8192, global_batch=2048, samples=ENDLESS),
        hosts(H100, 2048, 400),
        ("pp fsdp tp",),
        source="The Llama 3 Herd of Models, 2024, table 4: TP 8, PP 16, DP 128, as of "
        "https://glennklockwood.com/garden/llama-3.1",
    ),
    Case(
        "405B, 131,072 tokens, 16,384 H100",
        transformer(405e9, **LLAMA_405B, tokens=131_072, global_batch=128, samples=ENDLESS),
        hosts(H100, 2048, 400),
        uses=("cp", "tp"),
        source="The Llama 3 Herd of Models, as above: TP 8, CP 16, PP 16, DP 8",
    ),
    Case(
        "8B, 131,072 tokens, 8 H100",
        transformer(8e9, **LLAMA_8B, tokens=131_072, global_batch=2, samples=ENDLESS),
        TITAN,
        ("fsdp cp",),
        also=("checkpoint",),
        source="torchtitan, as above, table 2: FSDP 2, CP 4",
    ),
    Case(
        "176B, 384 A100",
        transformer(176e9, 70, 14336, 2048, vocabulary=250_880, global_batch=2048, samples=ENDLESS),
        hosts(A100, 48, 50),
        uses=("tp",),
        source="The Technology Behind BLOOM Training: TP 4, PP 12, DP 8. "
        "https://huggingface.co/blog/bloom-megatron-deepspeed",
    ),
    Case(
        "40B, four hosts of 8 A100 40 GB with 25 Gbit Ethernet",
        transformer(40e9, 60, 7168, 2048, vocabulary=50_304, global_batch=128, samples=ENDLESS),
        hosts(A100_40, 4, 3.1),
        uses=("pp",),
        source="Narayanan et al., 2021*, takeaway 1: pipeline parallelism across servers; Hugging "
        "Face, Parallelism methods: slow inter-node connectivity",
    ),
    Case(
        "a mixture of 47B, 13B of them active, 64 H100",
        transformer(
            47e9, 32, 4096, 4096, active=13e9, experts=8, global_batch=128, samples=ENDLESS
        ),
        hosts(H100, 8, 400),
        uses=("ep",),
        source="NVIDIA, Megatron Bridge, parallelism strategies: EP is the primary dimension of "
        "mixtures. https://docs.nvidia.com/nemo/megatron-bridge/latest/parallelisms.html",
    ),
    Case(
        "the same mixture, 256 samples a step",
        transformer(
            47e9, 32, 4096, 4096, active=13e9, experts=8, global_batch=256, samples=ENDLESS
        ),
        hosts(H100, 8, 400),
        ("ep", "dp ep", "fsdp ep", "dp fsdp ep", "pp ep", "pp dp ep", "pp fsdp ep"),
        source="NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md (022bcb5): prefer EP "
        "over TP for experts, EP8 TP1 is better than EP4 TP2 for 8x7B, and both stay within "
        "NVLink; its reference mapping for 64 H100 is TP 1, EP 8, PP 4",
    ),
    Case(
        "1.3B with 128 experts in each second block, 128 A100",
        transformer(
            52e9,
            24,
            2048,
            2048,
            vocabulary=50_304,
            active=1.3e9,
            experts=128,
            chosen=1,
            mixtures=12,
            global_batch=512,
            samples=ENDLESS,
        ),
        hosts(A100_40, 16, 200),
        ("ep", "dp ep", "fsdp ep", "dp fsdp ep"),
        source="microsoft/Megatron-DeepSpeed, examples_deepspeed/MoE/"
        "ds_pretrain_gpt_1.3B_MoE128.sh (8d90491): model parallelism 1, no pipeline, experts "
        "over as many GPUs as there are; Rajbhandari et al., DeepSpeed-MoE, 2022*, for 128 A100. "
        "https://arxiv.org/abs/2201.05596",
    ),
]
