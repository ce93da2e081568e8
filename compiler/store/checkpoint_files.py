"""The files of a checkpoint: a digest of what they hold, and their tensors by name, mapped and not read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..fingerprint.tensor_contents import update_samples


@dataclass(frozen=True)
class CheckpointFiles:
    """The files that a model of a class of transformers' own is loaded from.

    Attributes:
        weights: paths of safetensors files.
        texts: what other files say of the model, by name.
        dtype: that weights are converted to; None for the checkpoint's own.
    """

    weights: Sequence[str]
    texts: Mapping[str, str]
    dtype: torch.dtype | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of all files by name, in the files' dtypes, mapped anew: a program takes the data of its own.

        Raises:
            ValueError: a file cannot be read.
        """
        found: dict[str, torch.Tensor] = {}
        try:
            for path in self.weights:
                with safe_open(path, framework="pt", device="cpu") as file:
                    found.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be mapped: {error}") from error
        return found

    def contents(self) -> dict[str, Any]:
        """What tells one checkpoint from another: texts, and names, dtypes, shapes and samples of all tensors."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors().items():
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            update_samples(digest, tensor)
        return {"texts": dict(self.texts), "dtype": str(self.dtype), "tensors": digest.hexdigest()}


def sample_digest(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """A digest of a contiguous tensor's dtype, shape and samples, once it is converted to ``dtype``."""
    digest = hashlib.sha256(f"{dtype or tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    update_samples(digest, tensor, dtype)
    return digest.hexdigest()
