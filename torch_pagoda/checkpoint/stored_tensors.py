"""What a checkpoint's weight files hold, by their headers alone: names, dtypes and shapes, no numbers."""

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
"""How the names of safetensors' dtypes begin, and torch's."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file describes it.

    Attributes:
        dtype: torch's name of it, "float8_e4m3" and the like without a suffix.
        shape: its sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_whole_number(self) -> bool:
        """It holds integers."""
        return self.dtype.startswith(("int", "uint"))

    @property
    def is_narrow_float(self) -> bool:
        """It holds floats of 8 bits or fewer, which mean nothing without a scale."""
        return self.dtype.startswith(("float8", "float6", "float4"))


def of_files(files: list[str]) -> dict[str, StoredTensor]:
    """The tensors of weight files.

    Raises:
        ValueError: one cannot be read; the message names it.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= _of_safetensors(file) if file.endswith(".safetensors") else _of_torch(file)
    return found


def weight_files(name: str, explicit: str | None = None, pattern: str | None = None) -> list[str]:
    """Paths of the weight files of a folder or hub id, in the order in which transformers looks for them.

    Args:
        name: a folder or hub id.
        explicit: the file that the checkpoint's config names.
        pattern: of names that are taken before all others, in a folder.

    Raises:
        ValueError: there is none; a folder of GGUF files is named as that.
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
        raise ValueError(f"it holds no weights but {ggufs[0].name!r}; pass that file, or gguf_file={ggufs[0].name!r}")
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
    """Of a file of ``torch.save``. Nothing but tensors is unpickled; on the meta device they hold no numbers."""
    try:
        try:
            loaded = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        except RuntimeError:  # what old versions of torch wrote cannot be mapped
            loaded = torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:
        # What torch advises then is to run whatever the file holds.
        raise ValueError(
            f"{os.path.basename(file)} is torn, or holds something else than tensors; get the file again, or the "
            "checkpoint as safetensors"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{os.path.basename(file)} holds a {type(loaded).__name__}, not a dict of tensors")
    return {
        str(key): StoredTensor(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in loaded.items()
        if isinstance(value, torch.Tensor)
    }
