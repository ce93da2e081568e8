"""Calibration for 4 bits: the solver, what the loader finds of its result, and the walk through the layers."""

from __future__ import annotations

import copy

import pytest
import torch

from torch_pagoda.compiler.calibrate import calibrate
from torch_pagoda.compiler.calibrate.decoder_layers import decoder_layers, first_call, matrices_by_input
from torch_pagoda.compiler.calibrate.grid import GridWeight, damped, output_error, round_to_grid, stretch
from torch_pagoda.runtime.ops.linear.quantized_weight import (
    Quantization,
    quantize_weight,
    restored_weight,
    round_weight,
    unpack_weight,
)

from tiny_models import build_tiny_model

WINDOWS = torch.randint(3, 255, (8, 32), generator=torch.Generator().manual_seed(0))


def correlated(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and the sum of x x' of inputs that depend on each other, as hidden states do."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    mixing = torch.randn(inputs // 4, inputs, generator=generator)
    x = torch.randn(2048, inputs // 4, generator=generator) @ mixing
    x += 0.3 * torch.randn(2048, inputs, generator=generator)
    return weight, x.T @ x


def to_nearest(weight: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    return restored_weight(*round_weight(weight, scheme), scheme)


@pytest.mark.parametrize(("inputs", "group_size"), [(256, 64), (192, 128), (320, 0)])
def test_outputs_change_less_than_to_nearest(inputs, group_size):
    weight, own = correlated(48, inputs)
    hessian = damped(own, 0.01)
    grid = round_to_grid(weight, hessian, group_size)
    nearest = output_error(weight, to_nearest(weight, Quantization(4, group_size, 16)), own)
    assert output_error(weight, grid.dense(), own) < 0.4 * nearest
    assert grid.whole.min() >= -8 and grid.whole.max() <= 7 and torch.equal(grid.whole, grid.whole.round())


def test_fitting_lowers_the_error():
    weight, own = correlated(48, 256)
    hessian = damped(own, 0.01)
    errors = [output_error(weight, round_to_grid(weight, hessian, 64, rounds).dense(), hessian) for rounds in (0, 4)]
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "group_size"), [(256, 64), (192, 128), (320, 0)])
def test_the_loader_finds_the_same_whole_numbers(inputs, group_size, dtype):
    weight, own = correlated(80, inputs)
    weight[3, :] = 0
    grid = round_to_grid(weight, damped(own, 0.01), group_size)
    scheme = Quantization(4, group_size, 16)
    stored = grid.dense().to(dtype)
    whole, scales = unpack_weight(quantize_weight(stored, scheme), 80, inputs, scheme)
    size = group_size or inputs
    # A scale may take the other sign, with all numbers of its group.
    same = (whole.float() * scales.sign().repeat_interleave(size, 1)[:, :inputs]) == (
        grid.whole * grid.scales.sign().repeat_interleave(size, 1)[:, :inputs]
    )
    assert same.all()
    assert (restored_weight(whole, scales, scheme) - grid.dense()).abs().max() < 0.01 * grid.dense().abs().max()


@pytest.mark.parametrize("far", range(1, 9))
def test_groups_are_stretched_as_far_as_the_loader_looks(far):
    whole = torch.randint(1 - far, far, (4, 64), generator=torch.Generator().manual_seed(far)).float()
    whole[:, 5] = -far
    grid = stretch(GridWeight(whole, torch.full((4, 1), 0.1), 64))
    assert grid.whole.abs().max() == max(far, 7)
    assert torch.allclose(to_nearest(grid.dense(), Quantization(4, 64, 16)), grid.dense(), atol=1e-6)
    assert (grid.dense() - 0.1 * whole).abs().max() <= 0.05 * min(1.0, far / 7) + 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2", "mixtral", "deepseek_v3"])
def test_layers_on_their_own_compute_what_the_model_does(name):
    model = build_tiny_model(name)
    layers = decoder_layers(model)
    with torch.no_grad():
        call = first_call(model, layers, WINDOWS[:2])
        for index, layer in enumerate(layers):
            assert matrices_by_input(layer, index, call)
            call.hidden = call.run(layer, index)
        seen = []
        layers[-1].register_forward_hook(
            lambda module, args, out: seen.append(out if torch.is_tensor(out) else out[0])
        )
        model(input_ids=WINDOWS[:2])
    assert torch.equal(call.hidden, seen[0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_calibrated_model_is_closer_than_a_rounded_one(name):
    model = build_tiny_model(name)
    right = model(input_ids=WINDOWS).logits
    nearest, calibrated = copy.deepcopy(model), copy.deepcopy(model)
    found = calibrate(calibrated, WINDOWS, 64, batch_size=4)
    assert found and all(matrix.error < matrix.nearest_error for matrix in found)
    names = {matrix.name for matrix in found}
    for path, module in nearest.named_modules():
        if path in names:
            weight = module.weight.t() if name == "gpt2" else module.weight
            rounded = to_nearest(weight, Quantization(4, 64, 16))
            module.weight = torch.nn.Parameter(rounded.t() if name == "gpt2" else rounded, requires_grad=False)
    errors = [(m(input_ids=WINDOWS).logits - right).square().mean() for m in (calibrated, nearest)]
    assert errors[0] < 0.7 * errors[1]
    untouched = {n: p for n, p in model.named_parameters() if n.removesuffix(".weight") not in names}
    assert all(torch.equal(p, calibrated.get_parameter(n)) for n, p in untouched.items())


def test_matrices_that_read_the_same_are_solved_together():
    model = build_tiny_model("llama")
    layers = decoder_layers(model)
    call = first_call(model, layers, WINDOWS[:1])
    groups = [[m.name.rpartition(".")[2] for m in group] for group in matrices_by_input(layers[0], 0, call)]
    assert groups == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


class _SometimesMore(torch.nn.Module):
    """A layer whose second matrix is used by some batches only."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.extra = inner, torch.nn.Linear(64, 64, bias=False)

    def forward(self, hidden, *args, **kwargs):
        out = self.inner(hidden, *args, **kwargs)
        out = out if torch.is_tensor(out) else out[0]
        return out + self.extra(out) if len(hidden) == 3 else out


def test_batches_may_leave_a_matrix_out():
    model = build_tiny_model("llama")
    model.model.layers[1] = _SometimesMore(model.model.layers[1]).requires_grad_(False)
    names = [matrix.name for matrix in calibrate(model, WINDOWS, 64, batch_size=3)]
    assert "model.layers.1.extra" in names


@pytest.mark.parametrize(
    ("windows", "group_size", "message"),
    [
        (WINDOWS, 96, "group_size=96 is not supported"),
        (WINDOWS.float(), 64, "windows is torch.float32"),
        (WINDOWS[:0], 64, r"of shape \[0, 32\]; pass int64 token ids"),
    ],
)
def test_mistakes_are_named(windows, group_size, message):
    with pytest.raises(ValueError, match=message):
        calibrate(build_tiny_model("llama"), windows, group_size)


def test_a_model_without_a_list_of_layers_is_refused():
    model = build_tiny_model("llama")
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="without a list of its 5 decoder layers"):
        calibrate(model, WINDOWS, 64)
