"""Zeros of GPTQ's two versions are read as their writers mean them, and refused where the config says other ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stored_matrices import Tensors, gptq, numbers_of, words
from stored_modules import MODULE, read_module

from torch_pagoda.runtime.ops.linear.stored_weight import as_dense

OLD_ONES = (0x24924924, 0x92492492, 0x49249249)
"""What GPTQModel before 7.0 took off words of zeros of 3 bits, one after the other."""
NEW = {"meta": {"quantizer": ["gptqmodel:7.0.0"]}}


def matrix(positive: bool = False) -> torch.Tensor:
    """float32 ``[64, 64]``; with ``positive`` some groups of 32 have no negative number, and so a zero of 0."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    if positive:
        weight[3:6, :32] = weight[3:6, :32].abs()
        weight[15, 32:] = weight[15, 32:].abs()
    return weight


def settings(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, **more}


def written_before_7(symmetric: bool) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = gptq(matrix(), 3, 32, "gptq_v2", symmetric=symmetric)
    ones = torch.tensor([OLD_ONES[column % 3] for column in range(tensors["qzeros"].shape[1])])
    return {**tensors, "qzeros": ((tensors["qzeros"].long() - ones) & 0xFFFFFFFF).to(torch.int32)}, dense


def check_read(folder: Path, tensors: Tensors, said: dict[str, Any], dense: torch.Tensor) -> None:
    assert torch.equal(as_dense(read_module(folder, tensors, said)["weight"]), dense)


def check_refused(folder: Path, tensors: Tensors, said: dict[str, Any], *words_of_message: str) -> None:
    with pytest.raises(ValueError, match="is quantized") as error:
        read_module(folder, tensors, said)
    for word in words_of_message:
        assert word in str(error.value), error.value


@pytest.mark.parametrize(
    "said",
    [
        {"format": "gptq_v2"},
        {"format": "GPTQ_V2"},
        {"checkpoint_format": "gptq_v2"},
        {"checkpoint_format": "gptq_v2", "format": "gptq_v2"},
        {"checkpoint_format": None, "format": "gptq_v2"},
    ],
    ids=str,
)
def test_either_entry_says_the_version(said: dict[str, Any], tmp_path: Path) -> None:
    tensors, dense = gptq(matrix(), 4, 32, "gptq_v2", symmetric=False)
    check_read(tmp_path, tensors, settings(4, sym=False, **said), dense)


def test_two_entries_that_say_two_versions(tmp_path: Path) -> None:
    tensors, _ = gptq(matrix(), 4, 32, "gptq_v2", symmetric=False)
    said = settings(4, sym=False, checkpoint_format="gptq", format="gptq_v2")
    check_refused(tmp_path, tensors, said, "checkpoint_format='gptq' and format='gptq_v2'")


def test_versions_that_are_not_read(tmp_path: Path) -> None:
    tensors, _ = gptq(matrix(), 4, 32, "gptq_v2", symmetric=False)
    for version in ("gptq_p", "marlin"):
        check_refused(tmp_path, tensors, settings(4, format=version), version)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_zeros_of_symmetric_weights(bits: int, version: str, shuffled: bool, tmp_path: Path) -> None:
    tensors, dense = gptq(matrix(), bits, 32, version, shuffled=shuffled)
    check_read(tmp_path, tensors, settings(bits, sym=True, format=version, desc_act=shuffled), dense)
    auto_round = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True}
    if version == "gptq":
        check_read(tmp_path, tensors, settings(bits, **auto_round), dense)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("stored", "said"), [("gptq_v2", "gptq"), ("gptq", "gptq_v2")])
def test_symmetric_zeros_of_the_other_version(bits: int, stored: str, said: str, tmp_path: Path) -> None:
    tensors, dense = gptq(matrix(), bits, 32, stored)
    check_refused(
        tmp_path,
        tensors,
        settings(bits, sym=True, checkpoint_format=said),
        f"{MODULE}.qzeros",
        f"set checkpoint_format={stored!r}",
    )
    check_read(tmp_path, tensors, settings(bits, sym=True, checkpoint_format=stored), dense)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_one_zero_that_symmetric_weights_do_not_have(bits: int, version: str, tmp_path: Path) -> None:
    tensors, dense = gptq(matrix(), bits, 32, version)
    tensors["qzeros"][1, 2] += 1 << (32 - bits)
    check_refused(tmp_path, tensors, settings(bits, sym=True, format=version), f"{MODULE}.qzeros", "sym=false")
    found = as_dense(read_module(tmp_path, tensors, settings(bits, sym=False, format=version))["weight"])
    assert (found != dense).any(1).sum() == 1


@pytest.mark.parametrize(
    ("said", "symmetric"),
    [
        ({"dynamic": {r"+:.*\.q_proj": {"sym": False}}}, False),
        ({"dynamic": {r"model\.layers\.0\.": {"sym": False}}}, False),
        ({"dynamic": {r".*\.k_proj": {"sym": False}}}, True),
        ({"dynamic": {r"layers\.0": {"sym": False}}}, True),
        ({"dynamic": {r".*\.q_proj": {"bits": 4}, ".*": {"sym": False}}}, True),
        ({"dynamic": {r"-:.*\.q_proj": {"sym": False}}}, True),
        ({"extra_config": {MODULE: {"sym": False}}}, False),
        ({"extra_config": {"self_attn.q_proj": {"sym": False}}}, False),
        ({"extra_config": {r".*layers\.0\..*_proj$": {"sym": False}}}, False),
        ({"extra_config": {r".*\.self_attn\.q.*": {"bits": 16, "sym": False}}}, True),
        ({"extra_config": {"model.layers.0.self_attn.q": {"sym": False}}}, True),
        ({"extra_config": {"model.layers.0.self_attn.k_proj": {"sym": False}}}, True),
        ({"meta": {"fallback": {"strategy": "midpoint", "threshold": "0.5%"}}}, False),
        ({"meta": {"fallback": {"strategy": "rtn", "threshold": "0.5%"}}}, True),
        ({"meta": {"fallback": None}}, True),
    ],
    ids=str,
)
def test_single_modules_may_be_asymmetric(said: dict[str, Any], symmetric: bool, tmp_path: Path) -> None:
    tensors, dense = gptq(matrix(), 4, 32, "gptq", symmetric=False)
    if symmetric:
        check_refused(tmp_path, tensors, settings(4, sym=True, **said), f"{MODULE}.qzeros")
    else:
        check_read(tmp_path, tensors, settings(4, sym=True, **said), dense)


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    tensors, _ = gptq(matrix(), 4, 32, "gptq")
    check_refused(tmp_path, tensors, settings(4, sym=True, dynamic={"+:(": {"sym": False}}), "'('", "dynamic")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_a_zero_of_0_borrows_from_its_neighbors(bits: int, version: str, tmp_path: Path) -> None:
    zeros = numbers_of(matrix(positive=True), bits, 32, symmetric=False).zeros
    assert [int((zeros == 0)[:, group].sum()) for group in range(2)] == [3, 1]
    tensors, dense = gptq(matrix(positive=True), bits, 32, version, symmetric=False)
    check_read(tmp_path, tensors, settings(bits, sym=False, format=version, **NEW), dense)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_of_3_bits_that_older_tools_packed(symmetric: bool, tmp_path: Path) -> None:
    tensors, _ = written_before_7(symmetric)
    said = settings(3, sym=symmetric, checkpoint_format="gptq", meta={"quantizer": ["gptqmodel:6.0.3"]})
    check_refused(tmp_path, tensors, said, f"{MODULE}.qzeros", "checkpoint")


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ({"meta": {"quantizer": ["optimum:2.0.0", "gptqmodel:7.3.4"]}}, True),
        ({"meta": {"quantizer": "gptqmodel:10.0.0"}}, True),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, True),
        ({"meta": {"quantizer": ["gptqmodel:6.1.0-dev"]}}, False),
        ({"meta": {"quantizer": ["optimum:7.0.0"]}}, False),
        ({"meta": {"quantizer": 7}}, False),
        ({"meta": None}, False),
        ({}, False),
    ],
    ids=str,
)
def test_asymmetric_zeros_of_3_bits(said: dict[str, Any], known: bool, tmp_path: Path) -> None:
    """Two writings, which their words do not tell apart."""
    tensors, dense = gptq(matrix(), 3, 32, "gptq", symmetric=False)
    if known:
        check_read(tmp_path, tensors, settings(3, sym=False, **said), dense)
    else:
        check_refused(tmp_path, tensors, settings(3, sym=False, **said), f"{MODULE}.qzeros", "in two ways")
    tensors, dense = gptq(matrix(), 3, 32, "gptq_v2", symmetric=False)
    if "quant_method" not in said:
        check_read(tmp_path, tensors, settings(3, sym=False, format="gptq_v2", **said), dense)


def test_old_and_new_zeros_of_3_bits_differ() -> None:
    old, new = written_before_7(True)[0]["qzeros"], gptq(matrix(), 3, 32, "gptq")[0]["qzeros"]
    assert (old != new).all() and torch.equal(new[:, :3], words(torch.full((2, 32), 3), 3))
