"""`pagoda::square_sums` and `pagoda::rms_norm_of_sums`: a root-mean-square norm over features that ranks share."""

from __future__ import annotations

import torch

from ..registration import Facts, register_operator

aten = torch.ops.aten

_GATES = {"silu": aten.silu, "sigmoid": aten.sigmoid}


def square_sums_reference(
    input: torch.Tensor, gate: torch.Tensor | None, counts: torch.Tensor, activation: str
) -> torch.Tensor:
    """The sums of the squares of a rank's features, or of ``input * act(gate)``, for each group of features.

    Args:
        input: ``[..., D]`` fp32, bf16 or fp16.
        gate: ``[..., D]``, multiplied in fp32 after its activation; None: no gate in front of the norm.
        counts: ``[D, G]`` float32: 1 for a feature of the group that counts on this rank, else 0.
        activation: "silu" or "sigmoid"; read with a gate only.

    Returns:
        ``[..., G]`` float32.
    """
    x = input.float() if gate is None else input.float() * _GATES[activation](gate.float())
    return aten.matmul(x.square(), counts).contiguous()


def rms_norm_of_sums_reference(
    input: torch.Tensor,
    gate: torch.Tensor | None,
    sums: torch.Tensor,
    groups: torch.Tensor,
    weight: torch.Tensor | None,
    features: int,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
    activation: str,
    gate_first: bool,
) -> torch.Tensor:
    """``rms_norm_reference`` or ``gated_rms_norm_reference`` of the features that a rank holds.

    Args:
        input: ``[..., D]`` fp32, bf16 or fp16.
        gate: ``[..., D]``; None: no gate.
        sums: ``[..., G]`` float32, of the squares of all ranks' features.
        groups: ``[D]`` int64, the group that each feature belongs to.
        weight: ``[D]``, or None.
        features: number of them in a group, on all ranks together.
        eps, weight_offset, round_before_scale, activation, gate_first: as for these.

    Returns:
        ``[..., D]`` in the dtype of ``gate``, or of ``input`` without one; contiguous.
    """
    dtype = input.dtype if gate is None else gate.dtype
    opened = None if gate is None else _GATES[activation](gate.float())
    x = input.float() if opened is None or not gate_first else input.float() * opened
    normed = x * aten.rsqrt(sums / features + eps).index_select(-1, groups)
    if round_before_scale:
        normed = normed.to(dtype)
    if weight is not None:
        scale = weight.to(normed.dtype)
        normed = normed * (scale + weight_offset if weight_offset else scale)
    if opened is not None and not gate_first:
        normed = normed * opened
    return normed.to(dtype).contiguous()


def _sums(input: torch.Tensor, gate: torch.Tensor | None, counts: torch.Tensor, activation: str) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], counts.shape[1]), dtype=torch.float32)


def _normed(input: torch.Tensor, gate: torch.Tensor | None, *_: object) -> torch.Tensor:
    return input.new_empty(input.shape, dtype=input.dtype if gate is None else gate.dtype)


square_sums = register_operator(
    "square_sums(Tensor input, Tensor? gate, Tensor counts, str activation) -> Tensor",
    Facts(over="rows", invariant=False, kind="", spelled_out=True),
    fake=_sums,
    reference=square_sums_reference,
    cpu=square_sums_reference,
)
rms_norm_of_sums = register_operator(
    "rms_norm_of_sums(Tensor input, Tensor? gate, Tensor sums, Tensor groups, Tensor? weight, int features, "
    "float eps, float weight_offset, bool round_before_scale, str activation, bool gate_first) -> Tensor",
    Facts(over="rows", invariant=True, kind="norm", spelled_out=True),
    fake=_normed,
    reference=rms_norm_of_sums_reference,
    cpu=rms_norm_of_sums_reference,
)
