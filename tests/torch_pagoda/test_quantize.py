"""``pagoda quantize``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

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
        (["--tokens", 8], "--tokens 8 is less than --window 512"),
        (["--window", 1, "--tokens", 1], "--window 1 is too short"),
        (["--window", 4096], "tokens and a window takes 4096; give more text"),
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
