"""``pagoda quantize``."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from torch_pagoda.checkpoint.compressed_writer import check_writable, write_compressed
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.calibrate import calibrate
from torch_pagoda.compiler.calibrate.grid import GridWeight
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense

from tiny_models import build_tiny_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    file = tmp_path / "sample.txt"
    file.write_text("the cat sat on the mat\na list of names is returned\n" * 20, encoding="utf-8")
    return file


def test_it_writes_a_checkpoint_on_the_grid(run: Run, checkpoint: Path, sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, printed, err = run("quantize", checkpoint, out, "--text", sample, "--group-size", 64, "--window", 16)
    assert status == 0 and printed == "", err
    assert "14 matrices on " in err and "--quantization int4" in err
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (checkpoint, out))
    assert before.dtype == after.dtype
    weight = after.model.layers[0].mlp.up_proj.weight
    assert weight.shape[1] == 64 and all(len(row.unique()) <= 16 for row in weight)
    assert not torch.equal(before.model.layers[0].mlp.up_proj.weight, weight)
    assert torch.equal(before.model.embed_tokens.weight, after.model.embed_tokens.weight)
    assert after.config.pagoda_grid == {"bits": 4, "group_size": 64}
    asked = ("generate", out, "--prompt", "the cat", "--quantization", "int4", "--max-tokens", 4)
    status, printed, err = run(*asked)
    assert status == 0, err
    status, _, err = run(*asked, "--group-size", 128)
    assert status == 2 and "group_size=128 was given, but the weights lie on a 4-bit grid with group_size=64" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group-size", 96], "group_size=96 is not supported; use a multiple of 64"),
        (["--tokens", 8], "--tokens 8 is below --window 512"),
        (["--window", 1, "--tokens", 1], "--window 1 is too short"),
        (["--window", 4096], "tokens, fewer than --window 4096; add text"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    run: Run, checkpoint: Path, sample: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    status, _, err = run("quantize", checkpoint, tmp_path / "out", "--text", sample, *arguments)
    assert status == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(run: Run, checkpoint: Path, sample: Path) -> None:
    status, _, err = run("quantize", checkpoint, checkpoint, "--text", sample)
    assert status == 2 and "is not an empty folder" in err


def test_text_that_says_nothing(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for file, message in ((empty, "is empty"), (binary, "is not UTF-8 text"), (tmp_path / "none", "No such file")):
        status, _, err = run("quantize", checkpoint, tmp_path / "out", "--text", file)
        assert status == 2 and message in err


def test_it_writes_compressed_tensors(run: Run, checkpoint: Path, sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--group-size", 0, "--window", 16, "--format", "compressed-tensors")
    status, printed, err = run("quantize", checkpoint, out, "--text", sample, *options)
    assert status == 0 and printed == "" and "load it as it is" in err, err
    tensors = load_file(out / "model.safetensors")
    leaf = "model.layers.0.mlp.up_proj.weight"
    assert tensors[f"{leaf}_packed"].dtype is torch.int32 and leaf not in tensors
    config = json.loads((out / "config.json").read_text())
    assert {"lm_head", "model.embed_tokens"} <= set(config["quantization_config"]["ignore"])
    assert "pagoda_grid" not in config
    model = load_model(out, "auto", False, torch.device("cpu"))
    stored = {name: p for name, p in model.named_parameters() if isinstance(p, StoredWeight)}
    assert len(stored) == 14 and {str(p.form) for p in stored.values()} == {"int4/row/f32"}
    for name, weight in stored.items():
        whole = _whole_numbers(tensors[f"{name}_packed"], weight.shape[1])
        assert torch.equal(weight.dense(), (whole * tensors[f"{name}_scale"].float()).to(weight.dtype))
    status, printed, err = run("generate", out, "--prompt", "the cat", "--max-tokens", 4)
    assert status == 0, err
    status, _, err = run("quantize", out, tmp_path / "again", "--text", sample)
    assert status == 2 and "is quantized (compressed-tensors" in err and err.count("\n") == 1


def _whole_numbers(words: torch.Tensor, inputs: int) -> torch.Tensor:
    """Numbers of 4 bits, in eights, of int32 words."""
    shifted = words.long()[..., None] >> 4 * torch.arange(8)
    return (shifted & 15).flatten(-2)[:, :inputs].float() - 8


def test_what_compressed_tensors_does_not_store_is_refused(
    run: Run, checkpoint: Path, sample: Path, tmp_path: Path
) -> None:
    form = ("--format", "compressed-tensors")
    status, _, err = run("quantize", checkpoint, tmp_path / "out", "--text", sample, "--format", "gguf")
    assert status == 2 and "'gguf' is not supported; use compressed-tensors" in err
    status, _, err = run("quantize", checkpoint, tmp_path / "out", "--text", sample, "--window", 16, *form)
    assert status == 2 and "64 inputs, which are not a multiple of --group-size 128" in err
    build_tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"stores only Linear weights, but .* is a Conv1D"):
        check_writable(AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2"), 0)
    with pytest.raises(ValueError, match="stores only Linear weights"):
        check_writable(build_tiny_model("mixtral"), 0)


def test_groups_and_shards_of_compressed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are of the model's dtype, and the shards' index names what is in them."""
    model = build_tiny_model("llama", num_hidden_layers=1, hidden_size=128, intermediate_size=192)
    model = model.to(torch.bfloat16)
    windows = torch.randint(3, 100, (8, 32), generator=torch.Generator().manual_seed(0))
    weights: dict[str, GridWeight] = {}
    calibrate(model, windows, 64, on_matrix=weights.__setitem__)
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(model, "save_pretrained", partial(model.save_pretrained, max_shard_size="64KB"))
    write_compressed(model, tmp_path / "out", weights)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    loaded = dict(load_model(tmp_path / "out", "auto", False, torch.device("cpu")).named_parameters())
    stored = [p for p in loaded.values() if isinstance(p, StoredWeight)]
    assert len(stored) == 7 and {p.form.num_groups(p.shape[1]) * 64 for p in stored} == {64, 128, 192}
    assert all(p.form.num_groups(p.shape[1]) * 64 == p.shape[1] for p in stored)
    assert all(torch.equal(as_dense(loaded[name]), value) for name, value in dense.items())
