"""What linking makes of weights that products of Ascend read in 8 or 4 bits: integers, scales and offsets."""

from __future__ import annotations

from dataclasses import replace

import torch

from .....passes import UnsupportedModel
from .....passes.graph.notes import QuantizedInputs
from .....runtime.ops.linear.quantized_weight import Quantization, round_weight
from .....runtime.ops.linear.stored_weight import StoredWeight, as_dense
from .....runtime.ops.linear.weight_format import unpacked_pairs
from .....runtime.ops.npu.int4 import pack_int4, unpack_int4
from .....runtime.ops.npu.numerics import bits_of_float, float_of_bits

_SAMPLED = 64
"""Outputs at the beginning and at the end of a matrix that are looked at."""
_MOST_OFF = {8: 0.51, 4: 2.2}
"""Scales by which an entry may be off: half of one, and where that loses less in all, what 4 bits cut off."""
_AS_STORED = 1e-3
"""Likewise, of the entry, of weights that a checkpoint stores in scales that are kept."""
_IN_19_BITS = 2**-11 + 1e-6
"""Likewise, where their scales are rounded to 19 bits."""
_CUT_BITS = 13
"""Of float32, which chips do not read of scales of groups."""


def make_inputs(
    weight: torch.Tensor, inputs: QuantizedInputs, bias: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of ``inputs``, by name.

    Args:
        weight: ``[out, in]`` or what ``QuantizedInputs.source`` says, of floats or stored.
        inputs: what is to be made of it.
        bias: ``[out]``, what ``inputs.bias`` holds.
    """
    if weight.dim() == 3:
        parts = [make_inputs(matrix, replace(inputs, turned=True)) for matrix in weight.detach().unbind(0)]
        return {name: torch.stack([part[name] for part in parts]) for name in inputs.made}
    matrix = weight.detach().transpose(0, 1) if inputs.turned else weight.detach()
    scheme, dtype = inputs.quantization, inputs.scale_dtype
    if isinstance(matrix, StoredWeight):
        numbers, scales, zeros = _stored_numbers(matrix, scheme.bits)
    else:
        numbers, scales = _rounded(matrix, scheme, dtype)
        zeros = None
    numbers = numbers.transpose(0, 1)
    if scheme.input_scale is not None:
        scales = scales.float() * scheme.input_scale.scale
        if not bool(scales.isfinite().all()) or bool((scales == 0).any()):
            raise UnsupportedModel(
                f"scales of the weight {inputs.source!r} times that of its inputs, {scheme.input_scale.scale:.3g}, "
                "are 0 or infinite in float32; use input_bits=16"
            )
    if inputs.sums and scheme.group_size:
        scales = _in_19_bits(scales, inputs.source)
    kept = _of_groups(scales, scheme)
    made = {
        inputs.numbers: pack_int4(numbers) if scheme.bits == 4 else numbers.contiguous(),
        inputs.scales: _bits(kept, inputs) if dtype is torch.int64 else kept.to(dtype),
    }
    if inputs.offsets:
        # The operator adds it to numbers around 0.
        offsets = torch.zeros_like(scales) if zeros is None else (1 << (scheme.bits - 1)) - zeros.float()
        made[inputs.offsets] = _of_groups(offsets, scheme).to(dtype)
    if inputs.sums:
        made[inputs.sums] = _sums(numbers, kept if scheme.group_size else kept[None])
    if inputs.whole_bias:
        made[inputs.whole_bias] = _whole_bias(numbers, kept, inputs, bias)
    return made


def _bits(scales: torch.Tensor, inputs: QuantizedInputs) -> torch.Tensor:
    """The bits of scales; beside sums ``[groups, out]``."""
    return bits_of_float(scales)[None] if inputs.sums and scales.dim() == 1 else bits_of_float(scales)


def _in_19_bits(scales: torch.Tensor, source: str) -> torch.Tensor:
    """Scales in float32 that are right in their upper 19 bits, where chips cut those of groups off (op-plugin, doc
    ``torch_npu-npu_trans_quant_param.md``); ties to even.

    Raises:
        UnsupportedModel: one is 0 or infinite then.
    """
    bits = scales.float().contiguous().view(torch.int32)
    odd = (bits >> _CUT_BITS) & 1
    kept = ((bits + odd + (1 << (_CUT_BITS - 1)) - 1) & -(1 << _CUT_BITS)).view(torch.float32)
    if not bool(kept.isfinite().all()) or bool((kept == 0).any()):
        raise UnsupportedModel(f"scales of the weight {source!r} are 0 or infinite in 19 bits; use input_bits=16")
    return kept


def _whole_bias(
    numbers: torch.Tensor, scales: torch.Tensor, inputs: QuantizedInputs, bias: torch.Tensor | None
) -> torch.Tensor:
    """See ``QuantizedInputs``; of numbers ``[in, out]`` and the scales of the results ``[out]``.

    Raises:
        UnsupportedModel: the bias is too large for it.
    """
    given = inputs.quantization.input_scale
    assert given is not None
    whole = -given.offset * numbers.sum(0, dtype=torch.int64)
    if bias is not None:
        whole = whole + (bias.detach().double() / scales.double()).round()
    limits = torch.iinfo(torch.int32)
    if not bool(((whole >= limits.min) & (whole <= limits.max)).all()):
        raise UnsupportedModel(
            f"the bias {inputs.bias!r} of the weight {inputs.source!r} is not an int32 in steps of its scales; "
            "use input_bits=16"
        )
    return whole.to(torch.int32)


def _sums(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """8 times the sum of the weights of each output, float32 ``[out]``, of numbers ``[in, out]`` and scales
    ``[groups, out]``."""
    of_groups = numbers.unflatten(0, (len(scales), -1)).sum(1, dtype=torch.int32)
    return (8 * of_groups * scales.double()).sum(0).float()


def _of_groups(table: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    """``[groups, out]`` of ``[out, groups]``; ``[out]`` where there is one group."""
    return table.transpose(0, 1).contiguous() if scheme.group_size else table.flatten().contiguous()


def _stored_numbers(weight: StoredWeight, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Of a weight ``[out, in]``: numbers around 0 in int8, scales and zeros ``[out, groups]``."""
    if bits == 8:
        return weight.codes.view(torch.int8) ^ -128, weight.scales, weight.zeros
    return unpacked_pairs(weight.codes).to(torch.int8) - 8, weight.scales, weight.zeros


def _rounded(
    matrix: torch.Tensor, quantization: Quantization, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers ``[out, in]`` and scales ``[out, groups]`` as they are kept, which the numbers are right for."""
    numbers, scales = round_weight(matrix, quantization)
    if scale_dtype in (torch.float32, torch.int64):
        return numbers, scales
    kept = scales.to(scale_dtype)
    wide = _of_inputs(kept.float(), quantization, matrix.shape[1])
    most = 127 if quantization.bits == 8 else 7
    least = -127 if quantization.bits == 8 else -8
    numbers = torch.where(wide != 0, matrix.float() / wide, 0.0).round().clamp(least, most).to(torch.int8)
    return numbers, kept


def _of_inputs(table: torch.Tensor, scheme: Quantization, inputs: int) -> torch.Tensor:
    """A table ``[out, groups]`` with a column for each input; one that broadcasts where there is one group."""
    return table.repeat_interleave(scheme.group_size, 1)[:, :inputs] if scheme.group_size else table


def check_inputs(
    weight: torch.Tensor,
    inputs: QuantizedInputs,
    made: dict[str, torch.Tensor],
    bias: torch.Tensor | None = None,
) -> None:
    """Compare the first and the last outputs of what was made of a weight with it.

    Args:
        weight: as it was.
        inputs: what was to be made of it.
        made: what ``make_inputs`` returned.
        bias: ``[out]``, what ``inputs.bias`` holds.

    Raises:
        UnsupportedModel: an entry is farther off than rounding explains.
    """
    numbers, scales = made[inputs.numbers], made[inputs.scales]
    if weight.dim() == 3:
        for expert in {0, len(weight) - 1}:
            parts = {name: tensor[expert] for name, tensor in made.items()}
            check_inputs(weight[expert], replace(inputs, turned=True), parts)
        return
    scheme = inputs.quantization
    numbers = (unpack_int4(numbers) if scheme.bits == 4 else numbers).t()
    if scales.dtype is torch.int64:
        scales = float_of_bits(scales)
        scales = scales[0] if inputs.sums and not scheme.group_size else scales
    if inputs.whole_bias and not torch.equal(made[inputs.whole_bias], _whole_bias(numbers.t(), scales, inputs, bias)):
        raise UnsupportedModel(
            f"the bias in integers of the weight {inputs.source!r} is wrong; please report it. verify='off' "
            "skips this check"
        )
    if scheme.input_scale is not None:
        scales = scales / scheme.input_scale.scale
    scales = scales.t() if scheme.group_size else scales[:, None]
    offsets = made.get(inputs.offsets)
    offsets = None if offsets is None else (offsets.t() if scheme.group_size else offsets[:, None])
    width = numbers.shape[1]
    plain = weight.detach().transpose(0, 1) if inputs.turned else weight.detach()
    if isinstance(plain, StoredWeight):  # the inputs are put in order, not the columns
        form = replace(plain.form, ordered=False)
        plain = plain.replaced(form=form, order=None, dtype=torch.float32)
    for first in {0, max(0, len(numbers) - _SAMPLED)}:
        some = slice(first, first + _SAMPLED)
        exact = as_dense(plain[some]).float()
        if not exact.isfinite().all():
            continue  # NaN in, NaN out
        unit = _of_inputs(scales[some].float(), scheme, width)
        whole = numbers[some].float()
        if offsets is not None:
            whole = whole + _of_inputs(offsets[some].float(), scheme, width)
        off = (whole * unit - exact).abs()
        most = exact.abs() * _kept(inputs) if inputs.stored else _MOST_OFF[scheme.bits] * unit.abs()
        wrong = int((off > most + 1e-30).sum())
        if wrong:
            raise UnsupportedModel(
                f"{wrong} entries of the weight {inputs.source!r} are wrong after quantization to {scheme.bits} "
                "bits; please report it. verify='off' skips this check"
            )
    if inputs.sums and not torch.allclose(
        made[inputs.sums], _sums(numbers.t(), scales.t()), rtol=0, atol=0, equal_nan=True
    ):
        raise UnsupportedModel(
            f"sums of the weight {inputs.source!r} are wrong; please report it. verify='off' skips this check"
        )


def _kept(inputs: QuantizedInputs) -> float:
    """What storing a scale as it is kept may change of it."""
    if inputs.sums and inputs.quantization.group_size:
        return _IN_19_BITS
    dtype = inputs.scale_dtype
    return _AS_STORED if dtype in (torch.float32, torch.int64) else 2.0 * torch.finfo(dtype).eps
