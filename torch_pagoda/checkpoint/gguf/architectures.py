"""Architectures of GGUF files: their tensors, the tensors' sizes, and their names in transformers' models.

llama.cpp changes some of them: queries and keys of ``llama`` have neighboring rows to rotate, while transformers
rotates rows half a head apart; norms of gemma include the 1 that their layers add; experts are stacked.

Source: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """A tensor outside the layers, or a tensor of each layer.

    Attributes:
        name: name in the file.
        target: name in the model.
        sizes: one letter per dim, see ``config.Sizes``.
        change: change that llama.cpp made: ``"rotary"``, ``"plus one"``, ``"stacked"`` (one matrix for each expert),
            ``"flat"`` (the first of two sizes, 1, may be missing); "" for none.
        optional: True if files may omit it.
    """

    name: str
    target: str
    sizes: str
    change: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Architecture:
    """A supported architecture.

    Attributes:
        model_type: its name in transformers.
        outside: tensors outside the layers.
        layer: tensors of each layer.
    """

    model_type: str
    outside: tuple[Part, ...]
    layer: tuple[Part, ...]


_OUTSIDE = (
    Part("token_embd.weight", "model.embed_tokens.weight", "vh"),
    Part("output_norm.weight", "model.norm.weight", "h"),
    Part("output.weight", "lm_head.weight", "vh", optional=True),
)
_NORMS = (
    Part("attn_norm.weight", "input_layernorm.weight", "h"),
    Part("ffn_norm.weight", "post_attention_layernorm.weight", "h"),
)
_QKV = (
    Part("attn_q.weight", "self_attn.q_proj.weight", "qh"),
    Part("attn_k.weight", "self_attn.k_proj.weight", "kh"),
    Part("attn_v.weight", "self_attn.v_proj.weight", "kh"),
)
_OUTPUT = (Part("attn_output.weight", "self_attn.o_proj.weight", "hq"),)
_HEAD_NORMS = (
    Part("attn_q_norm.weight", "self_attn.q_norm.weight", "d"),
    Part("attn_k_norm.weight", "self_attn.k_norm.weight", "d"),
)
_MLP = (
    Part("ffn_gate.weight", "mlp.gate_proj.weight", "fh"),
    Part("ffn_up.weight", "mlp.up_proj.weight", "fh"),
    Part("ffn_down.weight", "mlp.down_proj.weight", "hf"),
)
_EXPERTS = (
    Part("ffn_gate_inp.weight", "mlp.gate.weight", "eh"),
    Part("ffn_gate_exps.weight", "mlp.experts.{}.gate_proj.weight", "emh", "stacked"),
    Part("ffn_up_exps.weight", "mlp.experts.{}.up_proj.weight", "emh", "stacked"),
    Part("ffn_down_exps.weight", "mlp.experts.{}.down_proj.weight", "ehm", "stacked"),
)
_SHARED_EXPERT = (
    Part("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "1h", "flat"),
    Part("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", "sh"),
    Part("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", "sh"),
    Part("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", "hs"),
)
_FOUR_NORMS = (
    Part("attn_norm.weight", "input_layernorm.weight", "h"),
    Part("post_attention_norm.weight", "post_attention_layernorm.weight", "h"),
    Part("ffn_norm.weight", "pre_feedforward_layernorm.weight", "h"),
    Part("post_ffw_norm.weight", "post_feedforward_layernorm.weight", "h"),
)


def _optional(*parts: Part) -> tuple[Part, ...]:
    return tuple(replace(part, optional=True) for part in parts)


def _plus_one(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(replace(part, change="plus one") if "norm" in part.name else part for part in parts)


def _rotary(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(replace(part, change="rotary") if part.sizes[0] in "qk" else part for part in parts)


def _biases(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the biases of linear layers: one number per row of a weight."""
    return tuple(
        Part(part.name.replace(".weight", ".bias"), part.target.replace(".weight", ".bias"), part.sizes[0])
        for part in parts
    )


def _llama() -> tuple[Part, ...]:
    queries_and_keys, values = _rotary(_QKV[:2]), _QKV[2:]
    biases = _optional(*_rotary(_biases(_QKV[:2])), *_biases((_QKV[2], *_OUTPUT, *_MLP)))
    return (*_NORMS, *queries_and_keys, *values, *_OUTPUT, *_MLP, *biases)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _OUTSIDE, _llama()),
    "qwen2": Architecture("qwen2", _OUTSIDE, (*_NORMS, *_QKV, *_biases(_QKV), *_OUTPUT, *_MLP)),
    "qwen3": Architecture("qwen3", _OUTSIDE, (*_NORMS, *_QKV, *_HEAD_NORMS, *_OUTPUT, *_MLP)),
    "qwen2moe": Architecture(
        "qwen2_moe", _OUTSIDE, (*_NORMS, *_QKV, *_biases(_QKV), *_OUTPUT, *_EXPERTS, *_SHARED_EXPERT)
    ),
    "qwen3moe": Architecture("qwen3_moe", _OUTSIDE, (*_NORMS, *_QKV, *_HEAD_NORMS, *_OUTPUT, *_EXPERTS)),
    "gemma": Architecture("gemma", _plus_one(_OUTSIDE), _plus_one((*_NORMS, *_QKV, *_OUTPUT, *_MLP))),
    "gemma2": Architecture("gemma2", _plus_one(_OUTSIDE), _plus_one((*_FOUR_NORMS, *_QKV, *_OUTPUT, *_MLP))),
    "gemma3": Architecture(
        "gemma3_text", _plus_one(_OUTSIDE), _plus_one((*_FOUR_NORMS, *_QKV, *_HEAD_NORMS, *_OUTPUT, *_MLP))
    ),
    "phi3": Architecture(
        "phi3",
        _OUTSIDE,
        (
            *_NORMS,
            Part("attn_qkv.weight", "self_attn.qkv_proj.weight", "ph"),
            *_OUTPUT,
            Part("ffn_up.weight", "mlp.gate_up_proj.weight", "gh"),
            Part("ffn_down.weight", "mlp.down_proj.weight", "hf"),
        ),
    ),
}
"""Architectures by their names in GGUF files."""
