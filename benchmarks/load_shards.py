"""How much memory each rank takes to load a checkpoint, and what it reads of the files, beside its share.

    python benchmarks/load_shards.py                         # 12 layers of 2048 features in bfloat16, 2 ranks
    python benchmarks/load_shards.py --ranks 4 --out results
    python benchmarks/load_shards.py --experts 32 --layers 4 # a tensor in the files for each expert
    python benchmarks/load_shards.py --experts 32 --layers 16 --full  # the same as if the host's memory were full
    python benchmarks/load_shards.py --layers 2 --format gptq-4-order # quantized, here by GPTQ with act-order; awq

A checkpoint of random weights in several files is loaded twice, each time by processes of its own: a first start
compiles it, a second one takes the stored program. Memory is the most that a rank took while it loaded and that no
file backs (``RssAnon``): its packed parts. Pages of the files (``RssFile``) are shared by all ranks, and the system
takes them back where memory is short: their most is shown beside.

What a rank reads is what the system fetches from the disk for it (``read_bytes`` in ``/proc/PID/io``), what it reads
ahead included, while the rank loads its part alone, from files that are not in memory. Its share are the parts that
it holds, those that all ranks hold whole among them. A file system in memory fetches nothing: use a folder on a disk
(``TMPDIR``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from report import conditions, markdown_table, save

GIB = 2**30


class Watched:
    """The most memory of a process, in bytes, sampled until it is closed.

    Args:
        pid: of the process.

    Attributes:
        most: that no file backs.
        mapped: of files.
    """

    def __init__(self, pid: int) -> None:
        self.most = self.mapped = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> int:
        """Stop; returns the most."""
        self._ended.set()
        self._thread.join()
        return self.most

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self.most, self.mapped = max(self.most, memory(self._pid)), max(self.mapped, memory(self._pid, "File"))


def memory(pid: int, kind: str = "Anon") -> int:
    """Memory of a process that no file backs, or that of files, in bytes; 0 once it has ended."""
    try:
        found = re.search(rf"^Rss{kind}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def read_alone(message: Path, rank: int) -> dict[str, int]:
    """Bytes that a rank fetches from the disk for its part of the program that a message holds, and those of the
    part."""
    import torch

    from torch_pagoda.compiler.link.linker import LinkedProgram
    from torch_pagoda.compiler.ranks import lead
    from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, stored_parts
    from torch_pagoda.runtime.parallel.messages import PREFIX_BYTES, decode, lengths
    from torch_pagoda.shipping import load_program

    data = message.read_bytes()
    start = PREFIX_BYTES + lengths(data[:PREFIX_BYTES])[0]
    sent = decode(data[PREFIX_BYTES:start], bytearray(data[start:]))
    sent.values["processors"] = []
    parts: list[int] = []
    restore = lead.restore

    def restored(*stored: Any, **options: Any) -> LinkedProgram:
        program = restore(*stored, **options)
        given = [each for each in program._args if isinstance(each, torch.Tensor)]
        tensors = [
            part for each in given for part in (stored_parts(each) if isinstance(each, StoredWeight) else [each])
        ]
        parts.append(sum({each.data_ptr(): each.nbytes for each in tensors}.values()))
        return program

    lead.restore = restored  # type: ignore[assignment]
    for path in Path(sent.values["model"]).glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = fetched()
    load_program(sent, SimpleNamespace(rank=rank))  # type: ignore[arg-type]
    return {"read": fetched() - before, "share": parts[0]}


def fetched() -> int:
    """Bytes that the system has fetched from disks for this process."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def tensor_bytes(path: Path) -> list[int]:
    """Bytes of each tensor of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    places = [each["data_offsets"] for key, each in header.items() if key != "__metadata__"]
    return [end - start for start, end in places]


def measure(folder: str, ranks: int, full: bool) -> dict[str, Any]:
    """Load a checkpoint by several ranks, of which this process is the first; the most memory of it and of the
    others, and seconds. What it sends is left in ``message`` in the folder. ``full``: nothing fits into memory."""
    from torch_pagoda import LLM
    from torch_pagoda.checkpoint import layers_in_files
    from torch_pagoda.runtime.parallel import launch
    from torch_pagoda.runtime.parallel.messages import encode

    watched: list[Watched] = []
    before: list[int] = []
    load = launch.Ranks.load

    def watching(self: launch.Ranks, message: launch.Message) -> None:
        before.extend(map(memory, self.pids))
        watched.extend(map(Watched, self.pids))
        Path(folder, "message").write_bytes(encode(message, 1))
        load(self, message)

    if full:
        layers_in_files.available_memory = lambda: 0
    launch.Ranks.load = watching  # type: ignore[method-assign]
    first, at_first = Watched(os.getpid()), memory(os.getpid())
    start = time.perf_counter()
    try:
        with LLM(folder, tensor_parallel_size=ranks, max_model_len=256, num_blocks=16) as llm:
            seconds = time.perf_counter() - start
            most = [each.close() - own for each, own in zip(watched, before, strict=True)]
            stored = llm.compile_report.stored
            streamed = llm.compile_report.layers_streamed
    finally:
        launch.Ranks.load = load  # type: ignore[method-assign]
    return {
        **{
            "stored": stored,
            "streamed": streamed,
            "seconds": seconds,
            "first": first.close() - at_first,
            "most": most,
        },
        **{"mapped_by_first": first.mapped, "mapped": max((each.mapped for each in watched), default=0)},
    }


def main() -> None:
    """Measure a first and a second start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a dense model")
    parser.add_argument(
        "--format", metavar="NAME", help="of the weights, one of tests/support/quantized_checkpoints.py"
    )
    parser.add_argument("--full", action="store_true", help="load layer by layer, as if the host's memory were full")
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON and Markdown here")
    parser.add_argument("--alone", type=int, metavar="RANK", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone is not None:
        print(json.dumps(read_alone(Path(args.measure, "message"), args.alone)))
        return
    if args.measure:
        print(json.dumps(measure(args.measure, args.ranks, args.full)))
        return
    # Imported here: a process that has loaded a model's code before the model does not start by a record.
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    from quantized_checkpoints import quantize_folder

    config: Qwen3Config | Qwen3MoeConfig = Qwen3Config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=args.layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        vocab_size=32768 if args.format else 151936,  # its rows are not quantized
    )  # fmt: skip
    if args.experts:
        config = Qwen3MoeConfig(
            hidden_size=1024, moe_intermediate_size=768, num_hidden_layers=args.layers, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=32000, tie_word_embeddings=True,
            num_experts=args.experts, num_experts_per_tok=4, decoder_sparse_step=1,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder, max_shard_size="500GB" if args.format else "500MB")
        del model
        if args.format:
            quantize_folder(Path(folder), args.format)
        sizes = [bytes_of for path in Path(folder).glob("*.safetensors") for bytes_of in tensor_bytes(path)]
        size, largest = sum(sizes), max(sizes)
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--measure", folder]
        command += ["--full"] if args.full else []
        found = [json.loads(subprocess.check_output(command).splitlines()[-1]) for _ in range(2)]
        alone = [
            json.loads(subprocess.check_output([*command, "--alone", str(rank)]).splitlines()[-1])
            for rank in range(args.ranks)
        ]
    share = size / args.ranks
    rows = [
        [
            "second" if start["stored"] else "first",
            start["seconds"],
            size / GIB,
            share / GIB,
            start["first"] / GIB,
            max(start["most"], default=0) / GIB,
            (share + 2 * largest) / GIB + 1,
            start["mapped_by_first"] / GIB,
            start["mapped"] / GIB,
        ]
        for start in found
    ]
    columns = ["start", "s", "weights, GiB", "share", "most of rank 0", "of another", "allowed"]
    reads = [
        [rank, each["share"] / GIB, each["read"] / GIB, each["read"] / each["share"]]
        for rank, each in enumerate(alone)
    ]
    table = "\n\n".join(
        (
            markdown_table([*columns, "of files, rank 0", "another"], rows),
            markdown_table(["rank", "share, GiB", "read of the files", "of its share"], reads),
        )
    )
    print(table)
    results = {"conditions": conditions(1), "starts": found, "alone": alone, "bytes": size}
    save(args.out, "load_shards", results, table)


if __name__ == "__main__":
    main()
