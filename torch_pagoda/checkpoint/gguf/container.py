"""Reads the header of a GGUF file: metadata and tensor positions. Everything is checked before use.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from .block_types import BLOCK_TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Formats of ``struct`` by GGUF's type number; 7 is a bool in a byte."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DEEPEST = 4
"""Deepest supported nesting of arrays."""
_LONGEST_NAME, _LONGEST_STRING = 65535, 1 << 26
_MOST_DIMS = 4
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 13, 32
"""Fewest bytes of a metadata entry and of a tensor entry."""
_MOST_ENTRIES, _MOST_TENSORS, _MOST_VALUES = 1 << 16, 1 << 20, 1 << 24
"""Most values of the metadata, of a file, and of all arrays together: more would exhaust memory."""
_LARGEST_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32


class BadGguf(ValueError):
    """A GGUF file that cannot be read. The message names the file, the position in it and the remedy."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the header of its file describes it.

    Attributes:
        name: name in the file.
        shape: sizes in torch's order: numbers along the last dim are contiguous.
        type: storage type of its numbers.
        begin: position of its first byte in the file.
        nbytes: number of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    begin: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """The content of a file's header.

    Attributes:
        path: path of the file.
        nbytes: size of the file.
        version: version of the format.
        metadata: values by key; arrays are lists.
        tensors: tensors by name, in the order of the file.
    """

    path: str
    nbytes: int
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def mapped(self) -> torch.Tensor:
        """Return all bytes of the file, uint8, memory-mapped and not read.

        Raises:
            BadGguf: the size of the file has changed, or the file cannot be mapped.
        """
        try:
            if os.path.getsize(self.path) != self.nbytes:
                raise OSError("its size has changed since its header was read")
            return torch.from_file(self.path, shared=False, size=self.nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise BadGguf(f"{Path(self.path).name} cannot be mapped: {error}; download the file again") from error


def is_gguf(file: str | os.PathLike[str]) -> bool:
    """Return True if the file begins as a GGUF file does."""
    try:
        with open(file, "rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read and check the header of a file.

    Raises:
        BadGguf: the file is not GGUF, is truncated, or contradicts itself.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < 24:
                raise BadGguf(f"{Path(path).name} has {size} bytes, too few for a GGUF file; download the file again")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Head(path, mapped, size).read()
    except OSError as error:
        raise BadGguf(f"{Path(path).name} cannot be read: {error}") from error


class _Head:
    """Reads a header front to back. Every length is checked against the remaining bytes before it is used."""

    def __init__(self, path: str, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at = self._values = 0
        self._place = "its header"

    def read(self) -> GgufFile:
        if self._data[:4] != MAGIC:
            raise self._bad("it does not begin with 'GGUF'")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            what = "it is big-endian" if swapped else f"it is version {version} of GGUF"
            raise self._bad(f"{what}; versions 2 and 3, little-endian, are supported", remedy="convert it again")
        num_tensors, num_entries = self._unpack("QQ")
        self._check_count("entries", num_entries, _SMALLEST_ENTRY, _MOST_ENTRIES)
        self._check_count("tensors", num_tensors, _SMALLEST_TENSOR, _MOST_TENSORS)
        metadata: dict[str, Any] = {}
        for i in range(num_entries):
            self._place = f"entry {i} of its metadata"
            key = self._name()
            self._place = f"its metadata's {key!r}"
            if key in metadata:
                raise self._bad("it occurs twice")
            (kind,) = self._unpack("I")
            metadata[key] = self._value(kind, 0)
        alignment = self._alignment(metadata)
        described = [self._tensor(i) for i in range(num_tensors)]
        return GgufFile(self._path, self._size, version, metadata, self._placed(described, alignment))

    def _alignment(self, metadata: dict[str, Any]) -> int:
        found = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        self._place = "its metadata's 'general.alignment'"
        is_power = isinstance(found, int) and found > 0 and not found & (found - 1)
        if not is_power or found > _LARGEST_ALIGNMENT:
            raise self._bad(f"it is {found!r:.50}, not a power of two up to {_LARGEST_ALIGNMENT}")
        return int(found)

    def _tensor(self, i: int) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Read name, shape, type, and data offset of a tensor."""
        self._place = f"tensor {i}"
        name = self._name()
        self._place = f"its tensor {name!r}"
        (num_dims,) = self._unpack("I")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise self._bad(f"it has {num_dims} dims; 1 to {_MOST_DIMS} are supported")
        dims = self._unpack(f"{num_dims}Q")
        number, offset = self._unpack("IQ")
        if min(dims) < 1 or prod(dims) >= 1 << 60:
            raise self._bad(f"its dims are {list(dims)}")
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
            raise self._bad(f"its type is number {number}, which is unknown; supported: {known}", remedy=_OTHER_FILE)
        if dims[0] % kind.weights:
            raise self._bad(f"its rows of {dims[0]} are not whole blocks of {kind.weights} ({kind.name})")
        return name, tuple(reversed(dims)), kind, offset

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], BlockType, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors with their positions, after checking that these are in the file and do not overlap."""
        start = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in described:
            self._place = f"its tensor {name!r}"
            if name in found:
                raise self._bad("it occurs twice")
            nbytes = prod(shape) // kind.weights * kind.nbytes
            if offset % alignment:
                raise self._bad(f"its offset {offset} is not a multiple of the file's alignment, {alignment}")
            if start + offset + nbytes > self._size:
                raise self._bad(
                    f"it ends at byte {start + offset + nbytes}, but the file has {self._size}",
                    remedy="the file is truncated: download it again",
                )
            found[name] = GgufTensor(name, shape, kind, start + offset, nbytes)
        ordered = sorted(found.values(), key=lambda tensor: (tensor.begin, tensor.nbytes))
        for first, second in itertools.pairwise(ordered):
            if first.begin + first.nbytes > second.begin:
                self._place = f"its tensor {second.name!r}"
                raise self._bad(f"it overlaps {first.name!r}")
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _NUMBERS:
            (value,) = self._unpack(_NUMBERS[kind])
            return self._bool(value) if kind == _BOOL else value
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._bad(f"its type is number {kind}, which is unknown")
        if depth == _DEEPEST:
            raise self._bad(f"arrays nested more than {_DEEPEST} deep are not supported")
        inner, count = self._unpack("IQ")
        self._values += count
        if inner in _NUMBERS:
            self._check_count("numbers", count, struct.calcsize(f"={_NUMBERS[inner]}"), _MOST_VALUES)
            values = self._unpack(f"{count}{_NUMBERS[inner]}")
            return [self._bool(value) for value in values] if inner == _BOOL else list(values)
        self._check_count("values", count, 8 if inner == _STRING else 12, _MOST_VALUES)
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _bool(self, value: int) -> bool:
        if value > 1:
            raise self._bad(f"a bool in it is {value}")
        return bool(value)

    def _name(self) -> str:
        name = self._string(_LONGEST_NAME)
        if not name or not name.isprintable():
            raise self._bad(f"its name {name[:50]!r} is empty or not printable")
        return name

    def _string(self, longest: int | None = None) -> str:
        (length,) = self._unpack("Q")
        self._check_count("bytes", length, 1)
        if longest is not None and length > longest:
            raise self._bad(f"its name has {length} bytes; at most {longest} are allowed")
        data = self._data[self._at : self._at + length]
        self._at += length
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(f"a string in it is not UTF-8: {data[:20]!r}") from error

    def _unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        if self._at + size > self._size:
            raise self._bad("the file ends here", remedy="the file is truncated: download it again")
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += size
        return found

    def _check_count(self, of: str, count: int, least: int, most: int = _LONGEST_STRING) -> None:
        """Reject a count that exceeds the remaining bytes or the limits, before anything is read."""
        if max(count, self._values if most == _MOST_VALUES else 0) > most:
            raise self._bad(f"it announces {count} {of}; at most {most} are supported")
        if count * least > self._size - self._at:
            raise self._bad(f"it announces {count} {of} in {self._size - self._at} bytes")

    def _bad(self, what: str, remedy: str = "the file is broken: download it again") -> BadGguf:
        return BadGguf(f"{Path(self._path).name} cannot be read as GGUF: {self._place}: {what}; {remedy}")


_OTHER_FILE = "pass a file of another type, Q8_0 or Q4_K for one, or the float checkpoint"
