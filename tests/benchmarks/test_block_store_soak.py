"""What benchmarks/block_store_soak.py would notice, over the toy program."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from block_store_faults import FaultyStore
from block_store_models import KINDS, Model
from block_store_soak import FAULTS, planned, soak, tables
from stored_blocks import patience

from torch_pagoda.runtime.block_store.entries import Seal
from torch_pagoda.runtime.block_store.folder import FolderStore
from torch_pagoda.runtime.blocks.swap_space import SwapSpace
from torch_pagoda.runtime.engine import cache_setup

from toy_program import ToyProgram


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However loaded the machine is; and threads for tiny products only wait for each other."""
    monkeypatch.setattr("block_store_soak.TURNS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with patience():
        yield
    torch.set_num_threads(threads)


def toy() -> Model:
    program = ToyProgram(512, windows=(0, 8))
    return Model(program, program._embedding, (b"0" * 16, b"1" * 16), (8, 24))


def test_faults_change_no_token() -> None:
    figures: dict[tuple[str, str], Counter[str]] = {}
    faults = ["none", "dies", "anything", "truncated", "forged", "a group missing", "another model's", "prefill lost"]
    assert soak(toy(), "toy", list(enumerate(faults)), 0, figures) == []
    total = sum(figures.values(), Counter())
    assert total["rounds"] == len(faults) and total["fetched"] > 40 and total["damaged"] > 5 < total["failed"]
    text = tables(figures)
    assert f"| toy | {len(faults)} |" in text and "| forged | 1 |" in text


load = FaultyStore.load


def all_read(self: Any, keys: Any, into: Any) -> list[bool]:
    load(self, keys, into)
    return [True] * len(keys)


MUTANTS: dict[str, tuple[str, Any]] = {
    "what was read in part is taken as whole": ("dies", mock.patch.object(FaultyStore, "load", all_read)),
    "no digest is compared": ("garbage", mock.patch.object(Seal, "fits", lambda *given: True)),
    "nor that of another block": ("another block's", mock.patch.object(Seal, "fits", lambda *given: True)),
    "the digest has no key": (
        "forged",
        mock.patch.object(cache_setup, "Seal", lambda fingerprint, secret: Seal(fingerprint)),
    ),
    "the secret names nothing": (
        "another secret's",
        mock.patch.object(cache_setup, "Seal", lambda fingerprint, secret: Seal(fingerprint)),
    ),
    "the key leaves out the model": (
        "another model's",
        mock.patch.object(cache_setup, "Seal", lambda fingerprint, secret: Seal(b"0" * 16, secret)),
    ),
    "blocks stay lent": ("none", mock.patch.object(SwapSpace, "give_back", lambda *given: None)),
    "nothing is stored": ("none", mock.patch.object(FolderStore, "store", lambda *given: 0)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, patch = MUTANTS[mutant]
    monkeypatch.setattr("block_store_soak.HOLD_SECONDS", 1.0)
    with patch:
        model = toy()
        assert any(soak(model, "toy", [(number, fault)], 0, {}) for number in range(6)), "of six rounds one shows it"


def test_all_pairs_come_before_one_comes_again() -> None:
    pairs = planned(list(KINDS), FAULTS, 400, random.Random(0))
    counts = Counter(pairs)
    assert len(pairs) == 400 and max(counts.values()) - min(counts.values()) <= 1
    assert {kind for kind, fault in pairs if fault == "a snapshot missing"} == {k for k in KINDS if "states" in k}
