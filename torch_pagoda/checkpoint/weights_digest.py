"""A digest of a checkpoint's bytes: who has the same one serves the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def weights_digest(files: Sequence[str]) -> bytes:
    """Return a digest of 16 bytes of all bytes of these files, in their order.

    Raises:
        OSError: one could not be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor() as threads:
        for content in threads.map(_file_digest, files):
            digest.update(content)
    return digest.digest()


def _file_digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
