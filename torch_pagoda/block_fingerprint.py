"""The fingerprint of what computes KV blocks: who has the same one may read them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields
from typing import TYPE_CHECKING

from .checkpoint.loading import checkpoint_files
from .checkpoint.weights_digest import weights_digest
from .compiler import CheckpointFiles, CompileOptions
from .compiler.warm_start.identity import environment
from .options import LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "enable_expert_parallel")


def block_fingerprint(
    model: str | os.PathLike[str] | PreTrainedModel, loading: LoadOptions, compiling: CompileOptions
) -> bytes:
    """Return a digest of all that keys and values depend on besides tokens and sizes of the cache.

    That is every byte of the weights, what their files say of the model, options, versions, the processor's kernels
    and our sources.

    Args:
        model: as for ``LLM``.
        loading: how it is loaded.
        compiling: how it is compiled.

    Raises:
        ValueError: it has no fingerprint, or ``kv_store`` does not support an option.
    """
    files = storable_files(model, loading, compiling)
    digest = hashlib.blake2b(digest_size=16)
    options = {f.name: getattr(compiling, f.name) for f in fields(compiling) if f.name not in _RANKS}
    digest.update(repr((environment(), sorted(files.texts.items()), str(files.dtype), options)).encode())
    digest.update(weights_digest(files.weights))
    return digest.digest()


def storable_files(
    model: str | os.PathLike[str] | PreTrainedModel, loading: LoadOptions, compiling: CompileOptions
) -> CheckpointFiles:
    """Return the files that identify a model, none of whose weights is read; see ``block_fingerprint``.

    Raises:
        ValueError: there are none, or ``kv_store`` does not support an option.
    """
    if (stages := compiling.pipeline_parallel_size) != 1:
        raise ValueError(f"kv_store does not support pipeline_parallel_size={stages}; omit one of them")
    if compiling.target != "cpu":
        raise ValueError(f"kv_store does not support target={compiling.target!r}, only CPUs; omit one of them")
    if compiling.patterns:
        raise ValueError("kv_store does not support patterns, which have no name that outlives the process; omit one")
    if not isinstance(model, str | os.PathLike):
        raise ValueError(
            "kv_store needs a checkpoint, whose bytes identify the model; save the module and pass its path"
        )
    if loading.gguf_file is not None:
        model = os.path.join(model, loading.gguf_file)
    files = checkpoint_files(model, loading.dtype)
    if files is None:
        raise ValueError(
            f"kv_store does not support model={os.fspath(model)!r}; use safetensors or GGUF files of a class of "
            "transformers' own that are stored as they are served"
        )
    return files
