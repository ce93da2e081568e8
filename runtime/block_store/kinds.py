"""Kinds of stores, by the scheme of their address."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from ..private_folder import NotPrivate, open_private_file
from .entries import Seal
from .folder import FolderStore
from .store import BlockStore

_FORMS = "folder:///absolute/path, valkey://host:6379, valkeys://host:6379 or mooncake://host:50051"
_LEAST_SECRET, _MOST_SECRET = 16, 64


def check_address(address: str) -> SplitResult:
    """Return the parts of a store's address.

    Raises:
        ValueError: there is no such kind of store, or a part is missing. The message holds no password.
    """
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise ValueError(f"kv_store: the address cannot be read; use {_FORMS}") from None
    if parts.scheme == "folder":
        if parts.netloc or not parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError(f"kv_store={address!r} names no folder; use folder:///absolute/path")
    elif parts.scheme in ("valkey", "valkeys"):
        if not parts.hostname or port == 0 or parts.query or parts.fragment:
            raise ValueError(f"kv_store: the {parts.scheme} address names no server; use {parts.scheme}://host:6379")
    elif parts.scheme == "mooncake":
        is_more = parts.path or parts.query or parts.fragment or parts.username is not None
        if not parts.hostname or ":" in parts.hostname or port == 0 or is_more:
            raise ValueError(
                "kv_store: the mooncake address is not a host (a name or an IPv4 address) and a port; "
                "use mooncake://host:50051"
            )
    else:
        raise ValueError(f"kv_store: the kind of store {parts.scheme!r} is unknown; use {_FORMS}")
    return parts


def open_block_store(address: str, seal: Seal, size: int | None) -> BlockStore:
    """Open the store at an address that ``check_address`` takes.

    Args:
        address: of the store.
        seal: names and seals the entries.
        size: most bytes of a folder; of Mooncake, the bytes that this process adds.

    Raises:
        ValueError: the folder is not private or cannot be made, the package for the store is missing, or the size is
            too small.
    """
    parts = check_address(address)
    if parts.scheme == "folder":
        try:
            return FolderStore(Path(unquote(parts.path)), seal, size)
        except OSError as error:
            raise ValueError(f"kv_store={address!r} cannot be used: {error}") from None
    if parts.scheme == "mooncake":
        from .mooncake import MooncakeStore

        return MooncakeStore(parts, seal, size)
    from .valkey import ValkeyStore

    return ValkeyStore(parts, seal)


def read_secret(path: str) -> bytes:
    """Return the secret in a key file.

    Raises:
        ValueError: it cannot be read, others may have written it, or it is too short or too long.
    """
    try:
        with open_private_file(Path(path)) as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
                raise NotPrivate(f"others may read it; run: chmod 600 {path}")
            secret = file.read(_MOST_SECRET + 2).strip()
    except OSError as error:
        raise ValueError(f"kv_store_key_file={path!r} cannot be used: {error}") from None
    if not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        raise ValueError(
            f"kv_store_key_file={path!r} does not hold {_LEAST_SECRET} to {_MOST_SECRET} bytes; make it with: "
            f"(umask 077; openssl rand -hex 32 > {path})"
        )
    return secret
