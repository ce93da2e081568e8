"""Entries of a store: what one KV head has of one block in all layers of a group, behind a head that seals it.

The head says what the entry is: format, fingerprint of what computed it, key and size. Behind it comes a digest of
head and content, keyed with the secret of those who share the store. Without a secret the digest finds accidents
alone: then only those who are trusted may write to the store.
"""

from __future__ import annotations

import hashlib
import struct
from hmac import compare_digest

_FORMAT = b"pagodakv\x01\x00\x00\x00"
_HEAD = struct.Struct("<12s16s20sQ")
_DIGEST = 16
HEAD_SIZE = _HEAD.size + _DIGEST
"""Bytes in front of the content of an entry."""
FINGERPRINT_SIZE = 16


def entry_key(content: bytes, group: int, head: int) -> bytes:
    """Return the key of an entry.

    Args:
        content: hash of the block, see ``blocks.hashing``; of a state, of the block that ends with it.
        group: index of the group of layers.
        head: KV head; 0 for a state.
    """
    return content + struct.pack("<HH", group, head)


class Seal:
    """Names and seals the entries of one model.

    Args:
        fingerprint: 16 bytes; another one for everything that changes keys and values.
        secret: at most 64 bytes; empty: none.
    """

    def __init__(self, fingerprint: bytes, secret: bytes = b"") -> None:
        self._fingerprint = fingerprint
        self._secret = secret

    def name(self, key: bytes) -> str:
        """Return the name of the entry in the store; entries of other models and secrets have others."""
        data = self._fingerprint + key
        return hashlib.blake2b(data, digest_size=16, key=self._secret, person=b"pagoda-kv-name").hexdigest()

    def head(self, key: bytes, content: memoryview) -> bytes:
        """Return the head of an entry, ``HEAD_SIZE`` bytes."""
        head = _HEAD.pack(_FORMAT, self._fingerprint, key, content.nbytes)
        digest = hashlib.blake2b(head, digest_size=_DIGEST, key=self._secret, person=b"pagoda-kv-entry")
        digest.update(content)
        return head + digest.digest()

    def fits(self, head: bytes | bytearray, key: bytes, content: memoryview) -> bool:
        """Return True if the head is that of this content under this key."""
        return compare_digest(bytes(head), self.head(key, content))
