"""Quantized modules whose tensors contradict the config, or hold more than is read, are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes_files import CONFIGS, eight_bits, four_bits
from quantized_checkpoints import FORMATS
from safetensors.torch import load_file, save_file
from stored_matrices import Tensors, awq, gptq, of_bytes, packed
from stored_modules import MODULE, read_module

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense

from tiny_models import build_tiny_model

CPU = torch.device("cpu")
WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def compressed(*weights: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": one} for i, one in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def check_refused(folder: Path, tensors: Tensors, said: dict[str, Any], *words: str) -> None:
    with pytest.raises(ValueError, match="is quantized") as error:
        read_module(folder, tensors, said)
    for word in (MODULE, *words):
        assert word in str(error.value), error.value


def without(leaf: str, made: tuple[Tensors, torch.Tensor]) -> Tensors:
    return {key: tensor for key, tensor in made[0].items() if key != leaf}


def unordered(size: int) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = gptq(WEIGHT, 4, size, "gptq")
    return {leaf: tensor for leaf, tensor in tensors.items() if not leaf.endswith("g_idx")}, dense


MISSING: dict[str, tuple[Callable[[], tuple[Tensors, torch.Tensor]], str, dict[str, Any]]] = {
    "zeros of packed codes": (
        lambda: packed(WEIGHT, 4, 32, symmetric=False),
        "weight_zero_point",
        compressed({**INT4, "symmetric": False}),
    ),
    "zeros of packed bytes": (
        lambda: packed(WEIGHT, 8, 32, symmetric=False),
        "weight_zero_point",
        compressed({**INT4, "num_bits": 8, "symmetric": False}),
    ),
    "zeros of bytes": (
        lambda: of_bytes(WEIGHT, symmetric=False),
        "weight_zero_point",
        compressed({**INT8, "symmetric": False}),
    ),
    "zeros of two groups": (
        lambda: packed(WEIGHT, 4, 32, symmetric=False),
        "weight_zero_point",
        compressed({**INT4, "symmetric": False}, {**INT4, "symmetric": False, "group_size": 64}, INT8),
    ),
    "an order": (
        lambda: packed(WEIGHT, 4, 32, shuffled=True),
        "weight_g_idx",
        compressed({**INT4, "actorder": "group"}),
    ),
    "an order by an older name": (
        lambda: packed(WEIGHT, 4, 32, shuffled=True),
        "weight_g_idx",
        compressed({**INT4, "actorder": "dynamic"}),
    ),
    "an order of GPTQ": (
        lambda: gptq(WEIGHT, 4, 32, "gptq", shuffled=True),
        "g_idx",
        {**GPTQ, "desc_act": True},
    ),
    "an order of one module of GPTQ": (
        lambda: gptq(WEIGHT, 4, 32, "gptq", shuffled=True),
        "g_idx",
        {**GPTQ, "desc_act": False, "dynamic": {r".*\.q_proj": {"desc_act": True}}},
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_the_config_demands(case: str, tmp_path: Path) -> None:
    make, leaf, said = MISSING[case]
    made = make()
    assert torch.equal(as_dense(read_module(tmp_path, made[0], said)["weight"]), made[1])
    check_refused(tmp_path, without(leaf, made), said, f"lacks '{MODULE}.{leaf}'")


NOT_MISSING: dict[str, tuple[Callable[[], tuple[Tensors, torch.Tensor]], str, dict[str, Any]]] = {
    "zeros of one of two groups": (
        lambda: packed(WEIGHT, 4, 32),
        "weight_zero_point",
        compressed({**INT4, "symmetric": False}, INT4),
    ),
    "zeros of other bits": (
        lambda: packed(WEIGHT, 4, 32),
        "weight_zero_point",
        compressed(INT4, {**INT8, "symmetric": False}),
    ),
    "an order of one of two groups": (
        lambda: packed(WEIGHT, 4, 32),
        "weight_g_idx",
        compressed({**INT4, "actorder": "group"}, INT4),
    ),
    "an order that calibration had": (
        lambda: packed(WEIGHT, 4, 32),
        "weight_g_idx",
        compressed({**INT4, "actorder": "weight"}),
    ),
    "an order of a single group": (
        lambda: gptq(WEIGHT, 4, 0, "gptq"),
        "g_idx",
        {**GPTQ, "desc_act": True, "group_size": -1},
    ),
    "an order of GPTQ that one module has not": (
        lambda: gptq(WEIGHT, 4, 32, "gptq"),
        "g_idx",
        {**GPTQ, "desc_act": True, "dynamic": {r".*\.q_proj": {"desc_act": False}}},
    ),
    "an order of GPTQ": (lambda: gptq(WEIGHT, 4, 32, "gptq"), "g_idx", {**GPTQ, "desc_act": False}),
}


@pytest.mark.parametrize("case", NOT_MISSING)
def test_what_the_config_does_not_demand(case: str, tmp_path: Path) -> None:
    make, leaf, said = NOT_MISSING[case]
    made = make()
    assert torch.equal(as_dense(read_module(tmp_path, without(leaf, made), said)["weight"]), made[1])


@pytest.mark.parametrize(
    ("make", "said", "word"),
    [
        (lambda: packed(WEIGHT, 4, 0), compressed(INT4), "groups of all"),
        (lambda: packed(WEIGHT, 4, 16), compressed(INT4), "groups of 16"),
        (lambda: packed(WEIGHT, 4, 32), compressed({**INT4, "strategy": "channel", "group_size": None}), "of 32"),
        (lambda: packed(WEIGHT, 4, 32), compressed({**INT4, "strategy": "channel", "group_size": -1}), "of 32"),
        (lambda: of_bytes(WEIGHT), compressed({**INT8, "strategy": "group", "group_size": 32}), "groups of all"),
        (lambda: of_bytes(WEIGHT, 32), compressed(INT8), "groups of 32"),
        (lambda: awq(WEIGHT, 32), {**AWQ, "group_size": 64}, "group_size=64"),
        (lambda: awq(WEIGHT, 32), {**AWQ, "group_size": 128}, "group_size=128"),
        (lambda: awq(WEIGHT, 32), {**AWQ, "group_size": -1}, "group_size=-1"),
        (lambda: awq(WEIGHT, 0), AWQ, "group_size=32"),
        (lambda: awq(WEIGHT, 32), {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "group_size=64"),
        (lambda: awq(WEIGHT, 32), {**AWQ, "format": "gemv"}, "version='gemm' and format='gemv'"),
        (lambda: unordered(32), {**GPTQ, "group_size": 64}, "group_size=64"),
        (lambda: unordered(32), {**GPTQ, "group_size": 16}, "group_size=16"),
        (lambda: unordered(32), {**GPTQ, "group_size": -1}, "group_size=-1"),
        (lambda: unordered(32), {**GPTQ, "dynamic": {r".*\.q_proj": {"group_size": 64}}}, "group_size=64"),
        (lambda: unordered(0), GPTQ, "group_size=32"),
    ],
)  # fmt: skip
def test_other_groups_than_the_config_states(
    make: Callable[[], tuple[Tensors, torch.Tensor]], said: dict[str, Any], word: str, tmp_path: Path
) -> None:
    if "format" in said:
        with pytest.raises(ValueError, match=word):
            read_module(tmp_path, make()[0], said)
    else:
        check_refused(tmp_path, make()[0], said, word)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: packed(WEIGHT, 4, 0), compressed({**INT4, "group_size": 64})),
        (lambda: packed(WEIGHT, 4, 0), compressed({**INT4, "group_size": 128})),
        (lambda: packed(WEIGHT, 4, 0), compressed({**INT4, "strategy": "channel", "group_size": -1})),
        (lambda: packed(WEIGHT, 4, 32), compressed({**INT4, "group_size": 16}, INT4)),
        (lambda: awq(WEIGHT, 0), {**AWQ, "group_size": 128}),
        (lambda: awq(WEIGHT, 0), {**AWQ, "group_size": -1}),
        (lambda: awq(WEIGHT, 32), {**AWQ, "format": "GEMM"}),
        (lambda: awq(WEIGHT, 32), {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "format": "gemm"}),
        (lambda: awq(WEIGHT, 32), {**AWQ, "group_size": 64, "dynamic": {r".*\.q_proj": {"group_size": 32}}}),
        (lambda: awq(torch.cat([WEIGHT, WEIGHT], 1)[:, :96], 64), {**AWQ, "group_size": 64}),
        (lambda: unordered(0), {**GPTQ, "group_size": 128}),
        (lambda: unordered(0), {**GPTQ, "group_size": -1}),
        (lambda: unordered(32), {**GPTQ, "group_size": 64, "dynamic": {r".*\.q_proj": {"group_size": 32}}}),
        (lambda: unordered(32), {"quant_method": "gptq", "bits": 4, "sym": True}),
        (lambda: gptq(WEIGHT, 4, 32, "gptq"), {**GPTQ, "group_size": 64}),  # g_idx says which group an input is of
    ],
)  # fmt: skip
def test_groups_that_the_config_states(
    make: Callable[[], tuple[Tensors, torch.Tensor]], said: dict[str, Any], tmp_path: Path
) -> None:
    tensors, dense = make()
    assert torch.equal(as_dense(read_module(tmp_path, tensors, said)["weight"]), dense)


def described(kind: str) -> dict[str, Any]:
    return {"model_quant_type": kind, "version": "1.0.0", f"{MODULE}.weight": kind}


READ: dict[str, tuple[Callable[[], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    **{
        name: (lambda form=form: form.store(WEIGHT), form.config)
        for name, form in FORMATS.items()
        if form.config and not form.of_experts and not form.calibrated
    },
    **{
        name: (lambda form=FORMATS[name]: form.store(WEIGHT), described(FORMATS[name].description))
        for name in ("slim-w8a8-dynamic", "slim-w8a16", "slim-w4a8")
    },
    "nf4": (lambda: four_bits(WEIGHT, "nf4"), {"quant_method": "bitsandbytes", **CONFIGS["nf4"]}),
    "fp4": (lambda: four_bits(WEIGHT, "fp4", nested=False), {"quant_method": "bitsandbytes", **CONFIGS["fp4"]}),
    "int8": (lambda: eight_bits(WEIGHT), {"quant_method": "bitsandbytes", **CONFIGS["int8"]}),
}
UNKNOWN = {
    "pre_quant_scale": torch.full((64,), 2.0),
    "weight_scale_2": torch.tensor([64.0]),
    "lora_A": torch.ones(4, 64),
}


@pytest.mark.parametrize("name", READ)
def test_tensors_that_are_not_read(name: str, tmp_path: Path) -> None:
    make, said = READ[name]
    tensors, dense = make()
    bias = torch.randn(64)
    found = read_module(tmp_path, {**tensors, "bias": bias}, said)
    assert found.keys() == {"weight", "bias"} and torch.equal(found["bias"], bias)
    assert torch.equal(as_dense(found["weight"]).float(), dense.float())
    for leaf, tensor in UNKNOWN.items():
        check_refused(tmp_path, {**tensors, leaf: tensor}, said, f"'{MODULE}.{leaf}'", "it is not supported")


@pytest.mark.parametrize(
    ("name", "leaf", "tensor"),
    [
        ("ct-w4a16", "weight_global_scale", torch.tensor([64.0])),
        ("ct-w4a16", "weight", torch.zeros(64, 64)),
        ("ct-w8a8", "weight_global_scale", torch.tensor([64.0])),
        ("ct-w8a8", "weight_g_idx", torch.arange(64, dtype=torch.int32).flip(0)),
        ("ct-fp8", "weight_global_scale", torch.tensor([64.0])),
        ("ct-fp8", "weight_zero_point", torch.ones(64, 1)),
        ("ct-mxfp4", "weight_zero_point", torch.ones(64, 2)),
        ("fp8-blocks", "weight_scale", torch.ones(2, 2)),
        ("awq", "g_idx", torch.arange(64, dtype=torch.int32).flip(0) // 32),
        ("gptq-4-g32", "weight", torch.zeros(64, 64)),
        ("slim-w8a16", "quant_bias", torch.ones(64, dtype=torch.int32)),
        ("slim-w8a8-dynamic", "scale_bias", torch.ones(64, 1)),
        ("fp4", "weight.nested_quant_map", torch.ones(256)),
    ],
)
def test_tensors_of_other_forms(name: str, leaf: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    make, said = READ[name]
    check_refused(tmp_path, {**make()[0], leaf: tensor}, said, f"'{MODULE}.{leaf}'")


@pytest.mark.parametrize(
    ("name", "leaf", "tensor"),
    [
        ("ct-w4a16", "input_scale", torch.ones(1)),
        ("ct-w4a16", "output_scale", torch.ones(1)),
        ("ct-w4a16", "k_scale", torch.ones(1)),
        ("ct-w8a8", "output_scale", torch.ones(1)),
        ("ct-fp8", "input_scale", torch.ones(1)),
        ("ct-fp8", "weight_zero_point", torch.zeros(64, 1, dtype=torch.int8)),
        ("ct-nvfp4", "input_global_scale", torch.ones(1)),
        ("ct-mxfp4", "weight_shape", torch.tensor([64, 64])),
        ("fp8-blocks", "input_scale", torch.ones(1)),
        ("fp8-blocks", "activation_scale", torch.ones(1)),
        ("fp8-blocks", "v_scale", torch.ones(1)),
        ("gptq-4-g32", "g_idx", torch.arange(64, dtype=torch.int32) // 32),
        ("slim-w8a8-dynamic", "kv_cache_scale", torch.ones(64)),
        ("slim-w8a8-dynamic", "kv_cache_offset", torch.ones(64)),
        ("slim-w8a8-dynamic", "input_scale", torch.ones(1)),
        ("slim-w4a8", "input_offset", torch.ones(1)),
        ("slim-w8a16", "deq_scale", torch.ones(64)),
    ],
)
def test_tensors_that_change_no_weight(name: str, leaf: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    make, said = READ[name]
    tensors, dense = make()
    found = read_module(tmp_path, {**tensors, leaf: tensor}, said)
    assert found.keys() == {"weight"} and torch.equal(as_dense(found["weight"]), dense)


@pytest.mark.parametrize("said", [compressed(INT8), {"quant_method": "fp8"}], ids=["compressed-tensors", "fp8"])
@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_codes_beside_which_lies_a_scale_of_inputs(said: dict[str, Any], leaf: str, tmp_path: Path) -> None:
    floats = {"weight": WEIGHT, "bias": torch.ones(64), "sinks": torch.ones(4), "input_scale": torch.ones(1)}
    found = read_module(tmp_path, floats, said)
    assert found.keys() == {"weight", "bias", "sinks"} and torch.equal(found["weight"], WEIGHT)
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn):
        check_refused(tmp_path, {**floats, leaf: floats[leaf].to(dtype)}, said, f"'{MODULE}.")
    if leaf == "weight":
        for dtype in (torch.uint8, torch.int16):
            check_refused(tmp_path, {**floats, leaf: WEIGHT.to(dtype)}, said, f"'{MODULE}.weight'")


def test_codes_beside_scales_of_a_cache(tmp_path: Path) -> None:
    assert read_module(tmp_path, {"k_scale": torch.ones(1), "sinks": torch.ones(4)}, compressed(INT8)).keys() == {
        "sinks"
    }
    check_refused(tmp_path, {"weight": WEIGHT, "weight_zero_point": torch.ones(1)}, compressed(INT8), "weight")


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (lambda weight: gptq(weight, 4, 32, "gptq")[0], GPTQ),
        (lambda weight: four_bits(weight, "nf4")[0], {"quant_method": "bitsandbytes", **CONFIGS["nf4"]}),
        (lambda weight: eight_bits(weight)[0], {"quant_method": "bitsandbytes", **CONFIGS["int8"]}),
    ],
    ids=["gptq", "nf4", "int8"],
)
@pytest.mark.parametrize("place", ["attn.c_proj", "mlp.c_fc"])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_weights_of_conv1d(
    store: Callable[[torch.Tensor], Tensors],
    said: dict[str, Any],
    place: str,
    prefix: str,
    tmp_path: Path,
    one_line: Callable[[BaseException], str],
) -> None:
    """Of GPT-2, square and not: a reader's weights are ``[out, in]``, these modules' ``[in, out]``."""
    build_tiny_model("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {key.replace("transformer.", prefix): tensor for key, tensor in load_file(file).items()}
    owner = f"{prefix}h.1.{place}"
    weight = state.pop(f"{owner}.weight").T.contiguous().float()
    assert (len(set(weight.shape)) == 1) == (place == "attn.c_proj")
    state |= {f"{owner}.{leaf}": tensor.contiguous() for leaf, tensor in store(weight).items()}
    save_file(state, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    with pytest.raises(ValueError, match="is quantized") as error:
        load_model(tmp_path, "float32", False, CPU)
    message = one_line(error.value)
    assert f"'{owner}.weight' belongs to a Conv1D" in message and "pass the float checkpoint" in message


def test_a_head_beside_conv1d_is_read(tmp_path: Path) -> None:
    model = build_tiny_model("gpt2", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    tensors, dense = gptq(state.pop("lm_head.weight").float(), 4, 32, "gptq")
    save_file({**state, **{f"lm_head.{leaf}": one.contiguous() for leaf, one in tensors.items()}}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    head = load_model(tmp_path, "float32", False, CPU).lm_head.weight
    assert isinstance(head, StoredWeight) and torch.equal(head.dense(), dense)
