"""What starting from a 4-bit checkpoint takes: seconds to the first token, and memory, in a process of its own each.

    python benchmarks/quantized_start.py [--shape tinyllama-1.1b] [--layers 22] [--keep FOLDER]

A compressed-tensors checkpoint (W4A16, groups of 128) of random weights is written, then started three times: with an
empty store of programs, with the program in it, and with a copy of the checkpoint of which one code differs.
Memory is the largest resident set of the process (VmHWM), and what of it is above that of a process that serves a
model of no size to speak of.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shapes import SHAPES
from transformers import AutoModelForCausalLM
from write_w4a16 import GROUP, rounded

from torch_pagoda.checkpoint.compressed_writer import quantization_config

MIB = 2**20


def write(folder: Path, config: Any) -> int:
    """A checkpoint of random weights, those of all linear layers but the head in 4 bits; its bytes."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, like in model.state_dict().items():
        if like.dim() == 1:
            tensors[name] = torch.ones(like.shape, dtype=torch.bfloat16)
            continue
        weight = torch.randn(like.shape, generator=generator) * 0.02
        if "embed" in name or "lm_head" in name:
            tensors[name] = weight.bfloat16()
            continue
        owner = name.removesuffix(".weight")
        tensors |= {f"{owner}.{leaf}": part for leaf, part in rounded(weight).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    said["quantization_config"] = quantization_config(GROUP, ["lm_head"])
    (folder / "config.json").write_text(json.dumps(said))
    return (folder / "model.safetensors").stat().st_size


def serve(folder: str) -> None:
    """The first token, in this process; what it took as JSON."""
    start = time.perf_counter()
    import torch_pagoda as pagoda

    llm = pagoda.LLM(folder, num_blocks=64)
    made = time.perf_counter()
    llm.generate([list(range(5, 25))], pagoda.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    status = Path("/proc/self/status").read_text()
    sizes = {key: int(re.search(rf"{key}:\s+(\d+)", status)[1]) << 10 for key in ("VmHWM", "RssAnon", "RssFile")}  # type: ignore[index]
    report = llm.compile_report
    said = {
        "seconds": time.perf_counter() - start,
        "made": made - start,
        "phases": {name: round(spent, 2) for name, spent in report.seconds.items()},
        "stored": report.stored,
        **sizes,
    }
    print(json.dumps(said))


def started(folder: Path, cache: Path) -> dict[str, Any]:
    env = {**os.environ, "TORCH_PAGODA_CACHE": str(cache), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, "--serve", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2_000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--layers", type=int, help="of the shape's, fewer")
    parser.add_argument("--keep", type=Path, help="write the checkpoint there, or use the one that is there")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    config = SHAPES[options.shape]()
    if options.layers:
        config.num_hidden_layers = options.layers
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch, "checkpoint")
        size = write(folder, config) if not folder.exists() else (folder / "model.safetensors").stat().st_size
        small, cache = Path(scratch, "small"), Path(scratch, "cache")
        config.num_hidden_layers, config.vocab_size = 1, 512
        write(small, config)
        cache.mkdir(mode=0o700)
        least = started(small, cache)["VmHWM"]  # the kernels are compiled here, too
        print(f"checkpoint: {size / MIB:.0f} MiB; a process with a model of one layer: {least / MIB:.0f} MiB")
        rows = [("first start", started(folder, cache)), ("second start", started(folder, cache))]
        changed = Path(shutil.copytree(folder, Path(scratch, "changed")))
        tensors = load_file(changed / "model.safetensors")
        key = next(key for key in sorted(tensors) if key.endswith("weight_packed"))
        tensors[key].view(-1)[tensors[key].numel() // 2] ^= 1
        save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
        del tensors
        rows.append(("one code changed", started(changed, cache)))
    for name, row in rows:
        above = row["VmHWM"] - least
        print(
            f"{name:>17}: {row['seconds']:5.1f} s to the first token{', stored program' if row['stored'] else ''}; "
            f"peak {row['VmHWM'] / MIB:.0f} MiB, {above / MIB:.0f} above the small one, {above / size:.2f} of the "
            f"checkpoint; {row['phases']}"
        )


if __name__ == "__main__":
    main()
