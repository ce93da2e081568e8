"""The grid that ``pagoda quantize`` leaves in a checkpoint's config, and what loading makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_pagoda as pagoda
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.calibrate import calibrate
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization

from tiny_models import build_tiny_model


class Compiled(Exception):
    """Raised in place of compiling, with the options that were to be compiled with."""

    def __init__(self, options: CompileOptions) -> None:
        self.options = options


@pytest.fixture(scope="module")
def calibrated() -> PreTrainedModel:
    """A model on a grid with groups of 64."""
    model = build_tiny_model("llama")
    calibrate(model, torch.randint(3, 250, (8, 16), generator=torch.Generator().manual_seed(0)), 64)
    return model


@pytest.fixture(scope="module")
def folder(calibrated: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("calibrated")
    calibrated.save_pretrained(written)
    return written


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Quantization | None]:
    """How an engine would round the weights of a model."""

    def stop(module: Any, options: CompileOptions, **rest: Any) -> Any:
        raise Compiled(options)

    def asked(model: Any, **options: Any) -> Quantization | None:
        with pytest.raises(Compiled) as compiled:
            pagoda.LLM(model, **options)
        return compiled.value.options.weight_quantization

    monkeypatch.setattr("torch_pagoda.compiled_model.compile_program", stop)
    return asked


def _with_record(folder: Path, target: Path, record: object) -> Path:
    """A copy of the checkpoint whose config holds another record."""
    shutil.copytree(folder, target)
    plain = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**plain, "pagoda_grid": record}))
    return target


@pytest.mark.parametrize("quantization", ["int4", "int4-weight-only"])
def test_the_group_size_of_the_folder_is_taken(
    folder: Path, scheme: Callable[..., Quantization | None], quantization: str
) -> None:
    for options in ({}, {"group_size": 64}):
        found = scheme(folder, quantization=quantization, **options)
        assert found is not None and (found.bits, found.group_size) == (4, 64)


def test_live_modules_carry_their_grid(
    calibrated: PreTrainedModel, folder: Path, llama: PreTrainedModel, scheme: Callable[..., Quantization | None]
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    for model, size in ((calibrated, 64), (loaded, 64), (llama, 128)):
        found = scheme(model, quantization="int4")
        assert found is not None and found.group_size == size


def test_without_quantization_the_record_says_nothing(
    folder: Path, tmp_path: Path, scheme: Callable[..., Quantization | None]
) -> None:
    assert scheme(folder) is None
    assert scheme(_with_record(folder, tmp_path / "broken", "x")) is None


@pytest.mark.parametrize("group_size", [0, 192])
def test_groups_of_any_legal_size_are_read(
    group_size: int, folder: Path, tmp_path: Path, scheme: Callable[..., Quantization | None]
) -> None:
    other = _with_record(folder, tmp_path / "other", {"bits": 4, "group_size": group_size})
    found = scheme(other, quantization="int4")
    assert found is not None and found.group_size == group_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quantization": "int4", "group_size": 128},
            r"group_size=128 was given.*group_size=64.*omit group_size",
        ),
        ({"quantization": "int4-weight-only", "group_size": 0}, r"group_size=0 was given.*omit group_size"),
        ({"quantization": "int8"}, r"quantization='int8' quantizes to 8 bits.*4-bit grid.*use 'int4'"),
    ],
    ids=["128", "0", "int8"],
)
def test_contradictions_are_refused_before_weights_are_read(
    options: dict[str, Any],
    message: str,
    calibrated: PreTrainedModel,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_line: Callable[[BaseException], str],
) -> None:
    monkeypatch.delattr("torch_pagoda.compiled_model.load_model")
    for model in (folder, calibrated):
        with pytest.raises(ValueError, match=message) as raised:
            pagoda.LLM(model, **options)
        one_line(raised.value)
    with pytest.raises(ValueError, match=message):
        pagoda.explain(calibrated, **options)


@pytest.mark.parametrize(
    "record",
    [
        "64",
        [4, 64],
        {},
        {"bits": 4},
        {"bits": 4, "group_size": 64, "zero": 1},
        {"bits": 8, "group_size": 64},
        {"bits": True, "group_size": 64},
        {"bits": 4.0, "group_size": 64},
        {"bits": 4, "group_size": "64"},
        {"bits": 4, "group_size": False},
        {"bits": 4, "group_size": 64.0},
        {"bits": 4, "group_size": 96},
        {"bits": 4, "group_size": -64},
        {"bits": 4, "group_size": 1 << 40},
        {"bits": 4, "group_size": [64] * 1000},
    ],
    ids=lambda record: str(record)[:40],
)
def test_records_that_nobody_wrote_are_refused(
    record: object, folder: Path, tmp_path: Path, one_line: Callable[[BaseException], str]
) -> None:
    other = _with_record(folder, tmp_path / "other", record)
    with pytest.raises(ValueError, match=r"pagoda_grid=.* is invalid.*remove the entry") as raised:
        pagoda.LLM(other, quantization="int4")
    assert len(one_line(raised.value)) < 700
