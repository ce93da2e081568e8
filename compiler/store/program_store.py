"""The folder that programs are kept in."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

DISABLE = "TORCH_PAGODA_DISABLE_PROGRAM_CACHE"
"""Environment variable: anything but "" and "0" compiles every program anew and keeps none."""
_FORMAT = 1
_MOST_FILES = 256


def open_store() -> ProgramStore | None:
    """The store in ``$TORCH_PAGODA_CACHE/programs`` (``~/.cache/torch_pagoda/programs``); None where it is
    disabled."""
    if os.environ.get(DISABLE, "") not in ("", "0"):
        return None
    root = os.environ.get("TORCH_PAGODA_CACHE")
    return ProgramStore((Path(root) if root else Path.home() / ".cache" / "torch_pagoda") / "programs")


class ProgramStore:
    """Programs by key, a file each. A file is written whole or not at all; one that is broken counts as not there.

    Args:
        folder: made when something is kept in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> dict[str, Any] | None:
        """What was kept under ``key``; None where there is nothing that can be read."""
        path = self._path(key)
        try:
            data: dict[str, Any] = torch.load(path, weights_only=True)
            if data["format"] != _FORMAT:
                raise ValueError(f"it has format {data['format']}")
            os.utime(path)  # used now: the last to be pruned
        except FileNotFoundError:
            return None
        except Exception as error:  # cut short, not ours, or not readable
            log.warning("the stored program %s is not used (%s); compiling again", path, error)
            return None
        return data

    def save(self, key: str, data: dict[str, Any]) -> None:
        """Keep ``data``, made of literals, containers and tensors. A folder that cannot be written is no error."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    torch.save({**data, "format": _FORMAT}, file)
                os.replace(name, self._path(key))
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
            self._prune()
        except OSError as error:
            log.warning("the program cannot be kept for later starts: %s", error)

    def discard(self, key: str) -> None:
        """Forget what is kept under ``key``."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.pt"

    def _prune(self) -> None:
        """Delete the programs that were not used for the longest time, and what broken-off writes left."""
        kept = []
        for path in self.folder.iterdir():
            with suppress(OSError):
                written = path.stat().st_mtime
                if path.suffix == ".pt":
                    kept.append((written, path))
                elif path.suffix == ".part" and written < time.time() - 3600:
                    path.unlink()
        for _, path in sorted(kept)[:-_MOST_FILES]:
            with suppress(OSError):
                path.unlink()
