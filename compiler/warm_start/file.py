"""The folder that programs are kept in."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...passes.graph.notes import Boundary, PackedWeight
from ...passes.graph.record import PassRecord, Rejection, Route
from ...runtime.ops.linear.quantized_weight import Quantization
from ...runtime.ops.linear.weight_format import InputScale
from ...runtime.parallel.stage_values import StageValue
from ...runtime.private_folder import cache_folder, check_private_folder, make_private_folder, open_private_file
from ...runtime.program import CacheSpec, StateSpec
from ..link.linkage import Linkage
from ..report import CompileReport, PassCheck, SizeCheck, Verdict
from .canonical import CanonicalGraph
from .record import Record, Sources
from .restore import StoredProgram, StoredReference
from .shipment import Lowering, Shipment
from .stored_sources import StoredSource
from .streamed import StreamedModel

T = TypeVar("T")

log = logging.getLogger(__name__)

DISABLE = "TORCH_PAGODA_DISABLE_PROGRAM_CACHE"
"""Environment variable: anything but "" and "0" compiles every program anew and keeps none."""
_MARK = b"pagoda program 5\n"
_SUFFIX = ".program"
_RECORDS = (
    *(
        StoredProgram,
        StoredReference,
        StreamedModel,
        Record,
        Sources,
        Shipment,
        Lowering,
        CanonicalGraph,
        StoredSource,
        Linkage,
        CacheSpec,
        StateSpec,
        PackedWeight,
        Boundary,
        StageValue,
    ),
    *(Quantization, InputScale, CompileReport, PassRecord, Rejection, Route, Verdict, PassCheck, SizeCheck),
    frozenset,
)
"""Classes of what files hold: data that no code runs to make."""
_MOST_FILES = 256
_MOST_BYTES = 256 << 20
"""Of a file: more than its tables and its graph can take."""


def open_store() -> ProgramStore | None:
    """The store in ``$TORCH_PAGODA_CACHE/programs`` (``~/.cache/torch_pagoda/programs``); None where it is
    disabled."""
    if os.environ.get(DISABLE, "") not in ("", "0"):
        return None
    return ProgramStore(cache_folder() / "programs")


class ProgramStore:
    """Programs by key, a file each. A file is written whole or not at all; one that is broken counts as not there, as
    does one that others may have written (``runtime.private_folder``).

    A file is a mark, the SHA-256 of its key and of what follows, and that: a ``torch.save``. Nothing of it is parsed
    before the digest is right.

    Args:
        folder: made, for this user alone, when something is kept in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str, kind: type[T]) -> T | None:
        """What was kept under ``key``; None where there is nothing, or nothing that is as it was written.

        Args:
            key: its name.
            kind: its class.
        """
        path = self._path(key)
        try:
            check_private_folder(self.folder)
            with open_private_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size > _MOST_BYTES:
                    raise ValueError(f"it has {size} bytes")
                body = _body(file.read(_MOST_BYTES + 1), key)
            data = from_bytes(body, kind)
        except FileNotFoundError:
            return None
        except Exception as error:  # damaged, not ours, or not readable
            log.warning("not using the stored program %s (%s); recompiling", path, error)
            return None
        with suppress(OSError):  # of a folder that is only read
            os.utime(path)  # used now: the last to be pruned
        return data

    def save(self, key: str, data: Any) -> None:
        """Keep ``data``, made of literals, containers, tensors and ``_RECORDS``. A folder that cannot be written is
        no error."""
        try:
            make_private_folder(self.folder)
            body = to_bytes(data)
            descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MARK + _digest(key, body))
                    file.write(body)
                os.replace(name, self._path(key))
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
            self._prune()
        except OSError as error:
            log.warning("cannot store the program for later starts: %s", error)

    def discard(self, key: str) -> None:
        """Forget what is kept under ``key``."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _prune(self) -> None:
        """Delete the programs that were not used for the longest time, and what broken-off writes left."""
        kept = []
        for path in self.folder.iterdir():
            with suppress(OSError):
                written = path.stat().st_mtime
                if path.suffix != ".part":
                    kept.append((written, path))
                elif written < time.time() - 3600:
                    path.unlink()
        for _, path in sorted(kept)[:-_MOST_FILES]:
            with suppress(OSError):
                path.unlink()


def to_bytes(data: Any) -> memoryview:
    """Data made of literals, containers, tensors and ``_RECORDS``, for ``from_bytes``."""
    body = io.BytesIO()
    torch.save(data, body)
    return body.getbuffer()


def from_bytes(body: memoryview, kind: type[T]) -> T:
    """What ``to_bytes`` was given.

    Args:
        body: what it returned, from another process.
        kind: the class of the data.

    Raises:
        ValueError: it is something else; no code of it was run.
    """
    data = _parsed(body)
    if not isinstance(data, kind):
        raise ValueError(f"it holds no {kind.__name__}")
    return data


def _body(content: bytes, key: str) -> memoryview:
    """What follows the digest in a file that was written under ``key``.

    Raises:
        ValueError: it is another file, or not as it was written.
    """
    start = len(_MARK) + hashlib.sha256().digest_size
    mark, digest, body = content[: len(_MARK)], content[len(_MARK) : start], memoryview(content)[start:]
    if mark != _MARK or digest != _digest(key, body):
        raise ValueError("its digest is wrong: it is damaged, or another program's")
    return body


def _parsed(body: memoryview) -> Any:
    """What ``torch.save`` was given.

    Raises:
        ValueError: it is made of more than literals, containers, tensors and ``_RECORDS``; no more of it was made.
    """
    try:
        with torch.serialization.safe_globals(list(_RECORDS)):
            return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # whose message advises to load it regardless
        raise ValueError("it holds more than data") from None


def _digest(key: str, body: memoryview) -> bytes:
    digest = hashlib.sha256(f"{key}\0".encode())
    digest.update(body)
    return digest.digest()
