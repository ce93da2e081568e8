"""Files of a store: what is damaged, torn, foreign or too much."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from torch_pagoda.runtime.block_store.entries import HEAD_SIZE, Seal, entry_key
from torch_pagoda.runtime.block_store.folder import FolderStore
from torch_pagoda.runtime.private_folder import NotPrivate

KEYS = [entry_key(bytes([i]) * 16, 0, 0) for i in range(8)]
CONTENTS = [bytes([i, 255 - i]) * 32 for i in range(8)]


def store_in(
    folder: Path, size: int | None = None, secret: bytes = b"", fingerprint: bytes = b"f" * 16
) -> FolderStore:
    return FolderStore(folder, Seal(fingerprint, secret), size)


def write(store: FolderStore, *numbers: int) -> int:
    return store.store([KEYS[i] for i in numbers], [memoryview(CONTENTS[i]) for i in numbers])


def read(store: FolderStore, number: int, size: int = 64) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if store.load([KEYS[number]], [memoryview(into)]) == [True] else None


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


def test_what_is_written_is_read_by_others_and_once(tmp_path: Path) -> None:
    store = store_in(tmp_path / "kv")
    assert write(store, 0, 1) == 2 * (HEAD_SIZE + 64) and write(store, 0, 1) == 0
    other = store_in(tmp_path / "kv")
    assert other.known(KEYS[:3]) == [True, True, False]
    assert [read(other, i) for i in range(3)] == [CONTENTS[0], CONTENTS[1], None]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path / "kv")] == [0o600] * 2
    assert other.num_damaged == 0


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write(store, 0)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read(store, 0) is None, at
        assert not path.exists(), "it would stand in the way of a good one"
    for torn in (b"", whole[:-1], whole[: HEAD_SIZE - 1], whole + b"\0"):
        path.write_bytes(torn)
        assert read(store, 0) is None
    assert store.num_damaged == len(whole) + 4
    write(store, 0)
    assert read(store, 0) == CONTENTS[0]


def test_an_entry_counts_under_its_own_key_only(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write(store, 0, 1)
    first, second = (store._file(KEYS[i]) for i in range(2))
    second.write_bytes(first.read_bytes())
    assert read(store, 1) is None and read(store, 0) == CONTENTS[0]
    assert read(store, 0, size=63) is None, "another size is another model"


@pytest.mark.parametrize("change", [{"fingerprint": b"g" * 16}, {"secret": b"s" * 16}])
def test_of_others_nothing_is_read_whatever_its_name(tmp_path: Path, change: dict[str, bytes]) -> None:
    ours, theirs = store_in(tmp_path), store_in(tmp_path, **change)
    write(theirs, 0)
    assert ours.known(KEYS[:1]) == [False] and read(ours, 0) is None and ours.num_damaged == 0
    path = ours._file(KEYS[0])
    path.parent.mkdir(exist_ok=True)
    os.rename(theirs._file(KEYS[0]), path)
    assert read(ours, 0) is None and ours.num_damaged == 1


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write(store, 0, 1, 2)
    path = store._file(KEYS[0])
    kept = tmp_path / "kept"
    path.rename(kept)
    path.symlink_to(kept)
    os.chmod(store._file(KEYS[1]), 0o666)
    store._file(KEYS[2]).unlink()
    store._file(KEYS[2]).mkdir()
    assert [read(store, i) for i in range(3)] == [None] * 3
    assert kept.exists() and store.num_damaged >= 2


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NotPrivate, match="others may write"):
        store_in(tmp_path)


def test_the_longest_unused_goes_first(tmp_path: Path) -> None:
    entry = HEAD_SIZE + 64
    store = store_in(tmp_path, size=4 * entry)
    strange = tmp_path / "ab" / "notes.txt"
    strange.parent.mkdir()
    strange.write_text("x" * 10_000)
    abandoned = tmp_path / "ab" / ("0" * 30 + ".1-1.tmp")
    abandoned.write_bytes(b"")
    os.utime(abandoned, (1, 1))
    for i in range(4):
        write(store, i)
        os.utime(store._file(KEYS[i]), (10 + i, 10 + i))
    assert read(store, 0) is not None
    write(store, 4)
    assert store.known(KEYS[:5]) == [True, False, True, True, True], "0 was read, 1 was not"
    assert strange.exists() and not abandoned.exists()


def test_two_writers_keep_to_the_size_together(tmp_path: Path) -> None:
    entry = HEAD_SIZE + 64
    stores = [store_in(tmp_path, size=4 * entry) for _ in range(2)]
    for i in range(8):
        write(stores[i % 2], i)
        assert len(files(tmp_path)) <= 4


def test_a_full_disk_stops_writing_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    write(store, 0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch_pagoda.runtime.block_store.folder.os.replace", full)
    with caplog.at_level(logging.WARNING):
        assert write(store, 1) == write(store, 2) == 0
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert read(store, 0) == CONTENTS[0] and len(files(tmp_path)) == 1, "nothing unfinished is left"
