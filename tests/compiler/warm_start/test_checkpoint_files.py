"""Checkpoints are hashed once while their files are the same, in no more memory than what is being hashed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torch_pagoda.compiler.warm_start import checkpoint_files
from torch_pagoda.compiler.warm_start.checkpoint_files import CheckpointFiles

MIB = 1 << 20


def resident_of_files() -> int:
    said = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert said is not None
    return int(said[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_what_was_hashed_leaves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {f"codes.{i}": torch.full((4 * MIB,), i, dtype=torch.uint8) for i in range(8)}
    save_file(codes, tmp_path / "model.safetensors")
    resident: list[int] = []
    true = checkpoint_files.tensor_digest

    def digest(tensor: torch.Tensor) -> str:
        found = true(tensor)
        resident.append(resident_of_files())
        return found

    monkeypatch.setattr(checkpoint_files, "tensor_digest", digest)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    files = CheckpointFiles([str(tmp_path / "model.safetensors")], {}, read=lambda dtype: [])
    said = files.contents()
    assert len(resident) == len(codes) and max(resident) - min(resident) < 8 * MIB
    assert files.contents() == said
    assert len(resident) == len(codes)


@pytest.mark.parametrize("replaces", [False, True], ids=["written over", "another file"])
def test_files_that_changed_are_hashed_anew(replaces: bool, tmp_path: Path) -> None:
    """In as many bytes, while nobody waits."""
    path = tmp_path / "model.safetensors"
    save_file({"codes": torch.zeros(MIB, dtype=torch.uint8)}, path)
    files = CheckpointFiles([str(path)], {}, read=lambda dtype: [])
    said = files.contents()
    save_file({"codes": torch.ones(MIB, dtype=torch.uint8)}, tmp_path / "other")
    if replaces:
        os.replace(tmp_path / "other", path)
    else:
        path.write_bytes((tmp_path / "other").read_bytes())
    assert files.contents() != said
