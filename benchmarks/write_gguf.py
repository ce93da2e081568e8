"""Writes a Llama, Qwen3, Qwen3.5 or gpt-oss checkpoint as GGUF for llama.cpp; runs in the Python of that peer.

    python write_gguf.py FOLDER model.gguf                        # of a bf16 checkpoint; of gpt-oss, experts in MXFP4
    python write_gguf.py model.gguf model-q4.gguf --quantize q4_0   # by llama.cpp's own quantizer

The file has no tokenizer: token ids go in and come out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
DTYPES = {"BF16": "<u2", "U8": "u1"}
FILE_TYPES = {kind: f"LLAMA_FTYPE_MOSTLY_{kind.upper()}" for kind in ("q8_0", "q4_0", "q4_k_m")}


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of the tensors in a safetensors file, of bf16 the bits as uint16.

    The file: a header's length, the header as JSON, the data.

    Source: https://huggingface.co/docs/safetensors
    """
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view("<u8")[0])
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} is {entry['dtype']}; only {' and '.join(DTYPES)} are written")
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        yield name, data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def interleave_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys ``[heads · dim, in]`` for rotation of neighbors, where dim/2 apart were rotated."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def add_linear_attention(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of the gated delta net.

    Raises:
        ValueError: llama.cpp wants the heads in another order than the checkpoint's.
    """
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if key_heads != value_heads:
        raise ValueError(f"{key_heads} heads of keys and {value_heads} of values; only as many of both are written")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * value_heads)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    # Text has one position; llama.cpp asks for the share of three all the same.
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def as_fp32(bits: np.ndarray) -> np.ndarray:
    """Numbers of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def of_linear_attention(name: str, bits: np.ndarray) -> tuple[str, np.ndarray]:
    """What llama.cpp expects in place of a tensor of Qwen3.5, which writes norms as what they add to one."""
    if name.endswith(".A_log"):
        return name, -np.exp(as_fp32(bits))
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), as_fp32(bits)
    if name.endswith(".conv1d.weight"):
        return name, as_fp32(bits.reshape(bits.shape[0], -1))
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return name, as_fp32(bits) + 1
    return name, bits


def add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of gpt-oss's experts and windows, and its positions' YaRN."""
    rope = config["rope_parameters"]
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def mxfp4_blocks(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Rows ``[experts, out, in / 32 · 17]`` of llama.cpp, of blocks ``[experts, out, in / 32, 16]`` and their scales.

    A byte of a block holds neighbors in the checkpoint, and numbers that lie 16 apart for llama.cpp.
    """
    codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], 2, 16)
    packed = codes[..., 0, :] | codes[..., 1, :] << 4
    return np.concatenate((exponents[..., None], packed), -1).reshape(*blocks.shape[:2], -1)


def of_gpt_oss(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """What llama.cpp expects in place of the tensors of gpt-oss, whose gates and ups take turns."""
    for name, values in tensors.items():
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            owner = name.removesuffix("_blocks")
            name, values = f"{owner}.weight", mxfp4_blocks(values, tensors[f"{owner}_scales"])
        elif name.endswith("_proj_bias"):
            name, values = name.replace("_proj_bias", "_proj.bias"), as_fp32(values)
        elif name.endswith(("router.weight", "sinks")):
            name, values = name.replace("sinks", "sinks.weight"), as_fp32(values)
        if ".gate_up_proj." in name:
            for i, part in enumerate((".gate_proj.", ".up_proj.")):
                yield name.replace(".gate_up_proj.", part), np.ascontiguousarray(values[:, i::2])
        else:
            yield name, values


def convert(source: Path, target: Path) -> None:
    """Write matrices as they are, in bf16 or MXFP4, and vectors, which llama.cpp wants so, in fp32."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    kind, layers, heads = config["model_type"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    architecture = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if kind == "qwen3_5_text":
        add_linear_attention(writer, config)
    if kind == "gpt_oss":
        add_experts(writer, config)
    names = gguf.get_tensor_name_map(architecture, layers)
    for path in sorted(source.glob("*.safetensors")):
        tensors = read_tensors(path)
        for name, bits in of_gpt_oss(dict(tensors)) if kind == "gpt_oss" else tensors:
            if name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
                if kind == "llama" and name.endswith(f"{part}.weight"):
                    bits = interleave_heads(bits, count)
            old, values = of_linear_attention(name, bits) if kind == "qwen3_5_text" else (name, bits)
            new = names.get_name(old, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise ValueError(f"GGUF has no name for {name} in {kind}")
            if values.dtype == np.float32 or values.ndim == 1:
                writer.add_tensor(new, values if values.dtype == np.float32 else as_fp32(values))
                continue
            is_mxfp4 = values.dtype == np.uint8
            stored = gguf.GGMLQuantizationType.MXFP4 if is_mxfp4 else gguf.GGMLQuantizationType.BF16
            writer.add_tensor(new, np.ascontiguousarray(values).view(np.uint8), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write a bf16 file's matrices in ``kind``, as llama.cpp does by default: Q6_K for the head where it is Q4_0."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, FILE_TYPES[kind])
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if code:
        sys.exit(f"llama_model_quantize answered {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--quantize", choices=FILE_TYPES)
    args = parser.parse_args()
    args.target.parent.mkdir(parents=True, exist_ok=True)
    if args.quantize:
        quantize(args.source, args.target, args.quantize)
    else:
        convert(args.source, args.target)


if __name__ == "__main__":
    main()
