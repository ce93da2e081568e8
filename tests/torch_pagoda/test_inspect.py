"""``pagoda inspect`` and ``pagoda bisect``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import quantize_folder

from torch_pagoda.compiler import options
from torch_pagoda.passes import PASSES, Pass, PassRecord, TracedGraph
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes

from tiny_models import build_tiny_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def only_dynamo_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leave the passes on the ATen graph out, which take time, and append others."""

    def install(*extra: Pass) -> None:
        kept = tuple(p for p in PASSES if p.stage == "dynamo")
        monkeypatch.setattr(options, "PASSES", (*kept, *extra))

    return install


def scale_attention(traced: TracedGraph) -> PassRecord:
    for node in paged_attention_nodes(traced):
        node.args = (*node.args[:11], node.args[11] * 1.05, *node.args[12:])  # type: ignore[operator]
    return PassRecord("wrong_scale", matches=1)


def test_inspect_prints_tables_and_writes_files(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    status, out, err = run("inspect", checkpoint, "--html", page, "--json", data)
    assert status == 0, err
    assert "LlamaForCausalLM" in out and "recognize_rms_norm" in out and "pagoda.paged_attention" in out
    assert max(map(len, out.splitlines())) <= 80
    assert str(page) in err and str(data) in err
    plain = json.loads(data.read_text())
    assert plain["model"] == "LlamaForCausalLM" and plain["target_graph"]["launches_per_layer"] > 0
    assert plain["verdict"]["ok"]
    assert "<svg" in page.read_text()


def test_inspect_writes_json_to_stdout(run: Run, checkpoint: Path, only_dynamo_passes: Callable[..., None]) -> None:
    only_dynamo_passes()
    drafts = ("--speculative-config", '{"method": "mtp"}')
    given = ("--json", "-", "--verify", "off", "--skip-pass", "gather_logits", *drafts)
    status, out, _ = run("inspect", checkpoint, *given)
    assert status == 0
    assert json.loads(out)["drafts"]["kind"] == "head" and json.loads(out)["drafts"]["token_bytes"] > 0
    assert "gather_logits" not in [entry["name"] for entry in json.loads(out)["passes"]]


def test_a_quantized_model_needs_no_weights(run: Run, tmp_path: Path) -> None:
    build_tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=5).save_pretrained(tmp_path)
    quantize_folder(tmp_path, "gptq-4-g32")
    shown = []
    for _ in range(2):
        status, out, err = run("inspect", tmp_path, "-tp", "2", "--verify", "off", "--json", "-")
        assert status == 0, err
        found = json.loads(out)
        assert found["ranks"]["are_stored"]
        shown.append((found["ranks"]["weight_bytes"], found["ranks"]["rank_weight_bytes"], found["formats"]))
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
    loaded, built = shown
    assert "int4/g32" in str(loaded[2]) and built == loaded


def test_bisect_finds_nothing_wrong(run: Run, checkpoint: Path, only_dynamo_passes: Callable[..., None]) -> None:
    only_dynamo_passes()
    status, out, err = run("bisect", checkpoint, "--codegen", "none")
    assert status == 0, err
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:-1]}
    assert float(rows["recognize_sdpa"][2]) < 2e-3
    assert rows["recognize_eager_attention"] == ["recognize_eager_attention", "0"]
    assert out.splitlines()[-1].startswith("every pass is right")


@pytest.mark.parametrize("required", [False, True])
def test_bisect_names_the_first_culprit(
    run: Run, checkpoint: Path, only_dynamo_passes: Callable[..., None], required: bool
) -> None:
    only_dynamo_passes(Pass("wrong_scale", scale_attention, stage="aten", required=required))
    status, out, err = run("bisect", checkpoint, "--codegen", "none")
    assert status == 1, err
    *rows, last = out.splitlines()
    assert last.startswith("wrong_scale is the first that breaks LlamaForCausalLM: logits differ")
    assert any(row.startswith("insert_paged_cache") and "wrong" not in row for row in rows)
    assert any(row.startswith("wrong_scale") and "wrong:" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "--target", "npu", "--soc", "Ascend7"], ["soc='Ascend7'"]),
        (["inspect", "--opt-level", "9"], ["opt_level=9"]),
        (["inspect", "--verify", "off", "--layer", "9", "--html", "x.html"], ["layer=9", "2 decoder layers"]),
        (["bisect", "--skip-pass", "nope"], ["nope"]),
        (["bisect", "--target", "tpu"], ["target='tpu'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_mistakes_are_one_line_on_stderr(
    run: Run, checkpoint: Path, arguments: list[str], words: list[str], only_dynamo_passes: Callable[..., None]
) -> None:
    only_dynamo_passes()
    status, out, err = run(arguments[0], checkpoint, *arguments[1:])
    assert status == 2 and out == ""
    assert err.startswith("pagoda: error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    for command in ("inspect", "bisect"):
        status, _, err = run(command, tmp_path / "nothing")
        assert status == 2 and "does not exist" in err


def test_help_tells_about_both(run: Run) -> None:
    assert all(word in run("--help")[1] for word in ("inspect", "bisect"))
    assert "--html" in run("inspect", "--help")[1]
