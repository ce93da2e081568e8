"""The cache folder, and the rule that what lies in it must keep to be trusted: compiled code comes from there.

The rule is ssh's: a folder and the files in it count only if they belong to this user or to root and nobody else may
write to them. It is held against what was opened, not against a name, so who may rename the folders above gains
nothing. Systems without numbers for users (Windows) keep strangers out of profile folders by themselves; there it
holds nothing up.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

CACHE = "TORCH_PAGODA_CACHE"
"""Environment variable: the cache folder."""
_REMEDY = f"set {CACHE} to a folder of your own"
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # a pipe of that name would hold us up


class NotPrivate(OSError):
    """Others may have written a folder or file. The message says which and who, and the remedy."""


def cache_folder() -> Path:
    """The folder of programs, kernels and toolchains: ``$TORCH_PAGODA_CACHE``, or ``~/.cache/torch_pagoda``."""
    root = os.environ.get(CACHE)
    return Path(root) if root else Path.home() / ".cache" / "torch_pagoda"


def check_private_folder(folder: Path, remedy: str = _REMEDY) -> None:
    """Hold a folder against the rule.

    Args:
        folder: it.
        remedy: what else to use, for the message.

    Raises:
        FileNotFoundError: there is none.
        NotPrivate: it is not a folder, or others may have written in it.
    """
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivate(f"{folder} is not a folder; {remedy}")
    _check(folder, status, remedy)


def make_private_folder(folder: Path, remedy: str = _REMEDY) -> None:
    """Make a folder, and those above it that are missing, for this user alone (mode 0700).

    Args:
        folder: it.
        remedy: what else to use, for the message.

    Raises:
        OSError: that is impossible.
        NotPrivate: it is there, and does not keep the rule.
    """
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(folder, remedy)


def open_private_file(path: Path) -> BufferedReader:
    """Open a file that keeps the rule for reading.

    Raises:
        FileNotFoundError: there is none.
        NotPrivate: it is a link or no ordinary file, or others may have written it.
        OSError: it cannot be read.
    """
    descriptor = _open(path, os.O_RDONLY | _AT_ONCE)
    return os.fdopen(descriptor, "rb")


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock between processes, where the system has one.

    Args:
        path: a file in a private folder, which is made if need be and never written to.
        on_wait: called if another process holds the lock.

    Raises:
        NotPrivate: it is a link, or somebody else's.
        OSError: it cannot be made.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    """A descriptor of a file that keeps the rule."""
    if not _NO_LINKS and path.is_symlink():
        raise NotPrivate(f"{path} is a link; delete it")
    try:
        descriptor = os.open(path, flags | _NO_LINKS, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise NotPrivate(f"{path} is a link; delete it") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivate(f"{path} is not an ordinary file; delete it")
        _check(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, status: os.stat_result, remedy: str = _REMEDY) -> None:
    if not hasattr(os, "geteuid"):
        return
    user = os.geteuid()
    if status.st_uid not in (0, user):
        raise NotPrivate(f"{path} belongs to user {status.st_uid}, neither to you ({user}) nor to root; {remedy}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivate(
            f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); delete it, or if nobody has, "
            f"run: chmod go-w {path}"
        )
