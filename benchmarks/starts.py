"""What a start takes: seconds to the first token by phase, and memory, each in a process of its own.

    python benchmarks/starts.py [--shape qwen3-4b] [--weights int4-stored | bf16] [--layers 36] [--keep FOLDER]

A checkpoint of random weights is written in shards: in bf16, or in 4 bits (compressed-tensors, W4A16, groups of 128),
the embedding and the head in bf16. It is started with an empty store of programs, then with the program in it. Of the
start's parts that no engine can leave out, two are timed beside it: importing torch and transformers, and reading and
hashing the files once. The files are in the page cache. Memory is the largest resident set of the process (VmHWM),
less that of a process that serves a model of no size to speak of.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Nothing that a start imports is imported here.

MIB = 2**20
SHARD = 1 << 30
WEIGHTS = ("int4-stored", "bf16")


def changed(config: Any, **settings: Any) -> Any:
    """A config with other settings, and the kinds of layers that follow from these."""
    return type(config)(**{**config.to_dict(), "layer_types": None, **settings})


def write(folder: Path, config: Any, weights: str) -> int:
    """A checkpoint of random weights in shards; its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from write_w4a16 import GROUP, rounded

    from torch_pagoda.checkpoint.compressed_writer import quantization_config

    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, Any]] = [{}]
    index: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}
        shards.append({})

    for name, like in model.state_dict().items():
        if name in tied:
            continue
        if like.dim() == 1:
            made = {name: torch.ones(like.shape, dtype=torch.bfloat16)}
        else:
            weight = torch.randn(like.shape, generator=generator) * 0.02
            made = {name: weight.bfloat16()}
            if weights == "int4-stored" and "embed" not in name and "lm_head" not in name:
                owner = name.removesuffix(".weight")
                made = {f"{owner}.{leaf}": part for leaf, part in rounded(weight).items()}
        shards[-1] |= made
        total += sum(part.nbytes for part in made.values())
        if sum(part.nbytes for part in shards[-1].values()) > SHARD:
            flush()
    flush()
    said = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(said))
    described = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    if weights == "int4-stored":
        described["quantization_config"] = quantization_config(GROUP, ["lm_head"])
    (folder / "config.json").write_text(json.dumps(described))
    return total


def serve(folder: str) -> dict[str, Any]:
    """The first token, in this process; what it took."""
    start = time.perf_counter()
    import torch_pagoda as pagoda

    llm = pagoda.LLM(folder, num_blocks=64)
    llm.generate([list(range(5, 25))], pagoda.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    spent = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    report = llm.compile_report
    return {
        "seconds": spent,
        "phases": {name: round(seconds, 2) for name, seconds in report.seconds.items()},
        "stored": report.stored,
        "peak": int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10,  # type: ignore[index]
    }


def imports(_: str) -> dict[str, Any]:
    """The imports that every start makes."""
    start = time.perf_counter()
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    return {"seconds": time.perf_counter() - start}


def read(folder: str) -> dict[str, Any]:
    """Reading and hashing all weights once, in one stream."""
    start = time.perf_counter()
    for file in sorted(Path(folder).glob("*.safetensors")):
        with file.open("rb") as opened:
            hashlib.file_digest(opened, "sha256")
    return {"seconds": time.perf_counter() - start}


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {"serve": serve, "imports": imports, "read": read}


def in_process(part: str, folder: Path, cache: Path) -> dict[str, Any]:
    """What a part says in a process of its own, with the seconds until that ended."""
    env = {**os.environ, "TORCH_PAGODA_CACHE": str(cache), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, "--part", part, "--keep", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2_000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-4b", help="of shapes.START_SHAPES")
    parser.add_argument("--weights", choices=WEIGHTS, default="int4-stored")
    parser.add_argument("--layers", type=int, help="of the shape's, fewer")
    parser.add_argument("--keep", type=Path, help="write the checkpoint there, or use the one that is there")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](str(options.keep))))
        return
    from shapes import START_SHAPES

    config = START_SHAPES[options.shape]()
    if options.layers:
        config = changed(config, num_hidden_layers=options.layers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch, "checkpoint")
        if not folder.exists():
            write(folder, config, options.weights)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        small, cache = Path(scratch, "small"), Path(scratch, "cache")
        write(small, changed(config, num_hidden_layers=1, vocab_size=512), options.weights)
        cache.mkdir(mode=0o700)
        least = in_process("serve", small, cache)["peak"]  # the kernels are compiled here, too
        print(f"checkpoint: {size / MIB:.0f} MiB; a process with a model of one layer: {least / MIB:.0f} MiB")
        for part in ("imports", "read"):
            print(f"{part:>13}: {in_process(part, folder, cache)['seconds']:5.1f} s")
        for name in ("first start", "second start"):
            row = in_process("serve", folder, cache)
            stored = ", stored program" if row["stored"] else ""
            print(
                f"{name:>13}: {row['seconds']:5.1f} s to the first token{stored}; peak {row['peak'] / MIB:.0f} MiB, "
                f"{(row['peak'] - least) / size:.2f} of the checkpoint above the small one; "
                f"{row['phases']}, outside {row['seconds'] - sum(row['phases'].values()):.1f}"
            )


if __name__ == "__main__":
    main()
