"""Models of transformers in tiny configurations, with random weights: nothing is downloaded."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.trained import CLASSES, LENGTH, WORDS, Batch, Samples, Trained, images, texts

_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {
    "vocab_size": WORDS,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    **_HIDDEN,
    **_ENDS,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8, **_TEXT}
_LABELS = {"num_labels": CLASSES}
_PATCHES = {"image_size": 32, "patch_size": 8, "intermediate_size": 64, **_HIDDEN, **_LABELS}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], **_LABELS}
_DISTIL = {"vocab_size": WORDS, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
_GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_ENDS}
_MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
_OPT = {"vocab_size": WORDS, "ffn_dim": 64, "word_embed_proj_dim": 32, **_HIDDEN, **_ENDS}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_NEOX = {"rotary_pct": 0.25, **_TEXT}
_BLOOM = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_ENDS}
_BART = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
    **_ENDS,
}
_MANY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
_WHISPER = {
    "vocab_size": WORDS,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_source_positions": LENGTH,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    **_ENDS,
}


def sounds(count: int) -> Samples:
    """Draw spectra (count, 8, 2 * LENGTH) and texts (count, LENGTH)."""
    labels = torch.randint(3, WORDS, (count, LENGTH))
    return {"x": torch.randn(count, 8, 2 * LENGTH), "labels": labels}


def _made(model: str, config: str, values: Mapping[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**values))


def _loss(model: nn.Module, batch: Batch, x: str) -> Tensor:
    return model(**{x: batch["x"], "labels": batch["labels"]}).loss


def _text(model: str, config: str, values: Mapping[str, Any]) -> Trained:
    make, loss = partial(_made, model, config, values), partial(_loss, x="input_ids")
    return Trained(make, texts, loss, "transformers")


def _images(name: str, values: Mapping[str, Any]) -> Trained:
    make = partial(_made, f"{name}ForImageClassification", f"{name}Config", values)
    return Trained(make, images, partial(_loss, x="pixel_values"), "transformers")


TRANSFORMERS = {
    "bert": _text("BertForMaskedLM", "BertConfig", _TEXT),
    "roberta": _text("RobertaForMaskedLM", "RobertaConfig", _TEXT),
    "distilbert": _text("DistilBertForMaskedLM", "DistilBertConfig", _DISTIL),
    "gpt2": _text("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "llama": _text("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": _text("MistralForCausalLM", "MistralConfig", _GROUPED),
    "gemma2": _text("Gemma2ForCausalLM", "Gemma2Config", _GROUPED),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config", _GROUPED),
    "mixtral": _text("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, **_GROUPED}),
    "phi3": _text("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "gpt neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX),
    "falcon": _text("FalconForCausalLM", "FalconConfig", {"multi_query": True, **_TEXT}),
    "bloom": _text("BloomForCausalLM", "BloomConfig", _BLOOM),
    "qwen3 of experts": _text(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_MANY_EXPERTS, **_GROUPED}
    ),
    "deepseek": _text(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_TEXT, "num_key_value_heads": 4, **_DEEPSEEK},
    ),
    "mamba": _text("MambaForCausalLM", "MambaConfig", _MAMBA),
    "opt": _text("OPTForCausalLM", "OPTConfig", _OPT),
    "bart": _text("BartForConditionalGeneration", "BartConfig", _BART),
    "t5": _text("T5ForConditionalGeneration", "T5Config", {"decoder_start_token_id": 0, **_T5}),
    "vit": _images("ViT", _PATCHES),
    "deit": _images("DeiT", _PATCHES),
    "resnet of transformers": _images(
        "ResNet", {"embedding_size": 8, "layer_type": "basic", **_STAGES}
    ),
    "convnext": _images("ConvNext", {"num_stages": 2, "drop_path_rate": 0.1, **_STAGES}),
    "swin": _images("Swin", {"window_size": 4, **_SWIN, **_LABELS}),
    "mobilenet": _images("MobileNetV2", {"image_size": 32, "depth_multiplier": 0.25, **_LABELS}),
    "whisper": Trained(
        partial(_made, "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
        sounds,
        partial(_loss, x="input_features"),
        "transformers",
    ),
}
