"""Compares a quantized weight with the original, and products with its numbers."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...passes import UnsupportedModel
from ...runtime.ops.linear.quantized_linear import quantized_linear_cpu, quantized_linear_reference
from ...runtime.ops.linear.quantized_weight import (
    PANEL,
    Quantization,
    restored_weight,
    spread_over_inputs,
    unpack_weight,
)
from ...runtime.ops.linear.stored_weight import StoredWeight, as_dense

_ROWS = 3
_MOST_OFF = {8: 0.51, 4: 2.2}
"""Scales by which an entry may be off: half of one, and where that loses less in all, what 4 bits cut off."""
_AS_STORED = 1e-3
"""Likewise of weights that a checkpoint stores, which nothing rounds but float32."""


def check_rounded_weight(name: str, weight: torch.Tensor, packed: torch.Tensor, scheme: Quantization) -> None:
    """Look at the first and the last 64 outputs of a matrix; a model's logits hardly show what is slightly wrong.

    Args:
        name: of the weight, for the message.
        weight: ``[out, in]``, as it was.
        packed: what ``quantize_weight`` made of it.
        scheme: how.

    Raises:
        UnsupportedModel: an entry is farther off than rounding explains, or a product differs from that with the
            numbers that are stored.
    """
    if isinstance(weight, StoredWeight):
        form = replace(weight.form, ordered=False)  # the kernel orders the inputs, not the columns
        weight, most_off = weight.replaced(form=form, order=None, dtype=torch.float32), _AS_STORED
    else:
        most_off = _MOST_OFF[scheme.bits]
    outputs, inputs = weight.shape
    panels = packed.view(-(-outputs // PANEL), -1)
    x = torch.randn(_ROWS, inputs, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    for panel in {0, len(panels) - 1}:
        plain = as_dense(weight[panel * PANEL : (panel + 1) * PANEL].detach()).float()
        stored, count = panels[panel].contiguous(), len(plain)
        whole, scales = unpack_weight(stored, count, inputs, scheme)
        unit = spread_over_inputs(scales, inputs, scheme).abs()
        restored = restored_weight(whole, scales, scheme)
        if not plain.isfinite().all():
            continue  # NaN in, NaN out
        # Of a group without a scale only zeros, or what is too small for one, may be left.
        off = (restored - plain).abs() > most_off * unit + 1e-30
        given = (x, stored, None, count, *scheme.arguments())
        found, expected = quantized_linear_cpu(*given).float(), quantized_linear_reference(*given).float()
        error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        if off.any() or not error <= 0.02:
            what = f"{int(off.sum())} entries" if off.any() else f"products, by {float(error):.2g} of the largest,"
            raise UnsupportedModel(
                f"{what} of the weight {name!r} are wrong after quantization to {scheme.bits} bits; please report "
                "it. verify='off' skips this check"
            )
