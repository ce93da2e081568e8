"""Reads the headers of a checkpoint's weight files: names, dtypes and shapes, no numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

_KINDS = (("BF", "bfloat"), ("F", "float"), ("I", "int"), ("U", "uint"), ("C", "complex"))
"""Prefixes of safetensors' dtype names, and torch's."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file describes it.

    Attributes:
        dtype: torch's name of the dtype, "float8_e4m3" and the like without a suffix.
        shape: sizes of its dims.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_whole_number(self) -> bool:
        """True if it contains integers."""
        return self.dtype.startswith(("int", "uint"))

    @property
    def is_narrow_float(self) -> bool:
        """True if it contains floats of 8 bits or fewer, which are meaningless without a scale."""
        return self.dtype.startswith(("float8", "float6", "float4"))


def of_files(files: list[str]) -> dict[str, StoredTensor]:
    """Return the tensors of weight files.

    Raises:
        ValueError: a file cannot be read; the message names it.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= _of_safetensors(file) if file.endswith(".safetensors") else _of_torch(file)
    return found


def weight_files(name: str, explicit: str | None = None, pattern: str | None = None) -> list[str]:
    """Return paths of the weight files of a folder or hub id, in the order in which transformers looks for them.

    Args:
        name: a folder or hub id.
        explicit: the file that the checkpoint's config names.
        pattern: pattern of names that have precedence, in a folder.

    Raises:
        ValueError: there is none; the message mentions GGUF files in the folder.
    """
    if pattern is not None and (found := sorted(map(str, Path(name).glob(pattern)))):
        return found
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    for wanted in (explicit,) if explicit else names:
        path = cached_file(
            name,
            wanted,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if path is None:
            continue
        return list(get_checkpoint_shard_files(name, path)[0]) if path.endswith(".index.json") else [path]
    ggufs = sorted(Path(name).glob("*.gguf"))
    if ggufs:
        raise ValueError(f"it has no weights but {ggufs[0].name!r}; pass that file, or gguf_file={ggufs[0].name!r}")
    raise ValueError(
        f"it holds none of {', '.join(names)}" if not explicit else f"it holds no {explicit}, which its config names"
    )


def _of_safetensors(file: str) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            return {key: StoredTensor(_dtype(s.get_dtype()), tuple(s.get_shape())) for key, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{os.path.basename(file)} cannot be read as safetensors: {error}") from error


def _dtype(name: str) -> str:
    for short, long in _KINDS:
        if name.startswith(short) and name[len(short) : len(short) + 1].isdigit():
            return long + name[len(short) :].lower()
    return name.lower()


def _of_torch(file: str) -> dict[str, StoredTensor]:
    """Read a file of ``torch.save``. Only tensors are unpickled; on the meta device they have no data."""
    try:
        try:
            loaded = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        except RuntimeError:  # files of old torch versions cannot be mapped
            loaded = torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:
        # torch would advise to load it unsafely, which runs any code in the file.
        raise ValueError(
            f"{os.path.basename(file)} is truncated, or contains more than tensors; download it again, or get the "
            "checkpoint as safetensors"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{os.path.basename(file)} holds a {type(loaded).__name__}, not a dict of tensors")
    return {
        str(key): StoredTensor(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in loaded.items()
        if isinstance(value, torch.Tensor)
    }
