"""Locates the requested GGUF file in a folder or in a repository of the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...compiler.report import first_line
from .container import is_gguf

_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")


def gguf_of_folder(folder: Path) -> str | None:
    """Return the only GGUF file of a folder, or the first of its parts; None if there is none.

    Raises:
        ValueError: there are several.
    """
    found = [file for file in sorted(folder.glob("*.gguf")) if is_gguf(file) and not _LATER_PART.fullmatch(file.name)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise ValueError(
            f"model={str(folder)!r} holds {len(found)} GGUF files ({names}{', …' if len(found) > 5 else ''}) but no "
            "config.json; pass one of them, or its name as gguf_file="
        )
    return str(found[0]) if found else None


def gguf_in(source: str | os.PathLike[str], gguf_file: str) -> str:
    """Return the path of a file in a folder or hub repository, downloading it if necessary.

    Raises:
        ValueError: the file does not exist, or is not a GGUF file.
    """
    name = os.path.expanduser(os.fspath(source))
    if not gguf_file or os.path.isabs(gguf_file) or ".." in Path(gguf_file).parts:
        raise ValueError(f"gguf_file={gguf_file!r} is not the name of a file in model={name!r}; pass a file name")
    path = str(Path(name) / gguf_file)
    if not Path(name).is_dir():
        from transformers.utils import cached_file

        try:
            path = str(cached_file(name, gguf_file))
        except (OSError, ValueError) as error:
            what = f"gguf_file={gguf_file!r}: model={name!r} has no such file"
            raise ValueError(f"{what}: {first_line(error)}") from error
    if not is_gguf(path):
        raise ValueError(f"gguf_file={gguf_file!r}: there is no such GGUF file in model={name!r}; check the name")
    return path
