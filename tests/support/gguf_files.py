"""GGUF files written here, byte by byte, and models in them as llama.cpp's converter would put them there."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

_STRUCT = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2)}


@dataclass(frozen=True)
class Typed:
    """A value of the metadata with GGUF's number for its type."""

    kind: int
    value: Any


@dataclass
class Stored:
    """A tensor of a file: its sizes in torch's order, ggml's type and its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str
    data: bytes


@dataclass
class Gguf:
    """What a file is written of.

    Attributes:
        metadata: integers are written as uint32, floats as float32, lists as arrays.
        tensors: in their order.
        version: of the format.
        alignment: of the tensors.
        offsets: in place of those that the tensors would have, by name.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Stored] = field(default_factory=list)
    version: int = 3
    alignment: int = 32
    offsets: dict[str, int] = field(default_factory=dict)

    def encoded(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            kind, data = _value(value)
            head += _text(key) + struct.pack("<I", kind) + data
        body = b""
        for tensor in self.tensors:
            dims = tuple(reversed(tensor.shape))
            offset = self.offsets.get(tensor.name, len(body))
            number = GGMLQuantizationType[tensor.kind].value
            head += _text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)
            body += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + body

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encoded())
        return path

    def tensor(self, name: str) -> Stored:
        return next(tensor for tensor in self.tensors if tensor.name == name)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, Typed):
        if value.kind in _STRUCT:
            return value.kind, struct.pack(f"<{_STRUCT[value.kind]}", value.value)
        value = value.value
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _text(value)
    parts = [_value(entry) for entry in value]
    kind = parts[0][0] if parts else 4
    return 9, struct.pack("<IQ", kind, len(parts)) + b"".join(data for _, data in parts)


def blocks_of(weight: np.ndarray, kind: str) -> bytes:
    """The bytes of float32 rows in a type of ggml's."""
    if kind in _BY_HAND:
        return _BY_HAND[kind](weight.reshape(-1, 256)).tobytes()
    return quantize(weight, GGMLQuantizationType[kind]).tobytes()


def dense(tensor: Stored) -> torch.Tensor:
    """What gguf's own package makes of a tensor, float32."""
    number = GGMLQuantizationType[tensor.kind]
    size = GGML_QUANT_SIZES[number]
    rows = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], tensor.shape[-1] // size[0] * size[1])
    return torch.from_numpy(np.array(dequantize(rows, number)).astype(np.float32).reshape(tensor.shape))


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """uint8 ``[count, bytes]``: any bits, but for scales, which are floats from 0.01 to 0.03 of either sign."""
    draw = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = draw.integers(0, 256, (count, size), dtype=np.uint8)
    for at in _HALVES.get(kind, (0, 2) if kind == "Q5_1" else (0,)):
        halves = draw.uniform(0.01, 0.03, (count, 1)) * draw.choice([-1, 1], (count, 1))
        blocks[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks


def _halves(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16).view(np.uint8).reshape(len(numbers), -1)


def _q6_k(rows: np.ndarray) -> np.ndarray:
    groups = rows.reshape(-1, 16, 16)
    ideal = np.abs(groups).max(-1) / 31
    unit = (ideal.max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    small = np.rint(ideal / np.maximum(unit, 1e-8)).clip(1, 127)
    codes = np.rint(groups / (unit * small)[..., None]).clip(-32, 31).astype(np.int64).reshape(-1, 256) + 32
    halves = codes.reshape(-1, 2, 4, 32)
    low = np.concatenate([halves[:, :, :2] & 15 | (halves[:, :, 2:] & 15) << 4], -1).reshape(-1, 128)
    high = sum((halves[:, :, i] >> 4) << 2 * i for i in range(4)).reshape(-1, 64)
    parts = [low.astype(np.uint8), high.astype(np.uint8), small.astype(np.int8).view(np.uint8), _halves(unit)]
    return np.concatenate(parts, 1)


def _small_scales(rows: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Head of a block of Q4_K or Q5_K, and the scales and offsets of its groups."""
    groups = rows.reshape(-1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    ideal, least = (groups.max(-1).clip(0) - low) / top, -low
    units = [(x.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float32) for x in (ideal, least)]
    scales, offsets = (
        np.rint(x / np.maximum(unit, 1e-8)).clip(0, 63).astype(np.uint8)
        for x, unit in zip((ideal, least), units, strict=True)
    )
    packed = np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            offsets[:, :4] | offsets[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4,
        ],
        1,
    )
    head = np.concatenate([_halves(units[0]), _halves(units[1]), packed], 1)
    return head, units[0] * scales, units[1] * offsets


def _affine(rows: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    head, scales, offsets = _small_scales(rows, top)
    groups = rows.reshape(-1, 8, 32)
    codes = np.rint((groups + offsets[..., None]) / np.maximum(scales, 1e-8)[..., None]).clip(0, top)
    return head, codes.astype(np.uint8)


def _q4_k(rows: np.ndarray) -> np.ndarray:
    head, codes = _affine(rows, 15)
    return np.concatenate([head, (codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1, 128)], 1)


def _q5_k(rows: np.ndarray) -> np.ndarray:
    head, codes = _affine(rows, 31)
    high = sum(((codes[:, i] >> 4) << i).astype(np.uint8) for i in range(8))
    low = codes & 15
    return np.concatenate([head, high, (low[:, ::2] | low[:, 1::2] << 4).reshape(-1, 128)], 1)


_BY_HAND: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
"""What gguf's package reads and does not write."""

_ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}


def file_of(model: PreTrainedModel, kinds: Callable[[str], str], **more: Any) -> Gguf:
    """A model as llama.cpp's converter writes it.

    Args:
        model: of transformers, with its own weights.
        kinds: of the name of a matrix in the file, the type that it is stored in.
        more: further entries of the metadata, without the architecture's name.
    """
    config = model.config
    name = _ARCHITECTURES.get(config.model_type, config.model_type)
    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    found = Gguf(_metadata(config, name, more))
    for key, value in _state(model).items():
        new = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert new is not None, key
        weight = _changed(name, new, value.float().numpy(), config)
        kind = kinds(new) if weight.ndim > 1 and "ffn_gate_inp" not in new else "F32"
        weight = np.ascontiguousarray(weight, np.float32)
        found.tensors.append(Stored(new, weight.shape, kind, blocks_of(weight, kind)))
    return found


def _state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors as a checkpoint holds them, experts stacked."""
    state: dict[str, torch.Tensor] = {}
    tied = model.config.tie_word_embeddings
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and tied:
            continue
        if key.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, 1)
            state[key.replace("gate_up_proj", "gate_proj.weight")] = gate
            state[key.replace("gate_up_proj", "up_proj.weight")] = up
        elif key.endswith("experts.down_proj"):
            state[f"{key}.weight"] = value
        else:
            state[key] = value
    return state


def _changed(architecture: str, name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight + 1
    if "ffn_gate_inp_shexp" in name:
        weight = weight[0]
    return weight


def _metadata(config: Any, name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.rope_parameters
    of_full = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    said: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.freq_base": float(of_full["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if name in ("llama", "phi3"):
        said["rope.dimension_count"] = int(dim * of_full.get("partial_rotary_factor", 1.0))
    if name == "llama":
        said["vocab_size"] = config.vocab_size
    if "moe" in name:
        said |= {
            "expert_count": config.num_experts if name == "qwen2moe" else config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if name == "qwen2moe":
        said["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if name in ("gemma2", "gemma3"):
        said["attention.sliding_window"] = config.sliding_window
    if name == "gemma2":
        said["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        said["final_logit_softcapping"] = float(config.final_logit_softcapping)
    said |= more
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    return {
        "general.architecture": name,
        "general.name": "tiny",
        "general.quantization_version": 2,
        **{f"{name}.{key}": value for key, value in said.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def all_of(kind: str) -> Callable[[str], str]:
    """Every matrix in one type."""
    return lambda name: kind


def as_llama_cpp(kind: str, rest: str = "Q6_K") -> Callable[[str], str]:
    """Matrices in one type, embeddings and head in another, as llama.cpp mixes them."""
    return lambda name: rest if name in ("output.weight", "token_embd.weight") else kind


KINDS: Sequence[str] = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)
"""Types of blocks that are read."""
