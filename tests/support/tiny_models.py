"""Tiny random models of every causal LM that transformers knows, for tests and for benchmarks/coverage.py.

A configuration is shrunk by attribute name: the default configuration of the architecture is read, every
size in it (hidden size, heads, experts, windows, ...) is replaced by a small one, and lists that hold one
entry per layer are shortened so that each kind of layer still occurs. The few architectures whose sizes
depend on each other in ways that the names do not tell have an entry in ``OVERRIDES``. Weights are drawn so
that a wrong result shows: logits spread by a few units, attention is not uniform, norms are not one, biases
are not zero.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

VOCAB_SIZE = 256
"""Rows of the embedding of a tiny model; ids below 3 and the last are special, prompts stay clear of them."""
MAX_POSITIONS = 512
WEIGHT_GAIN = 1.3
"""Standard deviation of a matrix's output for unit input: above one, so that attention is peaked."""
WINDOW = 8
"""Sliding window and attention chunk of tiny models: short prompts cross it."""


def _by_name(*groups: tuple[int, str]) -> dict[str, int]:
    return {name: value for value, names in groups for name in names.split()}


SIZES = _by_name(
    (64, "hidden_size n_embd d_model emb_dim embedding_dim embedding_size word_embed_proj_dim"),
    (64, "input_embedding_size output_embedding_size lru_width attention_hidden_size mamba_d_ssm"),
    (64, "backbone_hidden_size hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size"),
    (64, "downsample_hidden_size"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"),
    (4, "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    (4, "swa_num_attention_heads n_mamba_heads"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups"),
    (2, "num_global_key_value_heads n_groups"),
    (16, "head_dim kv_channels swa_head_dim dim_head d_head attention_head_size attention_head_dim"),
    (32, "global_head_dim"),
    (8, "rotary_dim qk_rope_head_dim"),
    (16, "qk_nope_head_dim"),
    (12, "v_head_dim"),
    (24, "q_lora_rank o_lora_rank"),
    (32, "kv_lora_rank"),
    (96, "intermediate_size ffn_dim n_inner dff dim_ff d_inner encoder_ffn_dim decoder_ffn_dim"),
    (96, "ffn_hidden_size dense_intermediate_size intermediate_size_mlp feed_forward_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    (32, "shared_experts_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size"),
    (32, "expert_intermediate_size router_hidden_size dim_model_base"),
    (8, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"),
    (2, "n_group num_expert_group"),
    (2, "num_shared_experts n_shared_experts moe_num_shared_experts zero_expert_num"),
    (1, "topk_group first_k_dense_replace num_dense_layers moe_layer_start_index moe_layer_interval"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size window_size local_attention"),
    (WINDOW, "attention_chunk_size local_attention_window_len swa_window_size"),
    (2, "sliding_window_pattern _sliding_window_pattern no_rope_layer_interval global_attn_every_n_layers"),
    (
        2,
        "layer_group_size num_kv_shared_layers full_attention_interval attn_layer_period expert_layer_period",
    ),
    (1, "attn_layer_offset expert_layer_offset"),
    (
        VOCAB_SIZE,
        "vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size unpadded_vocab_size",
    ),
    (
        MAX_POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length",
    ),
    (MAX_POSITIONS, "model_max_length seq_length max_sequence_length max_seq_length"),
    (
        16,
        "hidden_size_per_layer_input laurel_rank gated_norm_rank adapter_rank d_rel ple_embed_dim hc_lowrank",
    ),
    (2, "index_topk_blocks"),
    (16, "index_n_heads"),  # with fewer, scores that relu has made zero are tied; models have 32 and more
    (16, "index_head_dim rel_extent"),
    (8, "index_topk index_block_size keep_window_size"),
    (4, "mamba_n_heads mamba_num_heads linear_num_heads linear_num_value_heads"),
    (2, "linear_num_key_heads mamba_expand expand"),
    (16, "mamba_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim"),
    (8, "mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank"),
    (8, "mamba_chunk_size chunk_size"),
    (32, "image_size num_mel_bins mm_tokens_per_image"),
    (32, "vision_soft_tokens_per_image audio_soft_tokens_per_image"),
    (64, "max_source_positions prompt_mid_dim"),
    (
        16,
        "vocab_offset num_buckets relative_max_distance position_bias_num_buckets position_bias_max_distance",
    ),
    (1, "num_random_blocks"),
    (2, "scale_emb"),
)
"""Attribute name → the size that it gets, wherever a default configuration holds an integer there."""

SCALES = {
    "attention_multiplier": 0.25,
    "attn_logit_softcapping": 5.0,
    "embedding_multiplier": 1.5,
    "final_logit_softcapping": 10.0,
    "logit_scale": 0.75,
    "logits_mup_width_multiplier": 1.5,
    "logits_scaling": 1.25,
    "residual_multiplier": 0.75,
}
"""Attribute name → factor, where the default is 1 or so far from it that leaving it out would not show."""

LAYER_COUNTS = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"}
    | {"num_encoder_layers", "num_decoder_layers", "depth", "num_blocks"}
)

SHALLOW = frozenset("axk2 deepseek_v32 inkling_text kimi_linear minimax".split())
"""Architectures that tests compile often, with a layer of each of their two kinds; Gemma 2 and Qwen 3.5 stand for
models with several layers of a kind."""

DEFAULTS_WHEN_NONE = frozenset({"head_dim", "num_key_value_heads"})
"""Sizes that are set even where the default configuration leaves them to be derived."""

_A_LAYER_OF_EACH_KIND = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_size": [3], "encoder_hash_byte_group_vocab": 64},
    "blt_global_transformer": {"encoder_cross_output_size": 128},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "per_layer_config": {3: {"head_dim": 24, "kv_lora_rank": 16}},
        "layer_types": ["indexed_attention"] * 3 + ["sliding_attention"],
    },
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    # As those in SHALLOW, in this order.
    "gemma3_text": _A_LAYER_OF_EACH_KIND,
    "gpt_oss": _A_LAYER_OF_EACH_KIND,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "axial_pos_shape": (16, MAX_POSITIONS // 16),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ("local", "lsh"),
    },
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}
"""model_type → arguments that the names do not tell, of a configuration or sub-configuration of that type."""

STARTING_POINTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
}
"""model_type → arguments without which its default configuration cannot be made or says nothing."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A configuration that the defaults do not cover.

    Attributes:
        model_type: architecture.
        overrides: attributes, as for ``tiny_config``.
        depends_on_length: rotary frequencies follow the length of the sequence, so that transformers gives
            other numbers with a cache (keys keep the frequencies of their time) than without.
    """

    model_type: str
    overrides: dict[str, Any]
    depends_on_length: bool = False


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


def _longrope(rotary_dim: int) -> dict[str, Any]:
    half = rotary_dim // 2
    return _rope(
        "longrope",
        short_factor=[1.0 + 0.1 * i for i in range(half)],
        long_factor=[2.0 + 0.5 * i for i in range(half)],
        original_max_position_embeddings=16,
    )


LLAMA_VARIANTS: dict[str, Variant] = {
    "llama/rope-default": Variant("llama", _rope("default")),
    "llama/rope-linear": Variant("llama", _rope("linear", factor=4.0)),
    "llama/rope-llama3": Variant(
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama/rope-yarn": Variant("llama", _rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "llama/rope-dynamic": Variant(
        "llama", {"max_position_embeddings": 32, **_rope("dynamic", factor=4.0)}, depends_on_length=True
    ),
    "llama/rope-longrope": Variant("llama", _longrope(16), depends_on_length=True),
    "phi3/rope-longrope": Variant(
        "phi3", {"original_max_position_embeddings": 16, **_longrope(16)}, depends_on_length=True
    ),
    "llama/tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama/biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama/heads-mha": Variant("llama", {"num_key_value_heads": 4}),
    "llama/heads-mqa": Variant("llama", {"num_key_value_heads": 1}),
    "mistral/window-off": Variant("mistral", {"sliding_window": None}),
    "mistral/window-on": Variant("mistral", {"sliding_window": WINDOW}),
    "qwen2/window-on": Variant(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "gemma2/tied": Variant("gemma2", {"tie_word_embeddings": True}),
    "falcon/alibi": Variant("falcon", {"alibi": True}),
    "falcon/new-decoder": Variant("falcon", {"new_decoder_architecture": True}),
    "gpt_neox/sequential-residual": Variant("gpt_neox", {"use_parallel_residual": False}),
    "lfm2/conv": Variant("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
}
"""Llama and its relatives off the defaults: rotary types, ties, biases, windows, head layouts."""


def causal_lm_types() -> list[str]:
    """Every ``model_type`` of transformers' MODEL_FOR_CAUSAL_LM_MAPPING, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _shortened(values: list[Any], length: int) -> list[Any]:
    """``length`` entries: the distinct ones of ``values`` in order, in turn when there are fewer."""
    distinct = [value for i, value in enumerate(values) if value not in values[:i]]
    return [distinct[i % len(distinct)] for i in range(length)]


def _small(name: str, default: Any) -> Any:
    """The tiny model's value of one attribute, or ``default`` where the name does not stand for a size."""
    if default is None and name in DEFAULTS_WHEN_NONE:
        return SIZES[name]
    if isinstance(default, float) and name in SCALES:
        return SCALES[name]
    if isinstance(default, bool) or not isinstance(default, int):
        return default
    if name in SIZES:
        return SIZES[name] if default > 0 else default
    is_special_id = name.endswith(("_token_id", "_token_index")) or name in ("mask_index", "unk_index")
    if is_special_id and default >= VOCAB_SIZE:
        return 1 if "bos" in name else 2 if "eos" in name else VOCAB_SIZE - 1
    return default


def _shrunk_arguments(default: PreTrainedConfig) -> dict[str, Any]:
    """Constructor arguments of a tiny configuration of the class of ``default``."""
    default.allow_global_per_layer_attribute_access = True
    class_defaults = {field.name: field.default for field in dataclasses.fields(default) if field.init}
    current = {name: getattr(default, name) for name in class_defaults if hasattr(default, name)}
    depth = next((v for n, v in current.items() if n in LAYER_COUNTS and isinstance(v, int)), None)
    per_layer = {n: v for n, v in current.items() if isinstance(v, list | tuple) and v and len(v) == depth}
    kinds = max((len(set(map(str, values))) for values in per_layer.values()), default=1)
    layers = 4 if kinds > 1 and default.model_type not in SHALLOW else 2
    arguments: dict[str, Any] = {}
    for name, value in current.items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = _shrunk(value)
        elif name in LAYER_COUNTS and isinstance(value, int):
            arguments[name] = layers
        elif name in per_layer:
            arguments[name] = [_small(name, entry) for entry in _shortened(list(value), layers)]
        elif _small(name, value) != value or (name in SIZES and value == 0 != class_defaults[name]):
            arguments[name] = _small(name, value)
    if "kv_lora_rank" in current:  # multi-head latent attention has one key and value per query head
        arguments["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "tie_word_embeddings" in current:
        arguments["tie_word_embeddings"] = False
    if "is_decoder" in current:
        arguments["is_decoder"] = True
    return arguments


def _shrunk(default: PreTrainedConfig, **overrides: Any) -> PreTrainedConfig:
    return type(default)(**(_shrunk_arguments(default) | OVERRIDES.get(default.model_type, {}) | overrides))


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A configuration of ``model_type`` with two to four layers, hidden size 64, 4 heads (2 for KV), a
    vocabulary of 256, windows and chunks of 8 tokens and everything else in proportion.

    Args:
        model_type: key of transformers' MODEL_FOR_CAUSAL_LM_MAPPING.
        overrides: attributes to set beside the shrunk ones.

    Raises:
        ValueError: ``model_type`` is not a causal LM of the installed transformers.
    """
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"model_type={model_type!r} is not a causal LM of transformers; see causal_lm_types()")
    return _shrunk(CONFIG_MAPPING[model_type](**STARTING_POINTS.get(model_type, {})), **overrides)


def _perturb(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Redraw the weights of ``model`` in place so that every part of it matters for the logits.

    Parameters that transformers fills with a constant (norms, biases) get that constant plus noise. Matrices
    get independent normal entries scaled by their fan-in, embeddings entries of unit size. What is neither
    (decay rates of state-space layers, for instance) keeps its values: their range is part of the design.
    """
    embedding_std = {
        id(m.weight): 1 / float(getattr(m, "embed_scale", 1.0) or 1.0)
        for m in model.modules()
        if isinstance(m, nn.Embedding)
    }
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is not None and id(head) in embedding_std:  # tied: with unit entries every token would predict itself
        embedding_std[id(head)] = 2 / math.sqrt(head.shape[1])
    transposed = {id(m.weight) for m in model.modules() if isinstance(m, Conv1D)}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        noise = torch.randn(values.shape, generator=generator)
        std, mean = (float(x) for x in torch.std_mean(values.float(), correction=0))
        if std < 1e-6 * max(1.0, abs(mean)) or not math.isfinite(std):
            base = mean if math.isfinite(mean) else 0.0
            values.copy_(base + 0.2 * noise if values.dim() < 2 or base else noise / math.sqrt(values.shape[-1]))
        elif id(parameter) in embedding_std:
            values.copy_(embedding_std[id(parameter)] * noise)
        elif values.dim() >= 2 and abs(mean) < 0.2 * std:
            fan_in = values.shape[0] if id(parameter) in transposed else values[0].numel()
            if values.dim() == 3 and "conv" not in name:
                fan_in = min(values.shape[1:])
            values.copy_(WEIGHT_GAIN * noise / math.sqrt(fan_in))
        elif values.dim() < 2 and abs(mean) < 0.2 * std:
            values.copy_(noise)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def build_tiny_model(
    model_type: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A causal LM of architecture ``model_type`` with random weights, in eval mode, on the CPU.

    Args:
        model_type: key of transformers' MODEL_FOR_CAUSAL_LM_MAPPING.
        dtype: of the weights; the same numbers as in float32, rounded.
        seed: of the weights. The global random state is left as it was.
        overrides: configuration attributes, as in ``tiny_config``.
    """
    config = tiny_config(model_type, **overrides)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    for name in config.sub_configs:
        if model_class.config_class is type(getattr(config, name)):
            config = getattr(config, name)
            break
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=dtype)
        _perturb(model, torch.Generator().manual_seed(seed))
    generation = model.generation_config
    if generation is not None:  # generate() shall give the greedy tokens of the logits, as many as asked
        for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens"):
            setattr(generation, name, None)
        for name in ("begin_suppress_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
            setattr(generation, name, None)
    return model.eval()
