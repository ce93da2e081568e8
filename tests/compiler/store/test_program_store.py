"""The folder of programs: broken files, full disks, pruning."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from torch_pagoda.compiler.store import program_store
from torch_pagoda.compiler.store.program_store import DISABLE, ProgramStore, open_store


@pytest.fixture
def store(tmp_path):
    return ProgramStore(tmp_path / "programs")


def test_what_was_saved_is_loaded(store):
    store.save("a", {"rows": [("x", 1, None)], "tensors": {"t": torch.arange(3).t()}})
    found = store.load("a")
    assert found is not None
    assert found["rows"] == [("x", 1, None)]
    assert torch.equal(found["tensors"]["t"], torch.arange(3))
    assert store.load("b") is None


def test_discarded_is_gone(store):
    store.save("a", {})
    store.discard("a")
    store.discard("a")
    assert store.load("a") is None


@pytest.mark.parametrize("content", [b"", b"no archive", "half"], ids=["empty", "other", "half"])
def test_broken_files_count_as_not_there(store, content, caplog):
    store.save("a", {"tensors": torch.arange(1000)})
    path = store.folder / "a.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    with caplog.at_level(logging.WARNING):
        assert store.load("a") is None
    assert "is not used" in caplog.text


def test_other_formats_count_as_not_there(store, monkeypatch):
    monkeypatch.setattr(program_store, "_FORMAT", 0)
    store.save("a", {})
    monkeypatch.undo()
    assert store.load("a") is None


def test_code_in_a_file_is_not_run(store, caplog):
    store.folder.mkdir()
    torch.save({"format": 1, "f": os.getcwd}, store.folder / "a.pt")
    with caplog.at_level(logging.WARNING):
        assert store.load("a") is None
    assert "is not used" in caplog.text


def test_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        ProgramStore(tmp_path / "file" / "programs").save("a", {})
    assert "cannot be kept" in caplog.text


def test_broken_off_writes_leave_nothing(store, monkeypatch, caplog):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    store.save("a", {})
    assert "No space left" in caplog.text
    assert not list(store.folder.iterdir())


def test_programs_unused_for_longest_are_pruned(store, monkeypatch):
    monkeypatch.setattr(program_store, "_MOST_FILES", 2)
    for i, key in enumerate("abc"):
        store.save(key, {})
        os.utime(store.folder / f"{key}.pt", (1e9 + i, 1e9 + i)) if (store.folder / f"{key}.pt").exists() else None
    assert store.load("b") is not None  # and so it was used after c
    os.utime(store.folder / "c.pt", (1e9, 1e9))
    (store.folder / "old.part").touch()
    os.utime(store.folder / "old.part", (1e9, 1e9))
    store.save("d", {})
    assert {path.name for path in store.folder.iterdir()} == {"b.pt", "d.pt"}


def test_environment_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path))
    for value in ("", "0"):
        monkeypatch.setenv(DISABLE, value)
        store = open_store()
        assert store is not None and store.folder == tmp_path / "programs"
    monkeypatch.setenv(DISABLE, "1")
    assert open_store() is None
