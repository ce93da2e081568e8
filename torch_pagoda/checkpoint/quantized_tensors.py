"""Reads the tensors of a quantized checkpoint under the names of a float one, with its weights as stored."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..compiler.weights.file_pages import FilePages
from ..runtime.ops.linear.stored_weight import StoredWeight, stored_parts
from .quantized import Method, broken, refusal, split_name
from .readers.module_settings import settings_of
from .readers.parts import BadTensor, Quantized
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
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for key in tensors:
        owner, leaf = split_name(key)
        owners[owner][leaf] = key
    pages: FilePages | None = None
    with _opened(files, name) as read:
        for owner, leaves in owners.items():
            if not any(method.is_companion(leaf) for leaf in leaves):
                for leaf, key in leaves.items():
                    _check_plain(name, method, key, leaf, tensors[key])
                    yield key, read(key)
                continue
            found = {leaf: read(key) for leaf, key in leaves.items()}
            kind = method.kinds.get(leaves.get("weight", ""), "")
            try:
                module = Quantized(owner, found, settings_of(method.settings, owner), dtype, kind, leaves)
                weights = method.read(module)
                module.check_all_read()
            except BadTensor as error:
                raise broken(name, method.name, str(error)) from error
            for leaf, key in leaves.items():
                if weights.get(key) is found[leaf]:
                    _check_codes(name, method, key, leaf, tensors[key])
            if pages is None:
                pages = FilePages(found.values())
            _drop_copied(found, weights, pages)
            yield from weights.items()


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


@contextlib.contextmanager
def _opened(files: list[str], name: str) -> Iterator[Callable[[str], torch.Tensor]]:
    """Yield a function that reads a tensor by its name, from files that stay open meanwhile."""
    torn = [file for file in files if not file.endswith(".safetensors")]
    if torn:
        raise ValueError(
            f"model={name!r} is quantized, but {Path(torn[0]).name} is not safetensors; pass the checkpoint as "
            "safetensors"
        )
    with contextlib.ExitStack() as stack:
        of: dict[str, object] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"model={name!r}: {Path(file).name} cannot be read: {error}") from error
            of.update(dict.fromkeys(opened.keys(), opened))

        def read(key: str) -> torch.Tensor:
            return of[key].get_tensor(key)  # type: ignore[attr-defined,no-any-return]

        yield read
