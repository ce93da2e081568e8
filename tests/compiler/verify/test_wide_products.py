"""Linear layers of a reference in half precision: rounded once, from sums in float32, whichever way is faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_checkpoints import quantize_folder
from torch import nn
from torch.nn.functional import linear as torch_linear

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.verify import wide_products
from torch_pagoda.compiler.verify.wide_products import WideProducts, linear
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

BIASES = [None, torch.arange(33.0), torch.arange(66.0)[::2]]


@pytest.fixture(params=[False, True], ids=["as torch", "in float32"])
def widens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(wide_products, "widens", lambda dtype: request.param and dtype is not torch.float32)
    monkeypatch.setattr(wide_products, "AT_ONCE", 4 * 50 * 8)  # eight rows
    return bool(request.param)


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("bias", BIASES, ids=["none", "bias", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_linear(rows: int, bias: torch.Tensor | None, dtype: torch.dtype, widens: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 50).to(dtype), torch.randn(33, 50).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    found, expected = linear(x, weight, bias), torch_linear(x, weight, bias)
    assert found.dtype is dtype
    most = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, atol=most, rtol=most)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN multiplies")
def test_a_module_is_run_in_float32(widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(50, 33).bfloat16(), torch.randn(2, 5, 50).bfloat16()
    seen: list[torch.dtype] = []
    multiply = wide_products._multiply
    monkeypatch.setattr(wide_products, "_multiply", lambda x, *rest: seen.append(x.dtype) or multiply(x, *rest))
    with torch.no_grad(), WideProducts():
        found = module(x)
    assert seen == ([torch.float32] * 5 if widens else [])  # 33 rows, eight at a time
    exact = torch_linear(x.double(), module.weight.double(), module.bias.double())
    assert (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    with torch.no_grad(), WideProducts():
        assert torch.equal(module.float()(x.float()), torch_linear(x.float(), module.weight, module.bias))


def test_stored_weights_are_unpacked_by_rows(tmp_path: Path, widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path / "model")
    quantize_folder(tmp_path / "model", "ct-w4a16")
    model = load_model(tmp_path / "model", "bfloat16", False, torch.device("cpu"))
    tokens = torch.randint(0, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    assert any(isinstance(weight, StoredWeight) for weight in model.parameters())
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        with WideProducts():
            found = model(input_ids=tokens).logits
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
