"""A model in one GGUF file or a set of parts: its config, and its tensors under transformers' names."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...compiler.weights.file_pages import FilePages
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.ops.linear.weight_format import SCALE_DTYPES
from .architectures import Architecture, Part
from .block_types import READ, Numbers, packed_codes
from .config import Floats, Sizes, Values, check_known, read_config
from .container import BadGguf, GgufFile, GgufTensor, read_gguf
from .metadata import Metadata

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST_AT_ONCE = 1 << 20
"""Number of weights decoded together."""


@dataclass(frozen=True)
class GgufCheckpoint:
    """A model as its files describe it. Only the files' headers have been read.

    Attributes:
        path: path of the first file.
        files: all files.
        architecture: architecture with its tensors.
        values: values of the config, including ``model_type``.
        sizes: sizes of the tensors.
        vectors: names of tensors that the config is derived from.
    """

    path: str
    files: tuple[GgufFile, ...]
    architecture: Architecture
    values: Values
    sizes: Sizes
    vectors: frozenset[str]

    def config(self) -> Any:
        """Build the config, an object of transformers.

        Raises:
            BadGguf: transformers rejects the values.
        """
        from transformers import AutoConfig

        values = dict(self.values)
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        except Exception as error:
            raise BadGguf(
                f"{Path(self.path).name}: transformers rejects the config from its metadata: {error}; pass the float "
                "checkpoint"
            ) from error
        config.name_or_path = self.path
        return config

    @property
    def description(self) -> dict[str, str]:
        """Texts that distinguish models with equal tensor bytes."""
        heads = repr([(file.version, file.metadata, file.tensors) for file in self.files])
        return {
            "config.json": json.dumps(self.values, sort_keys=True),
            "heads": hashlib.sha256(heads.encode()).hexdigest(),
        }

    def raw(self) -> dict[str, torch.Tensor]:
        """Return the bytes of each tensor by its name in the file, uint8, memory-mapped and not read."""
        mapped = [(file, file.mapped()) for file in self.files]
        return {
            tensor.name: data[tensor.begin : tensor.begin + tensor.nbytes]
            for file, data in mapped
            for tensor in file.tensors.values()
        }

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors under the names of transformers' model, read one by one: quantized matrices as
        ``StoredWeight``, plain floats unchanged.

        Args:
            dtype: dtype that quantized weights appear in.

        Raises:
            BadGguf: a file cannot be mapped, or a scale in it is NaN or infinite; the message names the tensor.
        """
        mapped = {file.path: file.mapped() for file in self.files}
        pages = FilePages(mapped.values())
        for path, part, name, tensor in self.placed:
            data = mapped[path][tensor.begin : tensor.begin + tensor.nbytes]
            weight = self._weight(part, tensor, data, dtype)
            if tensor.type.dtype is None:
                pages.drop(data.data_ptr(), data.nbytes)
            if part.change == "stacked":
                yield from ((name.format(expert), weight[expert]) for expert in range(weight.shape[0]))
            else:
                yield name, weight

    @cached_property
    def placed(self) -> list[tuple[str, Part, str, GgufTensor]]:
        """Return file, part, name in the model, and description of each tensor.

        Raises:
            BadGguf: a tensor is missing, unexpected, of the wrong shape, or of an unsupported type.
        """
        known: dict[str, tuple[Part, str]] = {part.name: (part, part.target) for part in self.architecture.outside}
        for layer in range(self.sizes.num_layers):
            for part in self.architecture.layer:
                known[f"blk.{layer}.{part.name}"] = part, f"model.layers.{layer}.{part.target}"
        where = {name: (file.path, tensor) for file in self.files for name, tensor in file.tensors.items()}
        for name in known.keys() - where.keys():
            if not known[name][0].optional:
                what = f"tensor {name!r} of {self.values['model_type']} is missing"
                raise self._bad(what, "download the file again")
        found = []
        for name, (path, tensor) in where.items():
            if name not in known:
                if name not in self.vectors:
                    raise self._bad(f"tensor {name!r} does not belong to a {self.values['model_type']} model", _FLOAT)
                continue
            part, target = known[name]
            self._check(part, tensor)
            found.append((path, part, target, tensor))
        return found

    def _check(self, part: Part, tensor: GgufTensor) -> None:
        shape = tuple(self.sizes.of[letter] for letter in part.sizes)
        flat = part.change == "flat" and tensor.shape == shape[1:]
        if tensor.shape != shape and not flat:
            raise self._bad(
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}, but its metadata implies {list(shape)}",
                "the file is broken: download it again",
            )
        dtype = tensor.type.dtype
        if tensor.type.take_apart is None and (dtype is None or not dtype.is_floating_point):
            raise self._bad(
                f"tensor {tensor.name!r} has the unsupported type {tensor.type.name}; supported: {', '.join(READ)}",
                "pass a file of a supported type, or the float checkpoint",
            )

    def _weight(self, part: Part, tensor: GgufTensor, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the model, with llama.cpp's changes undone."""
        shape = tuple(self.sizes.of[letter] for letter in part.sizes)
        kind = tensor.type
        rows = data.view(prod(shape[:-1]), -1)
        if part.change == "rotary":
            heads = self.sizes.num_heads if part.sizes[0] == "q" else self.sizes.num_kv_heads
            rows = _apart(data.view(shape[0], -1), heads)
        if kind.dtype is not None:
            weight = _viewed(rows, kind.dtype).view(shape)
        else:
            weight = self._of_blocks(tensor, rows, shape, dtype)
        if part.change == "plus one":
            weight = weight.float() - 1  # in float32: fewer bits would lose values near 0
        return weight

    def _of_blocks(
        self, tensor: GgufTensor, rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Decode a weight from rows of blocks, some rows at a time."""
        kind, (*lead, inputs) = tensor.type, shape
        form = kind.form
        assert form is not None
        heads = rows.shape[0], form.num_groups(inputs)
        codes = torch.empty(rows.shape[0], inputs // form.per_byte, dtype=torch.uint8)
        scales = torch.empty(heads, dtype=SCALE_DTYPES[form.scale])
        zeros = None if form.zero_dtype is None else torch.empty(heads, dtype=form.zero_dtype)
        step = max(1, _MOST_AT_ONCE // inputs)
        for first in range(0, rows.shape[0], step):
            some = rows[first : first + step]
            numbers, at = self._numbers(tensor, some), slice(first, first + len(some))
            codes[at] = packed_codes(numbers.codes, kind.bits).view(len(some), -1)
            scales[at] = numbers.scales.view(len(some), -1)
            if zeros is not None and numbers.offsets is not None:
                zeros[at] = numbers.offsets.view(len(some), -1)
        parts = [None if part is None else part.view(*lead or [1], -1) for part in (codes, scales, zeros)]
        weight = StoredWeight(form, *parts, dtype=dtype)  # type: ignore[arg-type]
        return weight if lead else weight.dense()[0]

    def _numbers(self, tensor: GgufTensor, rows: torch.Tensor) -> Numbers:
        assert tensor.type.take_apart is not None
        numbers = tensor.type.take_apart(rows.reshape(-1, tensor.type.nbytes))
        for floats in (numbers.scales, numbers.offsets):
            if floats is not None and not bool(floats.isfinite().all()):
                raise self._bad(
                    f"a scale in tensor {tensor.name!r} is NaN or infinite", "the file is broken: download it again"
                )
        return numbers

    def _bad(self, what: str, remedy: str) -> BadGguf:
        return BadGguf(f"{Path(self.path).name}: {what}; {remedy}")


_FLOAT = "pass the float checkpoint"


def _apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows so that those rotated together are half a head apart instead of neighbors."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _viewed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as numbers of the dtype, in place if their alignment allows it."""
    flat = data.reshape(-1)
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


def open_gguf(path: str | os.PathLike[str]) -> GgufCheckpoint:
    """Open the model of a file, or of all parts of which it is the first.

    Raises:
        BadGguf: a file is not GGUF, truncated, inconsistent or unsupported; the message names the file, the position
            in it and the remedy.
    """
    path = os.fspath(path)
    try:
        stat = os.stat(path)
    except OSError as error:
        raise BadGguf(f"{Path(path).name} cannot be read: {error}") from error
    return _opened(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2)
def _opened(path: str, version: tuple[int, ...]) -> GgufCheckpoint:
    """Open a file of this version; cached, because headers with a vocabulary take a while to read."""
    files = _files(path)
    said = Metadata(path, files[0].metadata)
    check_known(said)
    names = {name: tensor.shape for file in files for name, tensor in file.tensors.items()}
    types = {tensor.type.dtype for file in files for name, tensor in file.tensors.items() if len(tensor.shape) > 1}
    vectors = _Vectors(files, said)
    floats = Floats(names, _dtype_of(types), vectors.of)
    layers = {int(match[1]) for name in names if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if not said.whole("block_count") == len(layers) == max(layers, default=-1) + 1:
        raise said.bad(f"its block_count is {said.whole('block_count')}, but it has tensors of {len(layers)} layers")
    architecture, values, sizes = read_config(said, floats)
    found = GgufCheckpoint(path, files, architecture, values, sizes, frozenset(vectors.read))
    _ = found.placed
    return found


def _dtype_of(types: set[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype of a model whose matrices have these; None if any is quantized."""
    if None in types or not types:
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in types:
            return dtype
    return torch.float32


class _Vectors:
    """Reads small float vectors from which the config is derived.

    Attributes:
        read: names of the vectors read so far.
    """

    def __init__(self, files: tuple[GgufFile, ...], said: Metadata) -> None:
        self._files, self._said = files, said
        self.read: set[str] = set()

    def of(self, name: str) -> list[float] | None:
        """Return the floats of a tensor; None if there is no such tensor."""
        self.read.add(name)
        for file in self._files:
            tensor = file.tensors.get(name)
            if tensor is None:
                continue
            if tensor.type.dtype is not torch.float32 or len(tensor.shape) != 1 or tensor.nbytes > _MOST_AT_ONCE:
                raise self._said.bad(f"tensor {name!r} is {tensor.type.name} {list(tensor.shape)}, not a vector")
            data = file.mapped()[tensor.begin : tensor.begin + tensor.nbytes]
            floats: list[float] = _viewed(data, torch.float32).tolist()
            return floats
        return None


def _files(path: str) -> tuple[GgufFile, ...]:
    """Return a file and its other parts."""
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    file = Path(path)
    if count in (0, 1):
        return (first,)
    number, match = first.metadata.get("split.no"), _SPLIT.fullmatch(file.name)
    if match is None or type(count) is not int or match[3] != f"{count:05}" or number != int(match[2]) - 1:
        raise BadGguf(
            f"{file.name} is one of several parts ({number!r:.20} of {count!r:.20}) but is not named like one; "
            "rename it as llama.cpp did, NAME-00001-of-0000N.gguf"
        )
    if number != 0:
        raise BadGguf(
            f"{file.name} is part {match[2]} of {count}; pass the first part, {match[1]}-00001-of-{match[3]}.gguf"
        )
    files = [first]
    for i in range(1, count):
        other = file.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf")
        if not other.is_file():
            raise BadGguf(f"{file.name} is the first of {count} parts, but {other.name} is missing; download it, too")
        files.append(read_gguf(other))
        if (files[-1].metadata.get("split.no"), files[-1].metadata.get("split.count")) != (i, count):
            raise BadGguf(f"{other.name} is not part {i + 1} of {count}; download it again")
    seen: set[str] = set()
    for one in files:
        twice = seen & one.tensors.keys()
        if twice:
            raise BadGguf(f"{Path(one.path).name}: tensor {min(twice)!r} is in another part, too; download it again")
        seen |= one.tensors.keys()
    return tuple(files)
