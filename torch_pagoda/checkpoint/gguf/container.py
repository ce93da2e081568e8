"""Reads the head of a GGUF file: metadata, and where each tensor lies. All of it is checked before it is believed.

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
"""Formats of ``struct`` by GGUF's number for a type; 7 is a bool in a byte."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DEEPEST = 4
"""Arrays within arrays that are read."""
_LONGEST_NAME, _LONGEST_STRING = 65535, 1 << 26
_MOST_DIMS = 4
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 13, 32
"""Bytes that an entry of the metadata, and that of a tensor, take at least."""
_MOST_ENTRIES, _MOST_TENSORS, _MOST_VALUES = 1 << 16, 1 << 20, 1 << 24
"""Of the metadata, of a file, and in all arrays together: more of them would take the memory, not serve a model."""
_LARGEST_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32


class BadGguf(ValueError):
    """A GGUF file that cannot be read. The message names the file, the place in it and the remedy."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the head of its file describes it.

    Attributes:
        name: in the file.
        shape: its sizes in torch's order: the last one is of numbers that lie side by side.
        type: how its numbers are stored.
        begin: of its first byte in the file.
        nbytes: that it takes.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    begin: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """What the head of a file says.

    Attributes:
        path: of the file.
        nbytes: its size.
        version: of the format.
        metadata: by key; arrays are lists.
        tensors: by name, in the order of the file.
    """

    path: str
    nbytes: int
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def mapped(self) -> torch.Tensor:
        """All bytes of the file, uint8, mapped and not read.

        Raises:
            BadGguf: the file has changed its size, or cannot be mapped.
        """
        try:
            if os.path.getsize(self.path) != self.nbytes:
                raise OSError("it has changed its size since its head was read")
            return torch.from_file(self.path, shared=False, size=self.nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise BadGguf(f"{Path(self.path).name} cannot be mapped: {error}; get the file again") from error


def is_gguf(file: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a GGUF file does."""
    try:
        with open(file, "rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read and check the head of a file.

    Raises:
        BadGguf: it is none, is torn, or contradicts itself.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < 24:
                raise BadGguf(f"{Path(path).name} has {size} bytes, too few for a GGUF file; get the file again")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Head(path, mapped, size).read()
    except OSError as error:
        raise BadGguf(f"{Path(path).name} cannot be read: {error}") from error


class _Head:
    """Reads a head front to back. Every length is held against the bytes that are left before it is used."""

    def __init__(self, path: str, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at = self._values = 0
        self._place = "its head"

    def read(self) -> GgufFile:
        if self._data[:4] != MAGIC:
            raise self._bad("it does not begin with 'GGUF'")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            what = "it is big-endian" if swapped else f"it is version {version} of GGUF"
            raise self._bad(f"{what}; versions 2 and 3, little-endian, are read", remedy="convert the model again")
        num_tensors, num_entries = self._unpack("QQ")
        self._check_count("entries", num_entries, _SMALLEST_ENTRY, _MOST_ENTRIES)
        self._check_count("tensors", num_tensors, _SMALLEST_TENSOR, _MOST_TENSORS)
        metadata: dict[str, Any] = {}
        for i in range(num_entries):
            self._place = f"entry {i} of its metadata"
            key = self._name()
            self._place = f"its metadata's {key!r}"
            if key in metadata:
                raise self._bad("it is there twice")
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
            raise self._bad(f"it is {found!r:.50}, no power of two up to {_LARGEST_ALIGNMENT}")
        return int(found)

    def _tensor(self, i: int) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Name, shape, type, and offset behind the head, of a tensor."""
        self._place = f"tensor {i}"
        name = self._name()
        self._place = f"its tensor {name!r}"
        (num_dims,) = self._unpack("I")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise self._bad(f"it has {num_dims} dims; 1 to {_MOST_DIMS} are possible")
        dims = self._unpack(f"{num_dims}Q")
        number, offset = self._unpack("IQ")
        if min(dims) < 1 or prod(dims) >= 1 << 60:
            raise self._bad(f"its dims are {list(dims)}")
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
            raise self._bad(f"its type is number {number}, which is not known; {known} are", remedy=_OTHER_FILE)
        if dims[0] % kind.weights:
            raise self._bad(f"its rows of {dims[0]} are not whole blocks of {kind.weights} ({kind.name})")
        return name, tuple(reversed(dims)), kind, offset

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], BlockType, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors with their places, after the checks that these are in the file and apart."""
        start = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in described:
            self._place = f"its tensor {name!r}"
            if name in found:
                raise self._bad("it is there twice")
            nbytes = prod(shape) // kind.weights * kind.nbytes
            if offset % alignment:
                raise self._bad(f"its offset {offset} is no multiple of {alignment}, the file's alignment")
            if start + offset + nbytes > self._size:
                raise self._bad(
                    f"it ends at byte {start + offset + nbytes} of a file of {self._size}",
                    remedy="the file is torn: get it again",
                )
            found[name] = GgufTensor(name, shape, kind, start + offset, nbytes)
        ordered = sorted(found.values(), key=lambda tensor: (tensor.begin, tensor.nbytes))
        for first, second in itertools.pairwise(ordered):
            if first.begin + first.nbytes > second.begin:
                self._place = f"its tensor {second.name!r}"
                raise self._bad(f"it lies over {first.name!r}")
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _NUMBERS:
            (value,) = self._unpack(_NUMBERS[kind])
            return self._bool(value) if kind == _BOOL else value
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._bad(f"its type is number {kind}, which is not known")
        if depth == _DEEPEST:
            raise self._bad(f"arrays within more than {_DEEPEST} arrays are not read")
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
            raise self._bad(f"its name {name[:50]!r} is empty, or cannot be printed")
        return name

    def _string(self, longest: int | None = None) -> str:
        (length,) = self._unpack("Q")
        self._check_count("bytes", length, 1)
        if longest is not None and length > longest:
            raise self._bad(f"its name has {length} bytes; {longest} are possible")
        data = self._data[self._at : self._at + length]
        self._at += length
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(f"a string in it is no UTF-8: {data[:20]!r}") from error

    def _unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        if self._at + size > self._size:
            raise self._bad("the file ends there", remedy="the file is torn: get it again")
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += size
        return found

    def _check_count(self, of: str, count: int, least: int, most: int = _LONGEST_STRING) -> None:
        """Refuse more things than there are bytes for, or than anyone needs, before any is read."""
        if max(count, self._values if most == _MOST_VALUES else 0) > most:
            raise self._bad(f"it says that {count} {of} follow; {most} are read at most")
        if count * least > self._size - self._at:
            raise self._bad(f"it says that {count} {of} follow, in {self._size - self._at} bytes")

    def _bad(self, what: str, remedy: str = "the file is broken: get it again") -> BadGguf:
        return BadGguf(f"{Path(self._path).name} cannot be read as GGUF: {self._place}: {what}; {remedy}")


_OTHER_FILE = "pass a file of another type, Q8_0 or Q4_K for one, or the float checkpoint"
