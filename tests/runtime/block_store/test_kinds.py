"""Addresses and key files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from stored_blocks import store_engine

from torch_pagoda.runtime.block_store.entries import Seal
from torch_pagoda.runtime.block_store.kinds import check_address, open_block_store, read_secret
from torch_pagoda.runtime.engine.engine_options import EngineOptions

from toy_program import ToyProgram


@pytest.mark.parametrize(
    "address", ["folder:///a/b", "valkey://h:6379", "valkeys://u:p@h/3", "valkey://[::1]:1", "mooncake://h:1"]
)
def test_addresses_that_there_are(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("/var/cache/kv", "is unknown"),
        ("redis://host", "is unknown"),
        ("folder://relative/path", "names no folder"),
        ("folder:///", "names no folder"),
        ("folder:///a?size=1", "names no folder"),
        ("valkey:///3", "names no server"),
        ("valkey://:hidden@host:99999", "cannot be read"),
        ("valkey://:hidden@host?db=1", "names no server"),
        ("rediss://:hidden@host", "is unknown"),
        ("mooncake://", "is not a host"),
        ("mooncake://[::1]:1", "is not a host"),
        ("mooncake://u:hidden@host", "is not a host"),
        ("mooncake://host/hidden", "is not a host"),
    ],
)
def test_what_is_no_address_is_refused_without_its_password(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        check_address(address)
    assert "hidden" not in str(refused.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ValueError, match=r"needs a package; run: pip install 'torch-pagoda\[mooncake\]'"):
        open_block_store("mooncake://host", Seal(b"f" * 16), None)
    with pytest.raises(ValueError, match="kv_store_size=1000 is less"):
        open_block_store("mooncake://host", Seal(b"f" * 16), 1000)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_store": "folder:///a", "enable_prefix_caching": False}, "enable_prefix_caching=True"),
        ({"kv_store_wait": -1}, "kv_store_wait=-1"),
        ({"kv_store_wait": float("nan")}, "kv_store_wait=nan"),
        ({"kv_store_write": "some"}, "'reused' or 'all'"),
        ({"kv_store_size": "much"}, "kv_store_size='much'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineOptions(**options)  # type: ignore[arg-type]


def test_what_an_engine_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fingerprint"):
        store_engine(ToyProgram(), tmp_path, fingerprint=None)
    program = ToyProgram()
    program.block_size = 4
    with pytest.raises(ValueError, match="works on CPUs only"):
        store_engine(program, tmp_path)
    tmp_path.chmod(0o770)
    with pytest.raises(ValueError, match=r"others may write .* chmod go-w"):
        store_engine(ToyProgram(), tmp_path)


def test_a_secret_is_private_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    os.chmod(path, 0o600)
    assert read_secret(str(path)) == b"0123456789abcdef"
    os.chmod(path, 0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret(str(path))
    os.chmod(path, 0o600)
    for short_or_long in (b"0123456789abcde", b"x" * 65, b""):
        path.write_bytes(short_or_long)
        with pytest.raises(ValueError, match="16 to 64 bytes"):
            read_secret(str(path))
    with pytest.raises(ValueError, match="cannot be used"):
        read_secret(str(tmp_path / "none"))
