"""Reads the tensors of a quantized checkpoint under the names of a float one, with its weights as stored."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..compiler.weights.file_pages import FilePages, read_no_more
from ..passes.graph.cut import Cut
from ..passes.sharding.slices import part_of
from ..runtime.ops.linear.stored_weight import StoredWeight, stored_parts
from .quantized import Method, broken, refusal, split_name
from .readers.module_settings import settings_of
from .readers.parts import BadTensor, Layout, Quantized
from .stored_tensors import StoredTensor

logger = logging.getLogger(__name__)


def read_quantized(
    name: str, method: Method, files: list[str], tensors: Mapping[str, StoredTensor], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors under the names of a state dict: quantized weights as ``StoredWeight``, all
    others unchanged. They are read one by one.

    Args:
        name: folder or hub id.
        method: method of quantization.
        files: its weight files.
        tensors: their tensors.
        dtype: dtype that quantized weights appear in.

    Raises:
        ValueError: a tensor is missing, broken, contradicts the config, or contains codes without a known meaning;
            the message names it.
    """
    return QuantizedFiles(name, method, files, tensors, dtype).all()


class QuantizedFiles:
    """The files of a quantized checkpoint, whose tensors are read one by one.

    Args:
        name, method, files, tensors, dtype: as for ``read_quantized``.
        in_parts: parts of the tensors will be read. The system then reads nothing around those of methods that read
            weights in parts.

    Raises:
        ValueError: a file cannot be read.
    """

    def __init__(
        self,
        name: str,
        method: Method,
        files: list[str],
        tensors: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        *,
        in_parts: bool = False,
    ) -> None:
        self._name, self._method, self._tensors, self._dtype = name, method, tensors, dtype
        self._owners: dict[str, dict[str, str]] = defaultdict(dict)
        for key in tensors:
            owner, leaf = split_name(key)
            self._owners[owner][leaf] = key
        self._read = _opened(files, name)
        if in_parts and method.layout is not None:
            for file in files:
                read_no_more(file)
        self._pages: FilePages | None = None
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``read_quantized``.

        Raises:
            ValueError: as there.
        """
        for owner, leaves in self._owners.items():
            if self._has_codes(owner):
                yield from self._weights(owner, self._module(owner)).items()
                continue
            for leaf, key in leaves.items():
                _check_plain(self._name, self._method, key, leaf, self._tensors[key])
                yield key, self._read(key)

    def find(self, key: str) -> torch.Tensor | QuantizedTensor | None:
        """Return one of the tensors of ``all``; those made of codes are read when they are asked for."""
        owner, leaf = split_name(key)
        if owner not in self._owners:
            return None
        if self._has_codes(owner) and (leaf == "weight" or key not in self._tensors):
            return QuantizedTensor(self, owner, key)
        return self._read(key) if key in self._tensors else None

    def shape(self, owner: str, key: str) -> torch.Size:
        """Return the sizes of a weight as it is stored, ``[*, out, in]``.

        Raises:
            ValueError: as ``whole``.
        """
        if (layout := self._layout(self._module(owner))) is not None:
            return torch.Size((layout.outputs, layout.inputs))
        return _as_stored(self.whole(owner, key)).shape

    def whole(self, owner: str, key: str) -> torch.Tensor:
        """Return a weight of a module. What was read last is kept, as a module may have several.

        Raises:
            ValueError: the module has no such weight, or as ``read_quantized``.
        """
        if self._last[0] != owner:
            self._last = ("", {})
            self._last = (owner, self._weights(owner, self._module(owner)))
        return self._one_of(self._last[1], key)

    def part(self, owner: str, key: str, cuts: Sequence[Cut]) -> torch.Tensor:
        """Return what cuts for one rank leave of a weight as it is stored, in memory of its own or of the files.

        Raises:
            ValueError: as ``whole``.
            Refused: the weight has no such part.
        """
        module = self._module(owner)
        if (layout := self._layout(module)) is None:
            weight = _as_stored(self.whole(owner, key))
        else:
            held = layout.holding(cuts)
            weight = self._one_of(self._weights(owner, replace(module, held=held)), key)
            cuts = held.within(cuts)
        for cut in cuts:
            weight = part_of(weight, cut, 0)
        return _alone(weight)

    def _layout(self, module: Quantized) -> Layout | None:
        try:
            return None if self._method.layout is None else self._method.layout(module)
        except BadTensor as error:
            raise broken(self._name, self._method.name, str(error)) from error

    def _one_of(self, weights: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
        if key not in weights:
            raise ValueError(f"model={self._name!r} has no tensor {key!r}")
        return weights[key]

    def _has_codes(self, owner: str) -> bool:
        return any(self._method.is_companion(leaf) for leaf in self._owners[owner])

    def _module(self, owner: str) -> Quantized:
        leaves = self._owners[owner]
        found = {leaf: self._read(key) for leaf, key in leaves.items()}
        kind = self._method.kinds.get(leaves.get("weight", ""), "")
        try:
            return Quantized(owner, found, settings_of(self._method.settings, owner), self._dtype, kind, leaves)
        except BadTensor as error:
            raise broken(self._name, self._method.name, str(error)) from error

    def _weights(self, owner: str, module: Quantized) -> dict[str, torch.Tensor]:
        """Return the tensors that a reader makes of a module's."""
        found, leaves = module.tensors, self._owners[owner]
        try:
            weights = self._method.read(module)
            module.check_all_read()
        except BadTensor as error:
            raise broken(self._name, self._method.name, str(error)) from error
        for leaf, key in leaves.items():
            if weights.get(key) is found[leaf]:
                _check_codes(self._name, self._method, key, leaf, self._tensors[key])
        if self._pages is None:
            self._pages = FilePages(found.values())
        _drop_copied(found, weights, self._pages)
        return weights


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of a module with codes, made of them each time it is asked for (``compiler``'s ``Unread``).

    Attributes:
        files: files of the module.
        owner: name of the module.
        key: name of the tensor.
    """

    files: QuantizedFiles
    owner: str
    key: str

    @property
    def shape(self) -> torch.Size:
        """Return its sizes as it is stored, ``[*, out, in]``."""
        return self.files.shape(self.owner, self.key)

    def whole(self) -> torch.Tensor:
        """Return all of it."""
        return self.files.whole(self.owner, self.key)

    def part(self, cuts: Sequence[Cut]) -> torch.Tensor:
        """Return what cuts for one rank leave of it."""
        return self.files.part(self.owner, self.key, cuts)


def _as_stored(weight: torch.Tensor) -> torch.Tensor:
    return weight.replaced(transposed=False) if isinstance(weight, StoredWeight) else weight


def _alone(part: torch.Tensor) -> torch.Tensor:
    """Return a part in memory that holds nothing else; parts of mapped files stay there."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        return tensor.clone() if storage.resizable() and storage.nbytes() > tensor.nbytes else tensor

    return part.each(copied) if isinstance(part, StoredWeight) else copied(part)


def unpacked_weights(
    method: Method, state: Mapping[str, torch.Tensor], tensors: Mapping[str, StoredTensor]
) -> set[str]:
    """Yield names of weights that a reader unpacked to floats, and whose codes have the same name in the files."""
    if not method.unpacks:
        return set()
    there = {key: tensor for key, tensor in tensors.items() if key in state}
    return {
        key
        for key, tensor in there.items()
        if tuple(tensor.shape) != tuple(state[key].shape)
        or (tensor.is_whole_number and state[key].is_floating_point())
    }


def warn_of_unpacked(name: str, method: Method, count: int, dtype: torch.dtype) -> None:
    """Warn that weights are served as floats."""
    logger.warning(
        "model=%r is quantized (%s) with codes that no kernel multiplies: %d weights are unpacked to %s and cost its "
        "memory and time; pass the float checkpoint with quantization='int8' or 'int4' to save both",
        name,
        method.name,
        count,
        str(dtype).removeprefix("torch."),
    )


def _drop_copied(found: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], pages: FilePages) -> None:
    """Release the memory of a file's tensors that no weight uses."""
    parts: list[torch.Tensor] = []
    for weight in weights.values():
        parts += stored_parts(weight) if isinstance(weight, StoredWeight) else [weight]
    held = [(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in parts]
    for tensor in found.values():
        first, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if not any(first < begin + count and begin < first + size for begin, count in held):
            pages.drop(first, size)


def _check_plain(name: str, method: Method, key: str, leaf: str, tensor: StoredTensor) -> None:
    """Reject codes without their companion tensors, and plain tensors described as codes."""
    _check_codes(name, method, key, leaf, tensor)
    if method.kinds.get(key, "FLOAT") != "FLOAT":
        raise refusal(
            name, method.name, f"{key!r} is described as {method.kinds[key]!r} but stored as {tensor.dtype}"
        )


def _check_codes(name: str, method: Method, key: str, leaf: str, tensor: StoredTensor) -> None:
    """Reject tensors with a dtype of codes."""
    if tensor.is_narrow_float or (tensor.is_whole_number and leaf == "weight"):
        raise refusal(name, method.name, f"{key!r} is {tensor.dtype} without a scale")


def _opened(files: list[str], name: str) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a tensor by its name."""
    torn = [file for file in files if not file.endswith(".safetensors")]
    if torn:
        raise ValueError(
            f"model={name!r} is quantized, but {Path(torn[0]).name} is not safetensors; pass the checkpoint as "
            "safetensors"
        )
    of: dict[str, Any] = {}
    for file in files:
        try:
            opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model={name!r}: {Path(file).name} cannot be read: {error}") from error
        of.update(dict.fromkeys(opened.keys(), opened))

    def read(key: str) -> torch.Tensor:
        return of[key].get_tensor(key)  # type: ignore[no-any-return]

    return read
