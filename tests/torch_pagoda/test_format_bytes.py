"""``pagoda plan`` and ``pagoda inspect`` know the formats of quantized checkpoints, and their bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import quantize_folder
from safetensors.torch import load_file

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.configs import load_config
from torch_pagoda.checkpoint.format_bytes import formats_of_files, served_change
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from legal_models import build_legal_model
from tiny_models import build_tiny_model

Run = Callable[..., tuple[int, str, str]]

CASES = {
    "ct-w4a16": ("int4/g32/bf16", "as stored"),
    "gptq-4-order": ("int4/g32/f16+z+order", "as stored"),
    "ct-mxfp4": ("e2m1/g32/bf16", "as stored"),
    "fp8-uneven": ("e4m3/g24/f32", "unpacked"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build_tiny_model("llama", hidden_size=128, intermediate_size=256).save_pretrained(made[name])
            quantize_folder(made[name], name)
        return made[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_program(folders: Callable[[str], Path], name: str) -> None:
    folder = folders(name)
    _, config = load_config(folder, False)
    formats = formats_of_files(str(folder), config, torch.float32)
    assert formats is not None
    form, served = CASES[name]
    of_linears = [one for one in formats if one.served != "float"]
    assert [(one.layer, one.form, one.served, one.weights) for one in of_linears] == [
        (layer, form, served, 7) for layer in range(2)
    ]
    stored = sum(t.nbytes for key, t in load_file(folder / "model.safetensors").items() if "_shape" not in key)
    counted = sum(one.stored_bytes for one in formats)
    # Zeros of 4 bits and powers of two take more here, and scales of blocks are those of rows.
    assert stored == counted if name == "ct-w4a16" else 0.9 * stored <= counted <= 1.15 * stored
    llm = pagoda.LLM(folder, dtype="float32", block_size=4, num_blocks=16)
    linkage = llm.program.linkage
    given = dict(zip(linkage.inputs, llm.program._args, strict=True))
    weights = [given[entry.name] for entry in linkage.packed if entry.stored]
    weights += [given[key] for key in linkage.inputs if key.startswith("order_")]
    if served != "unpacked":
        held = sum(t.nbytes for t in weights)
        expected = sum(one.served_bytes for one in of_linears)
        # q, k and v share panels and an order, gate and up too: here k and v alone fill half a panel each.
        assert 0 <= expected - held <= 0.08 * expected, (expected, held)


@pytest.mark.parametrize(("name", "served"), [("ct-w4a16", "as stored"), ("ct-mxfp4", "unpacked")])
def test_an_npu_multiplies_whole_numbers_as_they_are_stored(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, name: str, served: str
) -> None:
    file = tmp_path / "report.json"
    options = ("--target", "npu", "--verify", "off", "--dtype", "bfloat16", "--no-torchair", "--json", file)
    status, _, err = run("inspect", folders(name), *options)
    assert status == 0, err
    formats = [one for one in json.loads(file.read_text())["formats"] if one["served"] != "float"]
    assert {one["served"] for one in formats} == {served} and sum(one["weights"] for one in formats) == 14


@pytest.mark.parametrize(("name", "served"), [("ct-w4a16", "as stored"), ("ct-w8a8-g32", "unpacked")])
def test_so_it_does_with_experts(run: Run, tmp_path: Path, name: str, served: str) -> None:
    build_legal_model("qwen3_moe", dtype=torch.bfloat16, moe_intermediate_size=64).save_pretrained(tmp_path)
    quantize_folder(tmp_path, name)
    file = tmp_path / "report.json"
    status, _, err = run("inspect", tmp_path, "--target", "npu", "--verify", "off", "--no-torchair", "--json", file)
    assert status == 0, err
    said = json.loads(file.read_text())
    (experts,) = (entry for entry in said["passes"] if entry["name"] == "quantize_npu_experts")
    assert experts["matches"] == (4 if served == "as stored" else 0)
    counts = Counter[str]()
    for one in said["formats"]:
        counts[one["served"]] += one["weights"]
    # Of each of two layers q, k, v and o, and what its experts are fused to.
    assert counts[served] == (12 if served == "as stored" else 4) and counts["as stored"] >= 8, counts


def test_plan_counts_what_is_served(run: Run, folders: Callable[[str], Path]) -> None:
    floats = Path(folders("ct-w4a16")).parent / "floats"
    build_tiny_model("llama", hidden_size=128, intermediate_size=256).save_pretrained(floats)
    options = ("--memory", "64MiB", "--max-num-seqs", 4, "--max-num-batched-tokens", 32)
    said = {}
    for name, folder in (("float", floats), ("ct-w4a16", folders("ct-w4a16")), ("fp8", folders("fp8-uneven"))):
        status, out, err = run("plan", folder, *options, "--json")
        assert status == 0, err
        said[name] = json.loads(out)
    assert said["float"]["formats"] is None
    assert said["fp8"]["weight_bytes"] == said["float"]["weight_bytes"]
    change = said["ct-w4a16"]["weight_bytes"] - said["float"]["weight_bytes"]
    assert change < 0 and change == sum(f["served_bytes"] - f["float_bytes"] for f in said["ct-w4a16"]["formats"])
    assert {f["form"] for f in said["ct-w4a16"]["formats"]} >= {"int4/g32/bf16"}
    on_npu = run("plan", folders("ct-mxfp4"), *options, "--target", "npu", "--json")
    assert on_npu[0] == 0, on_npu[2]
    served = {one["served"] for one in json.loads(on_npu[1])["formats"]}
    assert served == {"float", "unpacked"}, "no operator of Ascend reads them"
    status, out, err = run("plan", folders("ct-w4a16"), *options)
    assert status == 0 and "0-1" in out and "int4/g32/bf16" in out, err


def test_plan_needs_the_weights_that_alone_tell_their_formats(
    run: Run, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in folders("slim-w8a16").glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    status, _, err = run("plan", tmp_path)
    assert status == 2 and "only its weights tell their formats; download them" in err and err.count("\n") == 1


def test_inspect_shows_formats(run: Run, folders: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    status, out, err = run("inspect", folders("ct-w4a16"), "--verify", "off", "--json", file)
    assert status == 0, err
    assert "int4/g32/bf16" in out and "as stored" in out
    formats = json.loads(file.read_text())["formats"]
    assert sum(one["weights"] for one in formats if one["served"] == "as stored") == 14


def test_a_head_beside_embeddings_that_are_tied_counts_for_itself(folders: Callable[[str], Path]) -> None:
    _, config = load_config(folders("ct-w4a16"), False)
    config.tie_word_embeddings = True
    formats = formats_of_files(str(folders("ct-w4a16")), config, torch.float32)
    assert formats is not None
    outside = [one for one in formats if one.layer is None]
    head = load_file(folders("ct-w4a16") / "model.safetensors")["lm_head.weight"]
    assert served_change(outside) == head.nbytes
    assert not any(isinstance(one, StoredWeight) for one in outside)
