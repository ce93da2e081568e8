"""``pagoda plan``, and how a profile looks on a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mtp_checkpoints import make_head
from rich.console import Console

from torch_pagoda.cli.profile_table import profile_table
from torch_pagoda.compiler import UnsupportedModel
from torch_pagoda.compiler.costs import requirements as requirements_module
from torch_pagoda.compiler.costs.requirements import Requirements, requirements
from torch_pagoda.runtime.engine.engine_options import DEFAULT_BLOCK_SIZE
from torch_pagoda.runtime.profiling.profiler import Profiler
from torch_pagoda.runtime.requests.outputs import RequestMetrics

from tiny_models import build_tiny_model

Run = Callable[..., tuple[int, str, str]]

LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny llama's config.json and nothing else."""
    folder = tmp_path_factory.mktemp("config")
    build_tiny_model("llama").config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def known() -> dict[str, Requirements]:
    return {}


@pytest.fixture(autouse=True)
def look_at_each_model_once(monkeypatch: pytest.MonkeyPatch, known: dict[str, Requirements]) -> None:
    """Finding out what a model needs is nearly all of the command's time."""

    def once(kind: Any, config: Any, dtype: Any, options: Any) -> Requirements:
        key = f"{kind} {config} {dtype} {options}"
        if key not in known:
            known[key] = requirements(kind, config, dtype, options)
        return known[key]

    monkeypatch.setattr(requirements_module, "requirements", once)


def test_the_memory_of_each_rank(run: Run, config_only: Path) -> None:
    plans = []
    for ranks in ("1", "2"):
        status, out, err = run("plan", config_only, "--memory", "8MiB", "-tp", ranks, "--json", *LIMITS)
        assert status == 0, err
        plans.append(json.loads(out))
    whole, part = plans
    assert (whole["tensor_parallel_size"], part["tensor_parallel_size"]) == (1, 2)
    assert part["token_bytes"] * 2 == whole["token_bytes"]
    assert whole["weight_bytes"] / 2 < part["weight_bytes"] < whole["weight_bytes"]
    assert part["num_blocks"] > whole["num_blocks"] and part["parameters"] == whole["parameters"]
    _, out, _ = run("plan", config_only, "--memory", "8MiB", "-tp", "2", *LIMITS)
    assert "on each of 2 ranks" in out


def test_weights_of_a_quantized_configuration(run: Run, config_only: Path, tmp_path: Path) -> None:
    config = json.loads((config_only / "config.json").read_text())
    method = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    plans = []
    for folder in (config_only, tmp_path):
        status, out, err = run("plan", folder, "--memory", "8MiB", "--json", *LIMITS)
        assert status == 0, err
        plans.append(json.loads(out))
    floats, codes = plans
    quantized = [one for one in codes["formats"] if one["form"] == "int4/g32/f16+z"]
    assert floats["formats"] is None and sum(one["weights"] for one in quantized) == 7 * config["num_hidden_layers"]
    saved = sum(one["float_bytes"] - one["served_bytes"] for one in quantized)
    assert saved > 0 and floats["weight_bytes"] - codes["weight_bytes"] == saved


def test_tables_for_a_configuration_without_weights(run: Run, config_only: Path) -> None:
    assert [file.name for file in config_only.iterdir()] == ["config.json"]
    status, out, err = run("plan", config_only, "--memory", "8MiB", "--mean-length", "40", *LIMITS)
    assert status == 0, err
    assert out.startswith("LlamaForCausalLM in ")
    for words in ("weights", "activations, 64 tokens, estimated", "KV cache", "paged", "contiguous", "cheapest"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_holds_what_the_table_shows(run: Run, config_only: Path) -> None:
    status, out, _ = run("plan", config_only, "--memory", "8MiB", *LIMITS, "--json")
    plain = json.loads(out)
    model = build_tiny_model("llama")
    config = model.config
    assert status == 0
    assert plain["parameters"] == sum(p.numel() for p in model.parameters())
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    assert plain["token_bytes"] == config.num_hidden_layers * 2 * kv_heads * head_dim * 4
    assert plain["memory"] == 8 * 2**20
    assert plain["cache_bytes"] == plain["memory"] - plain["weight_bytes"] - plain["activation_bytes"]
    assert plain["num_blocks"] == plain["cache_bytes"] // (DEFAULT_BLOCK_SIZE * plain["token_bytes"])
    assert plain["limits"][-1]["tokens"] == plain["max_model_len"] == config.max_position_embeddings
    assert plain["limits"][0]["running"] == min(8, plain["limits"][0]["paged"])
    int8 = json.loads(run("plan", config_only, "--memory", "8MiB", "--kv-cache-dtype", "int8", *LIMITS, "--json")[1])
    assert int8["token_bytes"] == config.num_hidden_layers * 2 * kv_heads * (head_dim + 4)


def test_a_memory_that_is_too_small_is_told(run: Run, config_only: Path) -> None:
    status, out, err = run("plan", config_only, "--memory", "100KiB", *LIMITS)
    assert status == 1 and err == ""
    assert "It does not fit" in out and "KiB more" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "lots"], ["memory='lots'"]),
        (["--kv-cache-dtype", "int4"], ["kv_cache_dtype='int4'"]),
        (["--dtype", "int4"], ["dtype='int4'"]),
        (["--target", "tpu"], ["target='tpu'"]),
        (["--block-size", "0"], ["block_size=0"]),
        (["--max-num-seqs", "0"], ["max_num_seqs=0"]),
        (["--max-model-len", "100000"], ["max_model_len=100000", "lower it"]),
        (["--mean-length", "-3"], ["mean=-3"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_one_line_on_stderr(run: Run, config_only: Path, arguments: list[str], words: list[str]) -> None:
    status, out, err = run("plan", config_only, *arguments)
    assert status == 2 and out == ""
    assert err.startswith("pagoda: error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_a_model_that_is_not_there_and_one_that_cannot_be_served(
    run: Run, config_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run("plan", tmp_path / "nothing")
    assert status == 2 and "does not exist" in err

    def refuse(*_: object) -> None:
        raise UnsupportedModel("it has no attention\nthat a pass recognizes")

    monkeypatch.setattr(requirements_module, "requirements", refuse)
    status, out, err = run("plan", config_only)
    assert (status, out) == (2, "")
    assert err == "pagoda: error: it has no attention that a pass recognizes\n"


def test_help_tells_about_it(run: Run) -> None:
    assert "plan" in run("--help")[1]
    assert "--memory" in run("plan", "--help")[1]


def test_a_profile_as_tables() -> None:
    now = iter(range(100))
    profiler = Profiler(clock=lambda: float(next(now)))
    for _ in range(2):
        profiler.begin_step()
        profiler.mark("schedule")
        profiler.mark("model")
        profiler.end_step(num_prefill_tokens=12, num_decode_tokens=0, sampled=["a"])
    profiler.span("detokenize", 1.0, 2.0)
    profiler.end_request("a", RequestMetrics(0.0, 1.0, 3.0, 7.0, 2))
    sheet = io.StringIO()
    Console(file=sheet, width=80).print(profile_table(profiler.result()))
    rows = {line.split()[0]: line.split() for line in sheet.getvalue().splitlines() if line.strip()}
    assert rows["prefill"] == ["prefill", "2", "6.000", "100.0", "%", "24", "0", "3000.00"]
    assert rows["schedule"] == ["schedule", "2.000", "33.3", "%", "1000000.0"]
    assert rows["ttft"] == ["ttft", "1", "3000.00", "3000.00", "3000.00", "3000.00", "3000.00"]
    assert rows["itl"][1:3] == ["1", "4000.00"]
    assert "detokenize," in rows
    assert "4.0 tok/s in, 0.3 tok/s out" in sheet.getvalue()
    assert max(map(len, sheet.getvalue().splitlines())) <= 80


def test_the_memory_of_the_fullest_stage(run: Run, config_only: Path) -> None:
    status, out, err = run("plan", config_only, "--memory", "8MiB", "-pp", "2", "--json", *LIMITS)
    assert status == 0, err
    part = json.loads(out)
    first, last = part["stages"]["stages"]
    assert (first["layers"], last["layers"]) == ([0, 0], [1, 1])
    assert part["weight_bytes"] == max(first["weight_bytes"], last["weight_bytes"])
    assert part["token_bytes"] == first["token_bytes"] == last["token_bytes"]
    _, out, _ = run("plan", config_only, "--memory", "8MiB", "-pp", "2", *LIMITS)
    assert "of 2 (layers" in out


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_what_drafts_is_counted(run: Run, config_only: Path, method: str) -> None:
    config = {"method": method} | ({"model": str(config_only)} if method == "draft_model" else {})
    plans = []
    for added in ([], ["--speculative-config", json.dumps(config)]):
        status, out, err = run("plan", config_only, "--memory", "8MiB", "--json", *LIMITS, *added)
        assert status == 0, err
        plans.append(json.loads(out))
    plain, found = plans
    drafts = found["drafts"]
    assert plain["drafts"] is None
    assert found["weight_bytes"] == plain["weight_bytes"] + drafts["weight_bytes"]
    assert found["token_bytes"] == plain["token_bytes"] + drafts["token_bytes"]
    if method == "draft_model":
        assert (drafts["weight_bytes"], drafts["token_bytes"]) == (plain["weight_bytes"], plain["token_bytes"])
    else:
        size = build_tiny_model("llama").config.hidden_size
        layer = make_head(build_tiny_model("llama")).layers
        assert drafts["parameters"] == sum(weight.numel() for weight in layer.parameters())
        assert drafts["weight_bytes"] == 4 * drafts["parameters"]
        assert drafts["token_bytes"] == plain["token_bytes"] // 2 + 4 * size, "two layers, and a hidden row"


def test_a_head_that_cannot_be_is_refused(run: Run, config_only: Path) -> None:
    config = json.dumps({"method": "mtp"})
    status, _, err = run("plan", config_only, "-tp", "2", "--memory", "8MiB", "--speculative-config", config)
    assert status == 2 and "method 'mtp' runs in one process, not in 2" in err
    status, _, err = run("plan", config_only, "--speculative-config", "{")
    assert status == 2 and "--speculative-config is not JSON" in err
