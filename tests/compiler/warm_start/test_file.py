"""The folder of programs: broken files, full disks, pruning."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from torch_pagoda.compiler.warm_start import file
from torch_pagoda.compiler.warm_start.file import DISABLE, ProgramStore, open_store


@pytest.fixture
def store(tmp_path):
    return ProgramStore(tmp_path / "programs")


def test_what_was_saved_is_loaded(store):
    store.save("a", {"rows": [("x", 1, None)], "tensors": {"t": torch.arange(3).t()}})
    found = store.load("a", dict)
    assert found is not None
    assert found["rows"] == [("x", 1, None)]
    assert torch.equal(found["tensors"]["t"], torch.arange(3))
    assert store.load("b", dict) is None


def test_discarded_is_gone(store):
    store.save("a", {})
    store.discard("a")
    store.discard("a")
    assert store.load("a", dict) is None


@pytest.mark.parametrize("content", [b"", b"no archive", "half"], ids=["empty", "other", "half"])
def test_broken_files_count_as_not_there(store, content, caplog):
    store.save("a", {"tensors": torch.arange(1000)})
    path = store.folder / "a.program"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    with caplog.at_level(logging.WARNING):
        assert store.load("a", dict) is None
    assert "not using " in caplog.text


def test_other_formats_count_as_not_there(store, monkeypatch):
    monkeypatch.setattr(file, "_MARK", b"pagoda program 0\n")
    store.save("a", {})
    monkeypatch.undo()
    assert store.load("a", dict) is None


def test_code_in_a_file_is_not_run(store, caplog):
    """Though its digest is right."""
    store.save("a", {"f": os.getcwd})
    with caplog.at_level(logging.WARNING):
        assert store.load("a", dict) is None
    assert "it holds more than data" in caplog.text and "weights_only" not in caplog.text


def test_files_that_are_no_programs_count_as_not_there(store, caplog):
    store.save("a", [1, 2])
    assert store.load("a", dict) is None
    assert "it holds no dict" in caplog.text


def test_huge_files_are_not_read(store, caplog):
    store.save("a", {})
    with (store.folder / "a.program").open("r+b") as file:
        file.truncate(1 << 33)
    assert store.load("a", dict) is None
    assert "it has 8589934592 bytes" in caplog.text


def test_folders_and_files_are_ours_alone(store):
    store.save("a", {})
    (file,) = store.folder.iterdir()
    assert (store.folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_can_write_is_not_read(store, caplog, which):
    store.save("a", {})
    path = store.folder if which == "folder" else store.folder / "a.program"
    path.chmod(0o777)
    assert store.load("a", dict) is None
    assert f"others may write to {path}" in caplog.text and "chmod go-w" in caplog.text


def test_nothing_is_kept_where_others_can_write(store, caplog):
    store.folder.mkdir()
    store.folder.chmod(0o770)
    store.save("a", {})
    assert not list(store.folder.iterdir())
    assert "cannot store the program" in caplog.text and "others may write to" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which only root may")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_belongs_to_others_is_not_read(store, caplog, which):
    store.save("a", {})
    path = store.folder if which == "folder" else store.folder / "a.program"
    os.chown(path, 12345, 0)
    assert store.load("a", dict) is None
    assert f"{path} belongs to user 12345" in caplog.text


def test_links_are_not_followed(store, tmp_path, caplog):
    store.save("a", {})
    file = store.folder / "a.program"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert store.load("a", dict) is None
    assert "is a link" in caplog.text


def test_a_folder_that_is_only_read_is_read(store, monkeypatch):
    """Nothing can be noted in it, not even that the program was used."""
    store.save("a", {"x": 1})

    def forbid(path):
        raise PermissionError(13, "Read-only file system")

    monkeypatch.setattr(os, "utime", forbid)
    assert store.load("a", dict) == {"x": 1}


def test_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        ProgramStore(tmp_path / "file" / "programs").save("a", {})
    assert "cannot store the program" in caplog.text


def test_broken_off_writes_leave_nothing(store, monkeypatch, caplog):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.save("a", {})
    assert "No space left" in caplog.text
    assert not list(store.folder.iterdir())


def test_programs_unused_for_longest_are_pruned(store, monkeypatch):
    monkeypatch.setattr(file, "_MOST_FILES", 2)
    for i, key in enumerate("abc"):
        store.save(key, {})
        os.utime(store.folder / f"{key}.program", (1e9 + i, 1e9 + i)) if (
            store.folder / f"{key}.program"
        ).exists() else None
    assert store.load("b", dict) is not None  # and so it was used after c
    os.utime(store.folder / "c.program", (1e9, 1e9))
    (store.folder / "old.part").touch()
    os.utime(store.folder / "old.part", (1e9, 1e9))
    store.save("d", {})
    assert {path.name for path in store.folder.iterdir()} == {"b.program", "d.program"}


def test_environment_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path))
    for value in ("", "0"):
        monkeypatch.setenv(DISABLE, value)
        store = open_store()
        assert store is not None and store.folder == tmp_path / "programs"
    monkeypatch.setenv(DISABLE, "1")
    assert open_store() is None
