"""Blocks of every type that is read mean what llama.cpp's own package says that they mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import KINDS, Stored, dense, random_blocks

from torch_pagoda.checkpoint.gguf import block_types
from torch_pagoda.checkpoint.gguf.block_types import BLOCK_TYPES, READ, packed_codes
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}


def meant(name: str, blocks: np.ndarray) -> torch.Tensor:
    """What a stored weight of our reader's parts says, a block in each row."""
    kind = BY_NAME[name]
    assert kind.take_apart is not None and kind.form is not None
    numbers = kind.take_apart(torch.from_numpy(blocks))
    codes = packed_codes(numbers.codes, kind.bits)
    return StoredWeight(kind.form, codes, numbers.scales, numbers.offsets, dtype=torch.float32).dense()


def expected(name: str, blocks: np.ndarray) -> torch.Tensor:
    return dense(Stored("", (len(blocks), BY_NAME[name].weights), name, blocks.tobytes()))


def test_sizes_are_those_of_the_package() -> None:
    assert set(READ) == set(KINDS)
    for number, kind in BLOCK_TYPES.items():
        if kind.name != "Q8_1":  # of which the package holds another size than ggml, and no file holds one
            assert (kind.name, (kind.weights, kind.nbytes)) == (
                GGMLQuantizationType(number).name,
                GGML_QUANT_SIZES[GGMLQuantizationType(number)],
            )


@pytest.mark.parametrize("name", KINDS)
def test_every_bit_means_what_the_package_says(name: str) -> None:
    blocks = random_blocks(name, 300)
    assert torch.equal(meant(name, blocks), expected(name, blocks))
    # Each byte alone, so that none is read in the place of another.
    zero = random_blocks(name, 1)
    for at in range(zero.shape[1]):
        blocks = np.repeat(zero, 8, 0)
        blocks[:, at] ^= np.uint8(1) << np.arange(8, dtype=np.uint8)
        found, wanted = meant(name, blocks), expected(name, blocks)
        finite = wanted.isfinite()
        assert torch.equal(found[finite], wanted[finite]), at


def swapped(data: torch.Tensor, run: int) -> torch.Tensor:
    runs = data.unflatten(1, (-1, 1, run))
    return torch.cat([runs >> 4, runs & 15], 2).flatten(1)


def negated(blocks: torch.Tensor, what: object = block_types._scales_and_offsets) -> tuple[torch.Tensor, ...]:
    scales, offsets = what(blocks)  # type: ignore[operator]
    return scales, -offsets


@pytest.mark.parametrize(
    ("name", "function", "mutant"),
    [
        ("Q4_0", "_nibbles", swapped),
        ("Q6_K", "_nibbles", swapped),
        ("Q4_K", "_scales_and_offsets", negated),
        ("Q5_K", "_bits", lambda data, run: block_types._bits_of_words(data)),
        ("Q8_0", "_half", lambda blocks, at: blocks[:, at : at + 2].contiguous().view(torch.float16) * 1.01),
    ],
)
def test_mutants_show(name: str, function: str, mutant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(name, 4)
    monkeypatch.setattr(block_types, function, mutant)
    assert not torch.equal(meant(name, blocks), expected(name, blocks))
