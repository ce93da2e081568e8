"""The files of a checkpoint: a digest of what they hold, and their tensors by name, mapped and not read.

Of a quantized checkpoint the digest is of every byte: its codes are what is served, and one of them says as much as
many digits of a float.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from ...passes.graph.cut import Cut
from ..weights.file_pages import FilePages, read_no_more
from ..weights.tensor_contents import tensor_digest, update_samples


class Unread(Protocol):
    """A tensor that is made of others in the files each time it is asked for, as a quantized weight whose codes are
    laid out anew."""

    @property
    def shape(self) -> torch.Size:
        """Its sizes, of a quantized weight ``[*, out, in]``."""

    def whole(self) -> torch.Tensor:
        """All of it."""

    def part(self, cuts: Sequence[Cut]) -> torch.Tensor:
        """What cuts for one rank leave of it, in memory of its own or of the files.

        Raises:
            Refused: a quantized weight has no such part.
        """


Find: TypeAlias = Callable[[str], torch.Tensor | Unread | None]
"""From the name of a tensor to it; None where there is none."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The files that a model of a class of transformers' own is loaded from.

    Attributes:
        weights: paths of safetensors files, or of those that ``raw`` maps.
        texts: what other files say of the model, by name.
        dtype: that weights are converted to; None for the checkpoint's own.
        read: of a quantized checkpoint, a function of the dtype in which quantized weights are shown. It yields the
            tensors that a float checkpoint would hold behind their names, those weights as ``StoredWeight``. None for
            a float checkpoint.
        find: likewise, a function of that dtype, and of whether parts of the tensors will be read; it returns one
            that finds each of these tensors. None where they are read all at once.
        raw: of files of another kind, a function that maps their tensors and raises ``ValueError`` where it cannot.
        known: digests of the tensors, by what the system says of the files.
    """

    weights: Sequence[str]
    texts: Mapping[str, str]
    dtype: torch.dtype | None = None
    read: Callable[[torch.dtype], Iterable[tuple[str, torch.Tensor]]] | None = None
    find: Callable[[torch.dtype, bool], Find] | None = None
    raw: Callable[[], dict[str, torch.Tensor]] | None = None
    known: dict[Hashable, str] = field(default_factory=dict, compare=False, repr=False)

    def tensors(self, *, in_parts: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of all files by name, in the files' dtypes, mapped anew: a program takes the data of its own.

        Args:
            in_parts: parts of them will be read, see ``file_pages.read_no_more``; files of another kind are read as
                the system likes.

        Raises:
            ValueError: a file cannot be read.
        """
        if self.raw is not None:
            return self.raw()
        found: dict[str, torch.Tensor] = {}
        try:
            for path in self.weights:
                with safe_open(path, framework="pt", device="cpu") as file:
                    if in_parts:
                        read_no_more(path)
                    found.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be mapped: {error}") from error
        return found

    def of_a_float_checkpoint(self, dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors by the names that a float checkpoint has, quantized ones as they are stored, shown in
        ``dtype``.

        Raises:
            ValueError: a file, or a quantized weight, cannot be read.
        """
        return self.tensors().items() if self.read is None else self.read(dtype)

    def finder(self, dtype: torch.dtype, *, in_parts: bool = False) -> Find:
        """A function that finds the same tensors by their names; ``in_parts`` as for ``tensors``.

        Raises:
            ValueError: a file cannot be read.
        """
        if self.find is not None:
            return self.find(dtype, in_parts)
        return (self.tensors(in_parts=in_parts) if self.read is None else dict(self.read(dtype))).get

    def contents(self) -> dict[str, Any]:
        """What tells one checkpoint from another: texts, and names, dtypes, shapes and samples of all tensors; all of
        the tensors where they are quantized."""
        state = self.state()
        if state not in self.known:  # a first start asks twice
            self.known[state] = self._digest()
        return {"texts": dict(self.texts), "dtype": str(self.dtype), "tensors": self.known[state]}

    def state(self) -> tuple[tuple[int, ...], ...]:
        """What the system says of the files, which is another once one of them is written."""
        stats = map(os.stat, self.weights)
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def are_as(self, state: Hashable) -> bool:
        """Whether the system says the same of the files as ``state``."""
        try:
            return self.state() == state
        except OSError:
            return False

    def _digest(self) -> str:
        digest = hashlib.sha256()
        tensors = self.tensors()
        if self.read is None:
            for name, tensor in tensors.items():
                digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
                update_samples(digest, tensor)
            return digest.hexdigest()
        pages = FilePages(tensors.values())

        def hashed(tensor: torch.Tensor) -> str:
            found = tensor_digest(tensor)
            pages.drop(tensor.data_ptr(), tensor.nbytes)
            return found

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            wholes = pool.map(hashed, tensors.values())
            for (name, tensor), whole in zip(tensors.items(), wholes, strict=True):
                digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{whole}\0".encode())
        return digest.hexdigest()


def sample_digest(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """A digest of a contiguous tensor's dtype, shape and samples, once it is converted to ``dtype``."""
    digest = hashlib.sha256(f"{dtype or tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    update_samples(digest, tensor, dtype)
    return digest.hexdigest()
