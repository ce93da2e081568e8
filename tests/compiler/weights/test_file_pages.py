"""Memory of weights that were mapped from a file is given back once they moved; written pages are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_pagoda.compiler.weights.file_pages import FilePages
from torch_pagoda.compiler.weights.merged_weights import merge_rows

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
SIZE = 4 * 2**20


@pytest.fixture
def mapped(tmp_path):
    """Two 4 MB tensors in one mapped file, read once."""
    torch.manual_seed(0)
    save_file({"a": torch.randn(1024, 1024), "b": torch.randn(1024, 1024)}, tmp_path / "weights.safetensors")
    tensors = load_file(tmp_path / "weights.safetensors")
    pair = tensors["a"], tensors["b"]
    assert not any(t.untyped_storage().resizable() for t in pair), "read into memory of torch's own, not mapped"
    for tensor in pair:
        tensor.sum()
    return pair


def resident_file_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_pages_leave_memory_and_can_be_read_again(mapped):
    a, b = mapped
    values = a.clone(), b.clone()
    before = resident_file_bytes()
    dropped = FilePages([a, b]).drop(a.data_ptr(), SIZE)
    assert SIZE - 3 * 4096 < dropped <= SIZE
    assert before - resident_file_bytes() > SIZE // 2
    assert torch.equal(a, values[0])
    assert torch.equal(b, values[1])


def test_written_pages_stay(mapped):
    a, b = mapped
    a[500:510] = 1.0
    assert FilePages([a, b]).drop(a.data_ptr(), SIZE) == 0
    assert bool((a[500:510] == 1.0).all())


def test_other_memory_is_never_dropped(mapped):
    own = torch.ones(1024, 1024)
    assert FilePages([own]).drop(own.data_ptr(), SIZE) == 0
    assert FilePages([own, *mapped]).drop(own.data_ptr(), SIZE) == 0
    assert FilePages(mapped).drop(mapped[1].data_ptr(), 1 << 40) == 0
    assert bool((own == 1).all())


def test_merged_rows_take_the_place_of_the_files_pages(mapped):
    a, b = mapped
    expected = torch.cat([a, b])
    before = resident_file_bytes()
    whole = merge_rows([a, b], FilePages([a, b]))
    assert torch.equal(whole, expected)
    assert before - resident_file_bytes() > SIZE
