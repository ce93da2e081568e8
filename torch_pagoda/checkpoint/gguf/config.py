"""Converts a GGUF file's metadata to a config of transformers.

transformers can read such files with the package ``gguf``, but ignores some entries: factors of the rotary
frequencies (llama 3.1 and later), scaled positions, the width of experts. This module reads every key of the
architecture, or rejects the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .architectures import ARCHITECTURES, Architecture
from .metadata import Metadata
from .rotary import default_rotary, longrope, scaled_rotary

Values = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Values of the letters in ``Part.sizes``.

    Attributes:
        of: letter → size: ``v`` tokens, ``h`` hidden size, ``d`` of a head, ``q`` of all heads of queries, ``k`` of
            keys, ``p`` of all three, ``f`` inside an MLP, ``g`` twice that, ``e`` experts, ``m`` inside an expert,
            ``s`` inside the shared one, ``1`` one.
        num_layers: number of layers.
        num_heads: number of query heads.
        num_kv_heads: number of key heads.
    """

    of: Mapping[str, int]
    num_layers: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class Floats:
    """The information about tensors that a config depends on.

    Attributes:
        names: shapes of all tensors, by name.
        dtype: dtype of the weights if they are plain floats; None if any is quantized.
        vector: returns the floats of a tensor by its name, or None if there is no such tensor.
    """

    names: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype | None
    vector: Callable[[str], list[float] | None]


def read_config(said: Metadata, tensors: Floats) -> tuple[Architecture, Values, Sizes]:
    """Return the architecture, the values of its config (including ``model_type``), and the sizes of its tensors.

    Raises:
        BadGguf: the architecture is not supported, or an entry is missing, wrong, unknown or contradicts the tensors.
    """
    architecture = check_known(said)
    embeddings = tensors.names.get("token_embd.weight", ())
    if len(embeddings) != 2:
        raise said.bad("matrix 'token_embd.weight' is missing", "download the file again")
    sizes = _sizes(said, architecture, embeddings)
    heads = {"num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_kv_heads}
    values: Values = {
        "model_type": architecture.model_type,
        "architectures": [_class_name(architecture.model_type)],
        "vocab_size": sizes.of["v"],
        "hidden_size": sizes.of["h"],
        "intermediate_size": sizes.of["f"],
        "num_hidden_layers": sizes.num_layers,
        **heads,
        "max_position_embeddings": said.whole("context_length"),
        "rms_norm_eps": said.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors.names,
        "dtype": str(tensors.dtype or torch.bfloat16).removeprefix("torch."),
        **_tokens(said, sizes.of["v"]),
    }
    values |= _OWN[said.architecture](said, tensors, sizes)
    if (stated := said.get("vocab_size")) is not None and stated != sizes.of["v"]:
        raise said.bad(
            f"its metadata states {stated!r:.50} tokens, which contradicts the shape of 'token_embd.weight'"
        )
    said.check_all_read()
    return architecture, values, sizes


def check_known(said: Metadata) -> Architecture:
    """Return the architecture of a file.

    Raises:
        BadGguf: the architecture is not supported.
    """
    architecture = ARCHITECTURES.get(said.architecture)
    if architecture is None:
        raise said.bad(
            f"architecture {said.architecture!r:.50} is not supported; supported: {', '.join(ARCHITECTURES)}",
            "pass the float checkpoint",
        )
    return architecture


def _class_name(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return found if isinstance(found, str) else found[0]


def _sizes(said: Metadata, architecture: Architecture, embeddings: tuple[int, ...]) -> Sizes:
    vocab, hidden = embeddings
    if said.whole("embedding_length") != hidden:
        raise said.bad(f"its embedding_length contradicts the shape of 'token_embd.weight', {list(embeddings)}")
    num_heads = said.whole("attention.head_count")
    num_kv_heads = said.whole("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise said.bad(f"its {num_heads} query heads are not a multiple of its {num_kv_heads} key heads")
    partly = said.architecture == "phi3"
    even = max(hidden // num_heads, 1)
    dim = said.whole("attention.key_length", even if partly else said.whole("rope.dimension_count", even))
    rotated = said.whole("rope.dimension_count", dim)
    if said.whole("attention.value_length", dim) != dim:
        raise said.bad("key and value heads of different lengths are not supported", "pass the float checkpoint")
    if rotated != dim and not partly:
        what = f"rotating only {rotated} of {dim} dims of each head is not supported"
        raise said.bad(what, "pass the float checkpoint")
    if not _TAKES_HEAD_DIM.get(architecture.model_type, True) and dim * num_heads != hidden:
        what = f"its {num_heads} heads of {dim} do not add up to the hidden size {hidden}"
        raise said.bad(what, "pass the float checkpoint")
    inner = said.whole("feed_forward_length", 1 if "moe" in said.architecture else None)
    of = {
        **{"v": vocab, "h": hidden, "d": dim, "q": num_heads * dim, "k": num_kv_heads * dim, "1": 1},
        **{"p": (num_heads + 2 * num_kv_heads) * dim, "f": inner, "g": 2 * inner},
    }
    if "moe" in said.architecture:
        of["e"], of["m"] = said.whole("expert_count"), said.whole("expert_feed_forward_length")
        if said.architecture == "qwen2moe":
            of["s"] = said.whole("expert_shared_feed_forward_length", inner)
    return Sizes(of, said.whole("block_count"), num_heads, num_kv_heads)


_TAKES_HEAD_DIM = {"qwen2": False, "qwen2_moe": False, "phi3": False}
"""Model types → True if their config may state the length of a head."""


def _tokens(said: Metadata, num_tokens: int) -> Values:
    """Return the ids that begin, end and pad. Files name one id that ends a text and one that ends a turn."""
    ends = [said.token(key, num_tokens) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    found = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": said.token("bos_token_id", num_tokens),
        "eos_token_id": found[0] if len(found) == 1 else found or None,
        "pad_token_id": said.token("padding_token_id", num_tokens),
    }


def _has(tensors: Floats, leaf: str) -> bool:
    return f"blk.0.{leaf}" in tensors.names


def _llama(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    if said.get("expert_count") or said.get("expert_used_count"):
        raise said.bad("experts of Mixtral's kind are not supported", "pass the float checkpoint")
    return {
        "head_dim": sizes.of["d"],
        "attention_bias": _has(tensors, "attn_output.bias"),
        "mlp_bias": _has(tensors, "ffn_down.bias"),
        "rope_parameters": scaled_rotary(said, tensors.vector("rope_freqs.weight"), sizes.of["d"]),
    }


def _qwen2(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    return {"rope_parameters": scaled_rotary(said, tensors.vector("rope_freqs.weight"), sizes.of["d"])}


def _qwen3(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    return {"head_dim": sizes.of["d"], **_qwen2(said, tensors, sizes)}


def _experts(said: Metadata, sizes: Sizes) -> Values:
    used = said.whole("expert_used_count")
    if used > sizes.of["e"]:
        raise said.bad(f"its expert_used_count is {used}, but it has {sizes.of['e']} experts")
    return {
        "num_experts": sizes.of["e"],
        "num_experts_per_tok": used,
        "moe_intermediate_size": sizes.of["m"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    shared = {"shared_expert_intermediate_size": sizes.of["s"], "norm_topk_prob": False}
    return {**_experts(said, sizes), **shared, **_qwen2(said, tensors, sizes)}


def _qwen3moe(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    # Not stated in files: llama.cpp normalizes the weights of the chosen experts to a sum of 1.
    return {**_experts(said, sizes), "norm_topk_prob": True, **_qwen3(said, tensors, sizes)}


def _gemma(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    return {"head_dim": sizes.of["d"], "rope_parameters": default_rotary(said)}


def _attention_scale(sizes: Sizes, deepest: int) -> int:
    """Return the number whose root divides the queries, which files do not state. The deepest model of a family uses
    ``hidden / heads``, the others the length of a head."""
    return sizes.of["h"] // sizes.num_heads if sizes.num_layers == deepest else sizes.of["d"]


def _gemma2(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    return {
        **_gemma(said, tensors, sizes),
        "query_pre_attn_scalar": _attention_scale(sizes, 46),
        "sliding_window": said.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": said.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.number("final_logit_softcapping", 30.0),
    }


def _gemma3(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    pattern = said.whole("attention.sliding_window_pattern", 6)
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(sizes.num_layers)]
    capped = said.get("final_logit_softcapping")
    return {
        "head_dim": sizes.of["d"],
        "query_pre_attn_scalar": _attention_scale(sizes, 62),
        "sliding_window": said.whole("attention.sliding_window", 1024),
        "layer_types": kinds,
        "final_logit_softcapping": None if not capped else said.number("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": scaled_rotary(said, None, sizes.of["d"], theta=1e6),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": said.number("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _phi3(said: Metadata, tensors: Floats, sizes: Sizes) -> Values:
    window = said.get("attention.sliding_window")
    rotated = said.whole("rope.dimension_count", sizes.of["d"])
    if rotated > sizes.of["d"]:
        raise said.bad(f"its rope.dimension_count is {rotated}, but a head has {sizes.of['d']} dims")
    factors = [tensors.vector(f"rope_factors_{kind}.weight") for kind in ("short", "long")]
    return {
        "sliding_window": said.whole("attention.sliding_window") if window else None,
        **longrope(said, factors[0], factors[1], rotated, said.whole("context_length"), rotated / sizes.of["d"]),
    }


_OWN: dict[str, Callable[[Metadata, Floats, Sizes], Values]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
"""Config values of each architecture in addition to the common ones."""
