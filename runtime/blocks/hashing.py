"""Hashes that identify the content of full blocks: a chain over the tokens of a sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_DIGEST = 16  # bytes; two of 2**32 blocks agree by chance once in 2**64 caches


def chain_start(salt: str, variant: str = "") -> bytes:
    """Return the hash that starts a sequence's chain. Sequences with different salts or variants share nothing.

    Args:
        salt: chosen by who sends the request.
        variant: what its keys depend on in addition to its tokens.
    """
    salt = f"{len(variant)}/{variant}{salt}"
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST, person=b"pagoda-salt").digest()


def extend_chain(
    hashes: list[bytes], tokens: Sequence[int] | npt.NDArray[np.integer], first: int, block_size: int, start: bytes
) -> None:
    """Append the hashes of the full blocks that ``tokens`` complete.

    A block's hash covers its own tokens and, through the previous block's hash, all earlier ones, because keys and
    values depend on these too (vLLM's prefix caching does the same).

    Args:
        hashes: hashes of the sequence's leading full blocks; new ones are appended.
        tokens: ids from position ``first`` on.
        first: at most ``len(hashes) * block_size``.
        block_size: tokens per block.
        start: the result of ``chain_start``.
    """
    at = len(hashes) * block_size - first
    count = (len(tokens) - at) // block_size
    if count < 1:
        return
    data = np.ascontiguousarray(tokens[at : at + count * block_size], dtype=np.int64).tobytes()
    parent = hashes[-1] if hashes else start
    size = block_size * 8
    for offset in range(0, len(data), size):
        parent = hashlib.blake2b(data[offset : offset + size], digest_size=_DIGEST, key=parent).digest()
        hashes.append(parent)
