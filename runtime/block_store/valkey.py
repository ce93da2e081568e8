"""A store in a Valkey server, which removes what was not used for longest when its memory is full.

The server's settings say how much it keeps: ``maxmemory`` and ``maxmemory-policy allkeys-lru``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote

from .entries import HEAD_SIZE, Seal

logger = logging.getLogger(__name__)

_PREFIX = "pagoda-kv:"
_CONNECT_SECONDS, _ANSWER_SECONDS = 1.0, 2.0
_RETRY_SECONDS = 5.0
"""Time without a question to a server that did not answer."""

T = TypeVar("T")


class ValkeyStore:
    """Entries as strings in a Valkey server; see ``BlockStore``.

    Args:
        address: ``valkey://[user[:password]@]host[:port][/database]``, or ``valkeys://`` for TLS.
        seal: names and seals the entries.

    Raises:
        ValueError: the package is missing, or the number of the database is none.
    """

    def __init__(self, address: SplitResult, seal: Seal) -> None:
        try:
            import valkey
        except ImportError:
            raise ValueError(
                f"kv_store={address.scheme}://{address.hostname} needs a package; run: pip install "
                "'torch-pagoda[valkey]'"
            ) from None
        database = address.path.strip("/")
        if not database.isdecimal() and database:
            raise ValueError(f"kv_store: the database {database!r} of the {address.scheme} address is not a number")
        self.num_damaged = 0
        self._seal = seal
        self._name = f"{address.hostname}:{address.port or 6379}"
        self._away_until = 0.0
        self._was_away = False
        self._client: Any = valkey.Valkey(
            host=address.hostname,
            port=address.port or 6379,
            db=int(database or 0),
            username=None if not address.username else unquote(address.username),
            password=None if address.password is None else unquote(address.password),
            ssl=address.scheme == "valkeys",
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=_ANSWER_SECONDS,
            protocol=2,
        )

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        def ask() -> list[bool]:
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.exists(self._key(key))
                return [answer == 1 for answer in pipeline.execute()]

        return self._asked(ask, [False] * len(keys))

    def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        found = self._asked(lambda: self._client.mget([self._key(key) for key in keys]), None)
        if not isinstance(found, list) or len(found) != len(keys):
            return [False] * len(keys)
        return [self._take(key, entry, part) for key, entry, part in zip(keys, found, into, strict=True)]

    def _take(self, key: bytes, entry: object, part: memoryview) -> bool:
        if not isinstance(entry, bytes):
            return False
        data = memoryview(entry)
        content = data[HEAD_SIZE:]
        if content.nbytes != part.nbytes or not self._seal.fits(bytes(data[:HEAD_SIZE]), key, content):
            self.num_damaged += 1
            self._asked(lambda: self._client.delete(self._key(key)), 0)
            return False
        part[:] = content
        return True

    def store(self, keys: Sequence[bytes], parts: Sequence[memoryview]) -> int:
        def write() -> int:
            written = 0
            for key, part in zip(keys, parts, strict=True):
                entry = self._seal.head(key, part) + bytes(part)
                if self._client.set(self._key(key), entry, nx=True):
                    written += len(entry)
            return written

        return self._asked(write, 0)

    def close(self) -> None:
        self._client.close()

    def _key(self, key: bytes) -> str:
        return _PREFIX + self._seal.name(key)

    def _asked(self, ask: Callable[[], T], otherwise: T) -> T:
        """Ask the server; returns ``otherwise`` if it is away, and does not ask it for a while then."""
        if time.monotonic() < self._away_until:
            return otherwise
        try:
            answer = ask()
        except Exception as error:  # of the connection, or of what the server answered
            self._away_until = time.monotonic() + _RETRY_SECONDS
            self._client.connection_pool.disconnect()
            if not self._was_away:  # the message of an error may quote what was sent
                logger.warning("the KV store at %s failed with %s", self._name, type(error).__name__)
            self._was_away = True
            return otherwise
        self._was_away = False
        return answer
