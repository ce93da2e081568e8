"""`pagoda::masked_argmax` and `pagoda::apply_bitmask_`: sampling among the tokens that a grammar allows."""

from __future__ import annotations

import struct

import torch

from .native import FLOAT_CODES, kernel_function
from .registration import Facts, register_operator

aten = torch.ops.aten

_ARGMAX_SCHEMA = "masked_argmax(Tensor logits, Tensor bitmask, Tensor rows) -> Tensor"
_APPLY_SCHEMA = "apply_bitmask_(Tensor(a!) logits, Tensor bitmask, Tensor rows) -> ()"
_ARGUMENTS = struct.Struct("=12q")  # MaskedChoiceArguments in csrc/masked_choice.cpp


def masked_argmax_reference(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The likeliest token of those that a mask allows; the first of equals.

    Args:
        logits: ``[M, V]`` fp32, bf16 or fp16. Any strides.
        bitmask: ``[S, W]`` int32; bit ``i % 32`` of word ``i // 32``: token i is allowed. Tokens beyond it are not.
        rows: ``[S]`` int64; the row of ``logits`` that each mask is for.

    Returns:
        ``[S]`` int64: token ids; -1 where no token is allowed, or where among the allowed ones is a NaN, +inf or
        nothing but -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit, a row that is not there.
    """
    _check(logits, bitmask, rows)
    if not len(rows):
        return rows.clone()
    x = logits[rows].float().masked_fill_(~_allowed(bitmask, logits.shape[1]), -torch.inf)
    best = x.argmax(-1)
    usable = x.gather(-1, best[:, None]).isfinite()[:, 0]
    return best.where(usable, -1)


def apply_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set the logits of tokens that a mask does not allow to -inf, in place.

    Args:
        logits, bitmask, rows: as for :func:`masked_argmax_reference`; no row twice.

    Raises:
        ValueError: as there.
    """
    _check(logits, bitmask, rows)
    logits[rows] = logits[rows].masked_fill(~_allowed(bitmask, logits.shape[1]), -torch.inf)


def masked_argmax_cpu(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """:func:`masked_argmax_reference` by the C++ kernel, which reads no logit that is not allowed."""
    _check(logits, bitmask, rows)
    chosen = torch.empty(len(rows), dtype=torch.int64)
    if _run(logits, bitmask, rows, chosen):
        return chosen
    return masked_argmax_reference(logits, bitmask, rows)


def apply_bitmask_cpu(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """:func:`apply_bitmask_reference` by the C++ kernel."""
    _check(logits, bitmask, rows)
    if not _run(logits, bitmask, rows, None):
        apply_bitmask_reference(logits, bitmask, rows)


def _run(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor | None) -> bool:
    """Call the kernel; returns whether it did the work."""
    kernel = kernel_function("pagoda_masked_choice")
    code = FLOAT_CODES.get(logits.dtype)
    if kernel is None or code is None or (chosen is None and logits.stride(1) != 1):
        return False
    if bitmask.stride(1) != 1:
        bitmask = bitmask.contiguous()
    rows = rows.contiguous()
    status = kernel(
        _ARGUMENTS.pack(
            logits.data_ptr(),
            *logits.stride(),
            bitmask.data_ptr(),
            bitmask.stride(0),
            rows.data_ptr(),
            0 if chosen is None else chosen.data_ptr(),
            code,
            len(rows),
            logits.shape[1],
            bitmask.shape[1],
            torch.get_num_threads(),
        )
    )
    return status == 0


def _allowed(bitmask: torch.Tensor, columns: int) -> torch.Tensor:
    """``[S, W]`` int32 → ``[S, columns]`` bool."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)
    return aten.pad(allowed, (0, max(columns - allowed.shape[1], 0)))[:, :columns]


def _check(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    if logits.dim() != 2 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}; give [rows, tokens] floats"
        )
    if bitmask.dim() != 2 or bitmask.dtype is not torch.int32:
        raise ValueError(
            f"bitmask has shape {tuple(bitmask.shape)} and dtype {bitmask.dtype}; give [S, W] torch.int32"
        )
    if rows.shape != bitmask.shape[:1] or rows.dtype is not torch.int64:
        raise ValueError(
            f"rows has shape {tuple(rows.shape)} and dtype {rows.dtype}; give one torch.int64 for each of the "
            f"{bitmask.shape[0]} masks"
        )
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < logits.shape[0]:
        raise ValueError(f"rows holds {rows.tolist()[:8]}, and logits has {logits.shape[0]} rows; give some of them")


def _fake_argmax(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape)


def _fake_apply(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    return None


masked_argmax = register_operator(
    _ARGMAX_SCHEMA,
    Facts(over="rows", invariant=True, kind="", spelled_out=False),
    fake=_fake_argmax,
    reference=masked_argmax_reference,
    cpu=masked_argmax_cpu,
)
apply_bitmask_ = register_operator(
    _APPLY_SCHEMA,
    Facts(over="rows", invariant=True, kind="", spelled_out=False),
    fake=_fake_apply,
    reference=apply_bitmask_reference,
    cpu=apply_bitmask_cpu,
)
