"""Built libraries on disk: found by their sources, checked by digest, built once.

Next to a library ``kernels-KEY-COMPILER.so`` is a file ``kernels-KEY-COMPILER.so.sha256`` in the format of
``sha256sum -c``, which also names the compiler that built the library. Every compiler has a library of its own. If
none can be built, without a compiler or in a read-only folder, the library of another compiler is loaded, built from
the same sources for the same processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from ..private_folder import check_private_folder, locked, make_private_folder, open_private_file

_logger = logging.getLogger(__name__)


class KernelBuildError(RuntimeError):
    """The C++ kernels could not be built or loaded; the message says why."""


@dataclass(frozen=True)
class Builder:
    """A compiler that can build the library.

    Attributes:
        version: what it says about itself.
        build: compiles the library to the given path, as a whole or not at all.
    """

    version: str
    build: Callable[[Path], None]

    @property
    def key(self) -> str:
        """What tells it from other compilers in names of files."""
        return hashlib.sha256(self.version.encode()).hexdigest()[:8]


def load_library(folders: Sequence[Path], key: str, builder: Builder | None) -> ctypes.CDLL:
    """Load the library from the first folder that has it or lets it be built there.

    A folder that others can write to, or that belongs to another user, is passed over with a warning, as is one that
    is only read and does not have it. Where no folder serves, the library is built in one that lasts only until it is
    loaded.

    Args:
        folders: where it may lie.
        key: a digest of what it is built from, and for.
        builder: None where there is no compiler.

    Raises:
        KernelBuildError: it is nowhere, and cannot be built.
        OSError: the loader refuses what was just built.
    """
    for folder in folders:
        try:
            library = _in_folder(folder, key, builder)
        except OSError as error:
            _logger.warning("cannot store kernels in %s: %s", folder, error)
        else:
            if library is not None:
                return library
    if builder is None:
        raise KernelBuildError("g++ is not on PATH; install it (for instance: apt install g++)")
    with tempfile.TemporaryDirectory(prefix="torch_pagoda_kernels_") as name:
        return _built(Path(name, f"kernels-{key}-{builder.key}.so"), builder)


def _in_folder(folder: Path, key: str, builder: Builder | None) -> ctypes.CDLL | None:
    """The library in ``folder``, built there if need be; None where nobody can build it.

    Raises:
        OSError: the folder is not ours alone, or is not there and cannot be made, or cannot be written.
        KernelBuildError: the compiler refuses.
    """
    try:
        check_private_folder(folder)
    except FileNotFoundError:
        if builder is None:
            return None
    unusable: OSError | KernelBuildError | None = None
    if builder is not None:
        library = folder / f"kernels-{key}-{builder.key}.so"
        if (loaded := load_checked(library)) is not None:
            return loaded
        try:
            make_private_folder(folder)
            with locked(library.with_suffix(".lock")):
                return load_checked(library) or _built(library, builder)
        except (OSError, KernelBuildError) as error:
            unusable = error
    for other in sorted(folder.glob(f"kernels-{key}-*.so")):
        if (loaded := load_checked(other)) is not None:
            _logger.info("using kernels of another compiler: %s", other)
            return loaded
    if unusable is not None:
        raise unusable
    return None


def _built(library: Path, builder: Builder) -> ctypes.CDLL:
    """Build a library whose lock is held, note its digest, load it."""
    for left in library.parent.glob(f"{library.stem}?*/"):  # where a build was killed
        shutil.rmtree(left, ignore_errors=True)
    builder.build(library)
    note_digest(library, builder.version)
    loaded = load_checked(library)
    if loaded is None:
        raise OSError(f"could not load {library}; see the log")
    return loaded


def note_digest(library: Path, builder: str) -> None:
    """Write the digest of a newly built library, and the compiler that built it, to a file next to it."""
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    noted = digest_file(library)
    unfinished = noted.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    unfinished.write_text(f"{digest}  {library.name}\n# built by {builder}\n", encoding="utf-8")
    unfinished.chmod(0o644)
    os.replace(unfinished, noted)


def load_checked(
    library: Path, open_file: Callable[[Path], BufferedReader] = open_private_file
) -> ctypes.CDLL | None:
    """Load a library that is as it was built.

    Args:
        library: path of the library; the file with its digest is next to it.
        open_file: opens both for reading, or says by an OSError why they are not to be trusted.

    Returns:
        None, after a warning unless it is missing, for any other.
    """
    try:
        file = open_file(library)
    except FileNotFoundError:
        return None
    except OSError as error:
        _logger.warning("not using %s: %s", library, error)
        return None
    try:
        with open_file(digest_file(library)) as noted:
            said = noted.read(64).decode("ascii", "replace")
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != said:
            raise OSError(f"its digest is {found}, but {said or 'none'} is recorded; it is damaged")
        loaded = ctypes.CDLL(_same_file(file.fileno(), library))
    except OSError as error:
        _logger.warning("not using %s: %s", library, error)
        file.close()
        return None
    _opened.append(file)
    return loaded


_opened: list[object] = []
"""Files of loaded libraries: the loader knows a library by the name of its descriptor, which nothing else may get."""


def _same_file(descriptor: int, path: Path) -> str:
    """A name of the very file that is open, where the system has such names."""
    name = f"/proc/self/fd/{descriptor}"
    return name if os.path.exists(name) else str(path)


def digest_file(library: Path) -> Path:
    """Return the path of the file next to a library that holds its digest."""
    return library.with_name(f"{library.name}.sha256")
