"""A store in a private folder, which processes of one user share and which outlives them.

An entry is a file that appears at once, under its name, when it is complete. What was not on the disk when the
machine stopped is found by its seal. The entries that were not read for longest go first when the folder is full.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..private_folder import NotPrivate, locked, make_private_folder, open_private_file
from .entries import HEAD_SIZE, Seal

logger = logging.getLogger(__name__)

DEFAULT_SIZE = 16 << 30
"""Bytes of all entries, unless that is more than a tenth of what is free."""
_NAME = re.compile(r"[0-9a-f]{30}(\.[0-9]+-[0-9]+\.tmp)?")
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_SPARE = 0.1
"""Part of the folder that is empty after entries were removed."""
_ABANDONED_SECONDS = 600.0
"""Age of an unfinished file whose writer is gone."""
_PARTS_BETWEEN_LOOKS = 16
"""Looks at what others have written, for each time that this process fills the folder."""


class FolderStore:
    """Entries as files of a folder; see ``BlockStore``.

    Args:
        path: the folder, which is made if need be.
        seal: names and seals the entries.
        size: most bytes of all entries; None: ``DEFAULT_SIZE``, or a tenth of what is free.

    Raises:
        OSError: it cannot be made.
        NotPrivate: others may write to it.
    """

    def __init__(self, path: Path, seal: Seal, size: int | None = None) -> None:
        make_private_folder(path, remedy="name a folder of your own")
        self.path = path
        self.num_damaged = 0
        self._seal = seal
        self._size = size
        self._numbers = itertools.count()
        self._bytes: int | None = None  # of all entries, at the last look and written since; None: not known
        self._since_look = 0
        self._is_stopped = False

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        return [os.path.exists(self._file(key)) for key in keys]

    def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        return [self._load(key, part) for key, part in zip(keys, into, strict=True)]

    def _load(self, key: bytes, part: memoryview) -> bool:
        path = self._file(key)
        try:
            with open_private_file(path) as file:
                head = file.read(HEAD_SIZE)
                is_whole = file.readinto(part) == part.nbytes and not file.read(1)
        except FileNotFoundError:
            return False
        except NotPrivate:
            self.num_damaged += 1
            return False
        except OSError as error:
            logger.debug("cannot read %s: %s", path, error)
            return False
        if not is_whole or not self._seal.fits(head, key, part):
            self.num_damaged += 1
            with suppress(OSError):
                path.unlink()
            return False
        with suppress(OSError):
            os.utime(path)
        return True

    def store(self, keys: Sequence[bytes], parts: Sequence[memoryview]) -> int:
        written = 0
        if self._is_stopped:
            return 0
        try:
            for key, part in zip(keys, parts, strict=True):
                path = self._file(key)
                if not path.exists():
                    self._make_room()
                    written += self._write(path, self._seal.head(key, part), part)
        except OSError as error:
            self._is_stopped = True
            logger.warning("nothing more is written to the KV store in %s: %s", self.path, error)
        return written

    def close(self) -> None:
        """Nothing is open."""

    def _file(self, key: bytes) -> Path:
        name = self._seal.name(key)
        return self.path / name[:2] / name[2:]

    def _write(self, path: Path, head: bytes, part: memoryview) -> int:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}-{next(self._numbers)}.tmp")
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                for data in (memoryview(head), part):
                    while data:
                        data = data[file.write(data) :]
            os.replace(unfinished, path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        written = len(head) + part.nbytes
        self._bytes = (self._bytes or 0) + written
        self._since_look += written
        return written

    def _make_room(self) -> None:
        """Remove entries if the folder is full; looks at all of it now and then, as others write to it, too."""
        if self._bytes is not None and self._size is not None:
            is_known = self._since_look < self._size // _PARTS_BETWEEN_LOOKS
            if is_known and self._bytes < self._size:
                return
        with locked(self.path / "lock"):
            found = sorted(self._entries())
            held = sum(size for _, size, _ in found)
            if self._size is None:
                self._size = min(DEFAULT_SIZE, (shutil.disk_usage(self.path).free + held) // 10)
            if held >= self._size:
                for _, size, name in found:
                    if held <= (1 - _SPARE) * self._size:
                        break
                    with suppress(FileNotFoundError):
                        os.unlink(name)
                    held -= size
        self._bytes, self._since_look = held, 0

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Time of the last use, bytes and path of each entry. Others' files are left alone."""
        oldest = time.time() - _ABANDONED_SECONDS
        for folder in list(os.scandir(self.path)):
            if not _SUBFOLDER.fullmatch(folder.name):
                continue
            for file in list(os.scandir(folder.path)):
                if not _NAME.fullmatch(file.name):
                    continue
                try:
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not file.name.endswith(".tmp"):
                    yield status.st_mtime, status.st_size, file.path
                elif status.st_mtime < oldest:
                    with suppress(FileNotFoundError):
                        os.unlink(file.path)
