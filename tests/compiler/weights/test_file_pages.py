"""Of files no more is read than is asked for; memory of weights that were moved is given back, written pages stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_pagoda.compiler import CheckpointFiles
from torch_pagoda.compiler.weights import file_pages
from torch_pagoda.compiler.weights.file_pages import FilePages, will_read
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


@pytest.fixture
def asked(monkeypatch):
    """Advice that was given to the system, once it reads nothing ahead."""
    calls = []
    monkeypatch.setattr(file_pages, "madvise", lambda: lambda *given: calls.append(given))
    monkeypatch.setattr(file_pages, "_without_read_ahead", {"1"})
    return calls


def test_nothing_is_asked_for_where_the_system_reads_ahead(mapped, asked, monkeypatch):
    monkeypatch.setattr(file_pages, "_without_read_ahead", set())
    will_read(mapped)
    assert asked == []


@pytest.mark.parametrize("gap", [512, 4096])
def test_what_is_asked_for_are_the_pages_of_a_part(tmp_path, asked, gap):
    save_file({"a": torch.zeros(64, 8192), "b": torch.zeros(7)}, tmp_path / "weights.safetensors")
    tensors = load_file(tmp_path / "weights.safetensors")
    part = tensors["a"][8:40, gap : gap + 2048]
    will_read([part, None, torch.ones(5000)])
    assert {advice for _, _, advice in asked} == {3}
    assert all(size <= 128 << 10 for _, size, _ in asked)
    pages = {page for begin, size, _ in asked for page in range(begin // 4096, (begin + size) // 4096)}
    addresses = [part[i, j].data_ptr() for i in range(32) for j in range(0, 2048, 64)]
    addresses += [part[i, -1].data_ptr() for i in range(32)]
    assert pages == {address // 4096 for address in addresses}


def test_runs_that_lie_close_are_read_as_one(mapped, asked):
    will_read([mapped[0][:32, :512]])
    assert len(asked) == 1


def test_what_parts_are_read_of_is_not_read_around(tmp_path, monkeypatch):
    monkeypatch.setattr(file_pages, "_without_read_ahead", set())
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(64, 8192)}, path)
    files = CheckpointFiles([str(path)], {})
    for in_parts in (False, True):
        tensors = files.tensors(in_parts=in_parts)
        maps = Path("/proc/self/smaps").read_text().split(str(path))[1:]
        flags = {flag for each in maps for flag in each.split("VmFlags:")[1].splitlines()[0].split()}
        assert ("rr" in flags) == in_parts
        del tensors
