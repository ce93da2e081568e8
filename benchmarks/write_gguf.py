"""Writes a Llama or Qwen3 checkpoint as GGUF for llama.cpp; runs in the Python of that peer.

    python write_gguf.py FOLDER model.gguf                        # of a bf16 checkpoint
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
import llama_cpp
import numpy as np

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
FILE_TYPES = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def bf16_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bits (uint16) of the tensors in a safetensors file: a header's length, the header as JSON, the data.

    Source: https://huggingface.co/docs/safetensors
    """
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view("<u8")[0])
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}; only BF16 is written")
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        yield name, data[begin:end].view("<u2").reshape(entry["shape"])


def interleave_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys ``[heads · dim, in]`` for rotation of neighbours, where dim/2 apart were rotated."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def convert(source: Path, target: Path) -> None:
    """Write matrices as they are, in bf16, and vectors, which llama.cpp wants so, in fp32."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    kind, layers, heads = config["model_type"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
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
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(architecture, layers)
    for path in sorted(source.glob("*.safetensors")):
        for name, bits in bf16_tensors(path):
            if name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            new = names.get_name(name, try_suffixes=(".weight",))
            if new is None:
                raise ValueError(f"GGUF has no name for {name} in {kind}")
            if bits.ndim == 1:
                writer.add_tensor(new, (bits.astype(np.uint32) << 16).view(np.float32))
                continue
            for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
                if kind == "llama" and name.endswith(f"{part}.weight"):
                    bits = interleave_heads(bits, count)
            rows = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(new, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write a bf16 file's matrices in ``kind``, as llama.cpp does by default: Q6_K for the head where it is Q4_0."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[kind]
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
