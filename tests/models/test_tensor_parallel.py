"""Several ranks of one model in real processes: the tokens of transformers, and of one process in all modes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served_ranks import GREEDY, SIZES, check_ranks, prompts, tokens
from word_tokenizers import word_tokenizer

import torch_pagoda as pagoda
from torch_pagoda import SamplingParams
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.link.linker import LinkedProgram
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.load_options import LoadOptions
from torch_pagoda.passes.rewrite import shard_vocabulary
from torch_pagoda.runtime.parallel import launch
from torch_pagoda.runtime.parallel.messages import encode
from torch_pagoda.runtime.parallel.torchrun import host_id
from torch_pagoda.shipping import load_program, other_ranks

from tiny_models import build_tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-pydoc"
ARCHITECTURES = (
    *("llama", "gpt2", "falcon", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "deepseek_v32"),
    *("qwen3_5_text", "nemotron_h", "mamba", "olmo2", "mixtral", "cohere2", "bloom"),
)


def check(
    kind: str, ranks: int, folder: Path, expert_parallel_size: int | None = None, **options: Any
) -> dict[str, Any]:
    """Compare with transformers and with one process."""
    asked = {"tensor_parallel_size": ranks, "expert_parallel_size": expert_parallel_size}
    return check_ranks(kind, folder, asked, **options)


def test_two_ranks_serve_the_tokens_of_transformers(saved: Callable[[str], Path]) -> None:
    stats = check("llama", 2, saved("llama"))
    assert stats["preemptions"] and stats["prefix_hit_tokens"]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("gpt2", {}),
        ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 12}),
        ("mamba2", {"num_hidden_layers": 12}),
    ],
)
def test_ranks_that_pack_their_parts_are_compared_with_the_model(
    kind: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_vocabulary, "LEAST_PARAMETERS", 2**13)
    build_tiny_model(kind, **overrides).save_pretrained(tmp_path)
    with pagoda.LLM(tmp_path, tensor_parallel_size=2, dtype="bfloat16", **SIZES) as llm:
        assert llm.compile_report.verdict is not None
        assert llm.compile_report.verdict.ok
        assert len(tokens(llm.generate(prompts(), GREEDY))[1][0]) == GREEDY.max_tokens


def test_ranks_start_again_with_the_stored_program(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE, "")
    served = []
    for is_stored in (False, True):
        with pagoda.LLM(saved("gpt2"), tensor_parallel_size=2, **SIZES) as llm:
            assert llm.compile_report.stored is is_stored
            served.append(tokens(llm.generate(prompts(), GREEDY)))
    assert served[0] == served[1]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "count": {"enum": [1, 20]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("ahead", [False, True])
def test_two_ranks_follow_a_schema(ahead: bool) -> None:
    asked = SamplingParams(max_tokens=60, temperature=0, structured_outputs={"json": SCHEMA})
    found = []
    for ranks in (2, 1):
        sizes = {**SIZES, "num_blocks": 64, "dtype": "float32", "async_scheduling": ahead}
        with pagoda.LLM(EXAMPLE, tensor_parallel_size=ranks, **sizes) as llm:
            found.append([output.outputs[0].text for output in llm.generate(["def f", "class A"], asked)])
    assert found[0] == found[1]
    for text in found[0]:
        made = json.loads(text)
        assert set(made) == {"name", "count"} and made["count"] in (1, 20)


FOLLOW = """
import sys, types
from torch_pagoda.runtime.parallel.messages import PREFIX_BYTES, decode, lengths
from torch_pagoda.shipping import load_program

data = open(sys.argv[1], "rb").read()
start = PREFIX_BYTES + lengths(data[:PREFIX_BYTES])[0]
message = decode(data[PREFIX_BYTES:start], bytearray(data[start:]))
message.values["processors"] = []
program = load_program(message, types.SimpleNamespace(rank=1))
print(sum(given.nbytes for given in program._args if hasattr(given, "nbytes")))
print([name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name])
"""
"""A rank without the others: bytes of the tensors that its program holds, and the modeling code that it imports."""


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_other_ranks_import_no_model_class_and_hold_their_part(
    kind: str, saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sent(Exception):
        """The program is sent: enough."""

    def keep(_: launch.Ranks, message: launch.Message) -> None:
        (tmp_path / "message").write_bytes(encode(message, 1))
        raise Sent

    monkeypatch.setattr(launch.Ranks, "load", keep)
    with pytest.raises(Sent):
        pagoda.LLM(saved(kind), tensor_parallel_size=2, **SIZES)
    command = [sys.executable, "-c", FOLLOW, str(tmp_path / "message")]
    held, imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert imported in ("[]", "['transformers.models.auto.modeling_auto']")
    model = build_tiny_model(kind)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert int(held) <= sum(p.nbytes for p in model.parameters()) - experts / 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures(kind: str, ranks: int, saved: Callable[[str], Path], several_processors: None) -> None:
    check(kind, ranks, saved(kind))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_experts_in_groups(
    kind: str, ranks: int, groups: int, saved: Callable[[str], Path], several_processors: None
) -> None:
    check(kind, ranks, saved(kind), expert_parallel_size=groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"kv_cache_dtype": "int8"},
        {"preemption": "swap", "swap_space": "1MiB", "async_scheduling": True},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_modes(options: dict[str, Any], saved: Callable[[str], Path]) -> None:
    check("qwen3_moe", 2, saved("qwen3_moe"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_grammar_holds_the_output_of_ranks(ranks: int, tmp_path: Path, several_processors: None) -> None:
    build_tiny_model("llama", vocab_size=640).save_pretrained(tmp_path)
    word_tokenizer("byte-level").save_pretrained(tmp_path)
    held = SamplingParams(max_tokens=24, temperature=1.0, seed=3, structured_outputs={"regex": "(ab|cd){3,6}z"})
    found = []
    for size in (1, ranks):
        with pagoda.LLM(tmp_path, tensor_parallel_size=size, **SIZES) as llm:
            outputs = llm.generate([[9, 8, 7], [5, 6, 7, 8]], held)
            found.append([output.outputs[0].text for output in outputs])
    assert found[0] == found[1]
    assert [text for text in found[1] if not re.fullmatch("(ab|cd){3,6}z", text)] == []


HASHED = """
import hashlib
from pathlib import Path
import torch
from torch_pagoda.compiler.link.linker import LinkedProgram
from torch_pagoda import rank

step = LinkedProgram.__call__

def hashed(self, *arguments):
    logits = step(self, *arguments)
    if self.group is not None:
        with open(Path(folder, f"rank {self.group.rank}"), "a") as file:
            file.write(hashlib.sha256(logits.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
            file.write("\\n")
    return logits

LinkedProgram.__call__ = hashed
"""
"""Lets a process note a digest of each step's logits in ``folder``."""
RANK = f"import sys\nfolder = sys.argv.pop(1)\n{HASHED}\nsys.exit(rank.main(sys.argv[1:], rank.loader))"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_all_ranks_have_the_same_bits_over_1000_steps(
    kind: str, saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several_processors: None
) -> None:
    monkeypatch.setitem(launch.Ranks.__init__.__kwdefaults__, "command", [sys.executable, "-c", RANK, str(tmp_path)])
    monkeypatch.setattr(LinkedProgram, "__call__", LinkedProgram.__call__)  # to be as it was afterwards
    exec(HASHED, {"folder": tmp_path})
    sizes = {**SIZES, "num_blocks": 400, "max_num_batched_tokens": 64}
    with pagoda.LLM(saved(kind), tensor_parallel_size=4, dtype="bfloat16", **sizes) as llm:
        long = SamplingParams(max_tokens=350, temperature=1.0, seed=7, ignore_eos=True)
        for turn in range(3):
            llm.generate([[turn + 3, *prompt] for prompt in prompts()[:4]], long)
    noted = [(tmp_path / f"rank {rank}").read_text().splitlines() for rank in range(4)]
    assert len(noted[0]) > 1000
    assert noted[1:] == noted[:1] * 3


class LonelyGroup:
    rank = 0


# What is refused before anything is loaded


def refused(model: Any, size: int, device: str = "cpu", **options: Any) -> str:
    compiling = CompileOptions(tensor_parallel_size=size, **options)
    with pytest.raises(ValueError) as raised:
        other_ranks(model, LoadOptions(), compiling, torch.device(device))
    return str(raised.value)


def test_a_live_module_is_refused() -> None:
    assert refused(torch.nn.Identity(), 2) == (
        "tensor_parallel_size=2: every rank reads the checkpoint, and a live module has none; pass its folder"
    )


def test_more_ranks_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert "tensor_parallel_size=3 is more than the 2 processors" in refused("folder", 3)


def test_more_ranks_than_npus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "npu", SimpleNamespace(device_count=lambda: 1, is_available=lambda: False), raising=False
    )
    npu: Any = SimpleNamespace(type="npu")
    with pytest.raises(ValueError) as raised:
        other_ranks("folder", LoadOptions(), CompileOptions(tensor_parallel_size=2), npu)
    assert str(raised.value) == (
        "tensor_parallel_size=2: 2 ranks on this host need a device each, and it has 1; lower it, or name more in "
        "ASCEND_RT_VISIBLE_DEVICES"
    )


def test_restarts_on_npus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "npu", SimpleNamespace(device_count=lambda: 2, is_available=lambda: False), raising=False
    )
    npu: Any = SimpleNamespace(type="npu")
    with pytest.raises(ValueError, match="worker_restarts=1 is for CPUs"):
        other_ranks("folder", LoadOptions(worker_restarts=1), CompileOptions(tensor_parallel_size=2), npu)


def test_files_that_have_changed_are_refused(saved: Callable[[str], Path]) -> None:
    from torch_pagoda.compiler.warm_start.file import to_bytes
    from torch_pagoda.compiler.warm_start.record import Sources
    from torch_pagoda.compiler.warm_start.shipment import Shipment

    program: Any = ()
    shipment = torch.frombuffer(bytearray(to_bytes(Shipment(program, Sources({}, {}, {}), True))), dtype=torch.uint8)
    values = {"model": str(saved("llama")), "dtype": "auto", "trust_remote_code": False, "files": [[0, 0, 0, 0]]}
    values |= {"processors": [sorted(os.sched_getaffinity(0))], "host": host_id()}
    group = LonelyGroup()
    with pytest.raises(ValueError, match="are not those that rank 0 reads; copy them, or start again"):
        load_program(launch.Message("load", values, {"program": shipment}), group)  # type: ignore[arg-type]


def test_a_checkpoint_that_another_host_has_not_got_is_named(tmp_path: Path) -> None:
    values = {"model": str(tmp_path / "absent"), "processors": []}
    with pytest.raises(ValueError, match=f"absent' is not on host {re.escape(socket.gethostname())}; give all hosts"):
        load_program(launch.Message("load", values), LonelyGroup())  # type: ignore[arg-type]
