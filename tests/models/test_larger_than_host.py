"""Models that do not fit into a host's memory: few layers are loaded, the whole is run layer by layer, and real ranks
are compared with its logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streamed_models
import torch
from quantized_checkpoints import quantize_folder, write_means
from served_ranks import GREEDY, SIZES, prompts, tokens
from streamed_models import DEEP
from transformers import AutoModelForCausalLM

import torch_pagoda as pagoda
from torch_pagoda.checkpoint import layers_in_files
from torch_pagoda.compiler import CompileReport, UnsupportedModel
from torch_pagoda.compiler.capture import layer_repeat
from torch_pagoda.compiler.capture.layer_repeat import LayerRepeat
from torch_pagoda.compiler.ranks import by_layers
from torch_pagoda.compiler.warm_start import streamed
from torch_pagoda.compiler.warm_start.file import DISABLE, ProgramStore
from torch_pagoda.compiler.warm_start.record import Sources
from torch_pagoda.compiler.warm_start.shipment import Shipment
from torch_pagoda.shipping import ShippingRanks

from hf_reference import greedy_without_cache
from tiny_models import build_tiny_model

Folders = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits that is not mapped; one layer is worth to be spared, and small weights are not loaded either."""
    monkeypatch.setattr(layers_in_files, "available_memory", lambda: 0)
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)
    monkeypatch.setattr(streamed, "_MOST_BYTES", 256)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """Folders of tiny checkpoints in bfloat16, which a model in float32 is made of."""
    made: dict[str, Path] = {}

    def get(kind: str, **settings: Any) -> Path:
        key = f"{kind} {settings}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            build_tiny_model(kind, **(DEEP[kind] | settings)).bfloat16().save_pretrained(made[key])
        return made[key]

    yield get


def served(folder: Path, **options: Any) -> tuple[list[Any], CompileReport]:
    with pagoda.LLM(folder, **{**SIZES, "dtype": "float32", **options}) as llm:
        return tokens(llm.generate(prompts(), GREEDY)), llm.compile_report


def check(folder: Path, dense: Path | None = None, **options: Any) -> None:
    found, report = served(folder, **options)
    assert report.layers_streamed and report.verdict is not None and report.verdict.ok
    model = AutoModelForCausalLM.from_pretrained(dense or folder, dtype=torch.float32)
    assert found == [[greedy_without_cache(model, prompt, GREEDY.max_tokens).tokens] for prompt in prompts()]


def test_ranks_serve_the_tokens_of_transformers(halves: Folders) -> None:
    check(halves("qwen3_moe"), tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(DEEP.keys() - {"qwen3_moe"}))
def test_architectures(kind: str, halves: Folders) -> None:
    check(halves(kind), tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_stages(kind: str, halves: Folders) -> None:
    check(halves(kind), pipeline_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form"),
    [("llama", "gptq-4-order"), ("qwen3_moe", "fp8-blocks"), ("qwen3_moe", "awq"), ("gpt_oss", "mxfp4-experts")],
)
def test_quantized_weights(kind: str, form: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "dense"):
        build_tiny_model(kind, **DEEP[kind]).save_pretrained(folder)
    write_means(tmp_path / "dense", quantize_folder(tmp_path, form))
    check(tmp_path, tmp_path / "dense", tensor_parallel_size=2)


@pytest.mark.slow
def test_logits_are_kept_for_other_options(halves: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DISABLE, "")
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path))
    folder, streams = halves("llama"), []

    def counted(*given: Any) -> Any:
        streams.append(given)
        return streamed.stream(*given)

    monkeypatch.setattr(by_layers, "stream", counted)
    check(folder, tensor_parallel_size=2)
    check(folder, pipeline_parallel_size=2)
    assert len(streams) == 1
    (kept,) = (tmp_path / "programs").glob("logits-*")
    store = ProgramStore(tmp_path / "programs")
    found = store.load(kept.stem, streamed.StreamedModel)
    assert found is not None
    wrong = [rows.flip(0) for rows in found.reference.logits]
    store.save(kept.stem, replace(found, reference=replace(found.reference, logits=wrong)))
    with pytest.raises(UnsupportedModel, match="the ranks together do not compute what the model does"):
        served(folder, tensor_parallel_size=2, block_size=8)
    assert not kept.exists(), "they are not taken again"


def exchange(sources: Sources, first: int, second: int) -> Sources:
    """Let two layers have each other's weights."""
    names = {f"model.layers.{a}.": f"model.layers.{b}." for a, b in ((first, second), (second, first))}

    def other(name: str) -> str:
        own = next((layer for layer in names if name.startswith(layer)), None)
        return name if own is None else names[own] + name.removeprefix(own)

    return replace(sources, weights={name: sources.weights[other(name)] for name in sources.weights})


def in_the_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ShippingRanks.load

    def wrong(self: ShippingRanks, shipment: Shipment) -> None:
        assert shipment.sources is not None
        load(self, replace(shipment, sources=exchange(shipment.sources, 5, 6)))

    monkeypatch.setattr(ShippingRanks, "load", wrong)


def in_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> Any:
        found = streamed.stream(*given)
        return replace(found, sources=exchange(found.sources, 5, 6))

    monkeypatch.setattr(by_layers, "stream", wrong)


def skipped_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits without one of the layers."""
    run = streamed.streamed_reference

    def wrong(layers: Any, seen: Any) -> Any:
        layer = layers.repeat.model.model.layers[5]
        layer.forward = lambda hidden, **_: hidden
        try:
            return run(layers, seen)
        finally:
            del layer.forward

    monkeypatch.setattr(streamed, "streamed_reference", wrong)


def skipped_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has one layer less."""
    unroll = LayerRepeat.unroll
    monkeypatch.setattr(LayerRepeat, "unroll", lambda self, traced: unroll(replace(self, total=6), traced))


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (in_the_other_rank, "the ranks together do not compute what the model does"),
        *(
            pytest.param(mistake, reason, marks=pytest.mark.slow)
            for mistake, reason in (
                (in_all_ranks, "the ranks together do not compute what the model does"),
                (skipped_in_the_run, "the ranks together do not compute what the model does"),
                (skipped_in_the_program, "model.layers.6 does not read its weights in the order of model.layers.3"),
            )
        ),
    ],
)
def test_mistakes_are_refused(
    mistake: Callable[[pytest.MonkeyPatch], None], reason: str, halves: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(UnsupportedModel, match=reason):
        served(halves("llama", num_hidden_layers=7), tensor_parallel_size=2)


WRITE = """
import sys
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

config = Qwen3MoeConfig(
    hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4,
    head_dim=64, vocab_size=4096, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[1], max_shard_size="128MB")
"""
STREAM = """
import hashlib, json, re, sys
from pathlib import Path
import torch
from streamed_models import loaded_in_part
from torch_pagoda.checkpoint import layers_in_files
from torch_pagoda.compiler.verify.self_check import SHORT_SCHEDULE, reference_of_model
from torch_pagoda.compiler.warm_start.streamed import place_forms, stream
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

folder, whole = Path(sys.argv[1]), sys.argv[2] == "whole"
layers_in_files.available_memory = lambda: 0
before = memory("VmRSS")
if whole:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    logits = reference_of_model(model, SHORT_SCHEDULE).logits[0]
    layer = 0
else:
    layers, files = loaded_in_part(folder, "auto")
    kept = stream(layers, files)
    logits = kept.reference.logits[0].float()
    place_forms(layers, kept.sources, files)
    layer = layers.repeat.kept
digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
print(json.dumps({"growth": memory("VmHWM") - before, "kept": layer, "logits": digest}))
"""


@pytest.mark.slow
def test_memory_is_that_of_few_layers(tmp_path: Path) -> None:
    """1.04 GiB of weights in shards, of which 4 of 36 layers are kept and one more is loaded at a time."""

    def run(script: str, *given: str) -> str:
        path = os.pathsep.join([str(Path(streamed_models.__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", script, str(tmp_path), *given]
        return subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
        ).stdout

    run(WRITE)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 2**30
    found, whole = (json.loads(run(STREAM, how).splitlines()[-1]) for how in ("layers", "whole"))
    assert found["logits"] == whole["logits"]
    assert whole["growth"] > size
    assert found["kept"] == 4
    assert found["growth"] < size / 2
