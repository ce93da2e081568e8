"""Parameters that transformers makes of several tensors of a checkpoint: found by contents, made again in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from torch_pagoda.compiler import CheckpointFiles
from torch_pagoda.compiler.warm_start.checkpoint_files import sample_digest
from torch_pagoda.compiler.warm_start.record import Sources, sources_in_files, start_tensors
from torch_pagoda.compiler.warm_start.stored_sources import Assembled, StoredSource, float_source
from torch_pagoda.compiler.weights.tensor_contents import module_tensors
from torch_pagoda.passes.graph.cut import ZERO, Cut
from torch_pagoda.passes.sharding.slices import part_of
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense
from torch_pagoda.runtime.ops.linear.weight_format import WeightFormat

from tiny_models import build_tiny_model

EXPERTS, ROWS, COLUMNS = 5, 12, 16
FORM = WeightFormat("int", 4, 4)


def matrix(stored: bool) -> torch.Tensor:
    if not stored:
        return torch.randn(ROWS // 2, COLUMNS)
    codes = torch.randint(0, 256, (ROWS // 2, COLUMNS // 2), dtype=torch.uint8)
    return StoredWeight(FORM, codes, torch.rand(ROWS // 2, COLUMNS // 4), dtype=torch.float32)


def assembled(stored: bool, transposed: bool) -> Assembled:
    torch.manual_seed(4)
    tensors = {f"{expert}.{half}": matrix(stored) for expert in range(EXPERTS) for half in ("gate", "up")}
    rows = tuple((f"{expert}.gate", f"{expert}.up") for expert in range(EXPERTS))
    return Assembled(StoredSource(rows, True, str(FORM) if stored else "", torch.float32, transposed), tensors.get)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dense() if isinstance(tensor, StoredWeight) else tensor


GROUPS = (np.array([0, 1, 2, 3, 8, 9, 10, 11]), np.array([4, 5, 6, 7, 12, 13, 14, 15]))
COLUMN_RUNS = (np.arange(8), np.arange(8, 16))
ROW_HALVES = (np.array([0, 1, 2, 6, 7, 8]), np.array([3, 4, 5, 9, 10, 11]))
ROW_ZEROS = (np.array([0, 1, 2, 3, 6, 7, 8, 9]), np.array([4, 5, ZERO, ZERO, 10, 11, ZERO, ZERO]))
SPREAD = (np.array([0, 1, 2]), np.array([3, 4, ZERO]))
ONE_EACH = (np.array([2]), np.array([ZERO]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", [False, True], ids=["floats", "stored"])
@pytest.mark.parametrize(
    ("experts", "rows", "columns"),
    [
        (SPREAD, None, None),
        (ONE_EACH, None, None),
        (None, ROW_HALVES, None),
        (None, None, COLUMN_RUNS),
        (SPREAD, ROW_HALVES, None),
        (SPREAD, ROW_ZEROS, None),
        (SPREAD, None, COLUMN_RUNS),
    ],
)
def test_a_part_is_that_of_the_whole(experts: Any, rows: Any, columns: Any, stored: bool, transposed: bool) -> None:
    made = assembled(stored, transposed)
    whole = made.whole()
    assert made.shape == whole.shape == (EXPERTS, *((COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)))
    cut = None
    for dim, indices in ((2 if transposed else 1, rows), (1 if transposed else 2, columns), (0, experts)):
        cut = cut if indices is None else Cut(dim, indices, cut)
    assert cut is not None
    for rank in range(2):
        part = made.part(cut, rank)
        assert torch.equal(dense(part), dense(part_of(whole, cut, rank)))
        picked = dense(whole)
        for each in cut.each():
            held = torch.from_numpy(each.indices[rank])
            picked = picked.index_select(each.dim, held.clamp(min=0))
            picked.movedim(each.dim, 0)[held == ZERO] = 0
        assert torch.equal(dense(part), picked)


def test_what_is_not_stored_as_it_was_is_refused() -> None:
    source = StoredSource((("a", "b"),), True, "", torch.float32, False)
    with pytest.raises(ValueError, match="does not hold 'b' as floats"):
        Assembled(source, {"a": torch.ones(2, 2), "b": matrix(True)}.get).whole()
    with pytest.raises(ValueError, match="'a' and 1 that it is read with are not stored alike"):
        Assembled(source, {"a": torch.ones(2, 2), "b": torch.ones(2, 3)}.get).whole()


def test_a_stack_with_one_other_entry_is_no_stack() -> None:
    rows = {str(i): torch.randn(3, 4) for i in range(4)}
    names = {sample_digest(row): name for name, row in rows.items()}
    stack = torch.stack(list(rows.values()))
    assert float_source(stack, names) == StoredSource(
        (("0",), ("1",), ("2",), ("3",)), True, "", torch.float32, False
    )
    stack[3, 2, 1] += 1
    assert float_source(stack, names) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_merged_experts_are_found_in_the_files(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build_tiny_model(kind, num_hidden_layers=2).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.0." in name for name in stored), "in a tensor of its own for each expert"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    found = sources_in_files(model, CheckpointFiles([str(tmp_path / "model.safetensors")], {}, dtype))
    tensors = module_tensors(model)
    assert found.stored
    for name, source in found.stored.items():
        assert torch.equal(Assembled(source, stored.get).whole(), tensors[name]), name


def test_parts_of_a_stack_that_is_one_tensor_in_the_files() -> None:
    form = WeightFormat("e2m1", 4, 32, "bf16")
    codes = torch.randint(0, 256, (4, 6, 32), dtype=torch.uint8)
    weight = StoredWeight(form, codes, torch.rand(4, 6, 2).bfloat16() + 1, dtype=torch.float32, transposed=True)
    assembled = Assembled(StoredSource((("w",),), False, str(form), torch.float32, True), {"w": weight}.get)
    assert assembled.shape == weight.shape == (4, 64, 6)
    assert assembled.form().is_meta and assembled.form().shape == weight.shape
    for dim, first, last in ((0, 2, 4), (1, 32, 64), (2, 3, 6)):
        indices = np.arange(weight.shape[dim])
        part = assembled.part(Cut(dim, (indices[:first], indices[first:last])), 1)
        assert torch.equal(as_dense(part), weight.dense().narrow(dim, first, last - first)), dim


def test_a_part_in_another_dtype_is_that_of_the_whole(tmp_path: Path) -> None:
    kept = torch.randn(6, 8)
    save_file({"w": kept, "n": torch.tensor(2.0)}, tmp_path / "model.safetensors")
    files = CheckpointFiles([str(tmp_path / "model.safetensors")], {}, torch.bfloat16)
    record = Sources({name: (name, torch.bfloat16) for name in "wn"}, {}, {})
    found = start_tensors(record, files, ["w", "n"], in_parts=True)
    assert isinstance(found["w"], Assembled), "converted as far as it is held"
    assert torch.equal(found["w"].whole(), kept.bfloat16())
    part = found["w"].part(Cut(1, (np.arange(4), np.arange(4, 8))), 1)
    assert torch.equal(part, kept[:, 4:].bfloat16())
    assert torch.equal(found["n"], torch.tensor(2.0, dtype=torch.bfloat16))  # type: ignore[arg-type]
