"""What compressed-tensors packs is read as what it unpacks, bit for bit; what is written for it is unpacked alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torch_pagoda.checkpoint.compressed_writer import write_compressed
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.calibrate import calibrate
from torch_pagoda.compiler.calibrate.grid import GridWeight
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

pytestmark = pytest.mark.formats
CPU = torch.device("cpu")
READ = {
    "w4a16-g32": "int4/g32/bf16",
    "w4a16-channel": "int4/row/bf16",
    "w4a16-asym": "int4/g32/bf16+z",
    "w8a16-g32": "int8/g32/bf16",
    "w8a16-asym": "int8/g32/bf16+z",
    "int8-channel": "int8/row/bf16",
    "int8-tensor": "int8/row/bf16",
    "naive-int8": "int8/row/bf16",
    "fp8-channel": "e4m3/row/bf16",
    "fp8-tensor": "e4m3/row/bf16",
    "fp8-block": "e4m3/g32/bf16",
    "nvfp4": "e2m1/g16/f32",
    "mxfp4": "e2m1/g32/bf16",
    "mxfp8": "e4m3/g32/bf16",
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    build_tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    return folder


def check_alike(folder: Path, dense: Path, form: str) -> int:
    """Compare every quantized weight with what the library unpacks; how many there are."""
    loaded = dict(load_model(folder, "auto", False, CPU).named_parameters())
    expected = load_file(dense)
    for name, tensor in expected.items():
        weight = loaded[name]
        assert isinstance(weight, StoredWeight), name
        one_group = weight.form.num_groups(weight.shape[1]) == 1
        assert str(weight.form) == (form.replace("g64", "row") if one_group else form), name
        assert torch.equal(weight.replaced(dtype=tensor.dtype).dense(), tensor), name
    return len(expected)


@pytest.mark.parametrize("name", READ)
def test_what_the_library_packs(name: str, floats: Path, tmp_path: Path, run_with: Callable[..., None]) -> None:
    run_with("compressed-tensors", "compress.py", floats, tmp_path / "out", name)
    assert check_alike(tmp_path / "out", tmp_path / "out" / "dense.safetensors", READ[name]) == 14


def test_what_is_not_read_is_refused_by_name(floats: Path, tmp_path: Path, run_with: Callable[..., None]) -> None:
    run_with("compressed-tensors", "compress.py", floats, tmp_path / "out", "w3a16")
    with pytest.raises(ValueError, match=r"states \[3\] bits, and 4 and 8 are read"):
        load_model(tmp_path / "out", "auto", False, CPU)


@pytest.mark.parametrize("group_size", [64, 0])
def test_what_is_written_for_it(group_size: int, tmp_path: Path, run_with: Callable[..., None]) -> None:
    model = build_tiny_model("llama", hidden_size=128, intermediate_size=192).to(torch.bfloat16)
    windows = torch.randint(3, 100, (8, 32), generator=torch.Generator().manual_seed(0))
    weights: dict[str, GridWeight] = {}
    calibrate(model, windows, group_size, on_matrix=weights.__setitem__)
    write_compressed(model, tmp_path / "out", weights)
    run_with("compressed-tensors", "compress.py", tmp_path / "out", tmp_path / "theirs", "read")
    form = f"int4/{f'g{group_size}' if group_size else 'row'}/bf16"
    assert check_alike(tmp_path / "out", tmp_path / "theirs" / "dense.safetensors", form) == 14
    for name, tensor in load_file(tmp_path / "theirs" / "dense.safetensors").items():
        assert torch.equal(model.get_parameter(name), tensor), name
