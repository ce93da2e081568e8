"""`pagoda::packed_linear`: a linear layer whose weight may be laid out in panels of outputs.

On x86 processors that multiply bf16, oneDNN lays weights out. It multiplies many rows at the processor's limit; for
few, which wait for memory, a kernel of ours reads the same weight (``csrc/blocked_linear.cpp``), where oneDNN's
layout is the one that it knows; that is looked at, weight by weight, when one is packed. On all other processors
weights are laid out here, in the same panels, and that kernel takes any number of rows.
"""

from __future__ import annotations

import functools
import struct

import torch

from ..native import FLOAT_CODES, bind_function, kernel_function, load_kernels
from ..registration import Facts, register_operator
from .invariant_linear import invariant_linear_cpu
from .onednn_weight import pack_for_onednn
from .weight_panels import STEP, lay_out_rows

aten = torch.ops.aten

MOST_ROWS = 64
"""More go to oneDNN where it has packed the weight."""
_SCHEMA = "packed_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor"
_ARGUMENTS = struct.Struct("=11q")  # BlockedLinearArguments in csrc/blocked_linear.cpp


def packed_linear_reference(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``input @ weight.T + bias``.

    Args:
        input: ``[..., in]``, bf16 or fp32.
        weight: ``[out, in]`` in the dtype of ``input``, or what :func:`pack_weight` made of it.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``, contiguous.
    """
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    if weight.dim() == 3:
        weight = unpack_weight(weight, input.shape[-1])
    return aten.linear(input, weight, bias)


def packed_linear_cpu(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`packed_linear_reference` by the C++ kernel where it knows the weight's layout: any number of rows where
    we laid it out, up to ``MOST_ROWS`` where oneDNN did, which takes the others.

    Where we would lay it out, a plain weight goes to the kernel of ``invariant_linear``: torch is slow there.
    """
    blocked: tuple[int, int] | None
    if weight.dim() == 3:
        blocked = (weight.data_ptr(), own_panel())
    else:
        blocked = getattr(weight, "blocked", None)
        if blocked is None and input.dtype is weight.dtype is torch.bfloat16 and own_panel() and not weight.is_mkldnn:
            return invariant_linear_cpu(input, weight, bias)
    if blocked is None or (weight.dim() == 2 and input.numel() > MOST_ROWS * input.shape[-1]):
        return packed_linear_reference(input, weight, bias)
    kernel = kernel_function("pagoda_blocked_linear")
    inputs, outputs = input.shape[-1], weight.shape[0]
    fits = inputs == weight.shape[1] if weight.dim() == 2 else _holds_panels(weight, inputs, blocked[1])
    if kernel is None or input.dtype is not torch.bfloat16 or not fits:
        return packed_linear_reference(input, weight, bias)
    result = input.new_empty((*input.shape[:-1], outputs))
    rows = input if input.dim() == 2 else input.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    address, panel = blocked
    failed = kernel(
        _ARGUMENTS.pack(
            rows.data_ptr(),
            address,
            0 if bias is None else bias.data_ptr(),
            result.data_ptr(),
            0 if bias is None else FLOAT_CODES[bias.dtype],
            rows.shape[0],
            inputs,
            outputs,
            rows.stride(0),
            panel,
            torch.get_num_threads(),
        )
    )
    return packed_linear_reference(input, weight, bias) if failed else result


def _fake(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


packed_linear = register_operator(
    _SCHEMA,
    Facts(over="rows", invariant=False, kind="", spelled_out=False),
    fake=_fake,
    reference=packed_linear_reference,
    cpu=packed_linear_cpu,
    opaque=True,
)


@functools.cache
def own_panel() -> int:
    """Outputs of a panel of the weights that are laid out here; 0 where oneDNN does that, or there are no kernels."""
    library = load_kernels()
    return 0 if library is None else bind_function(library, "pagoda_blocked_panel")(b"")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine has packed products in ``dtype``: bf16 where there are our kernels, or where the CPU has
    instructions for it that oneDNN uses."""
    if dtype is not torch.bfloat16:
        return False
    if own_panel():
        return True
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weight(*weights: torch.Tensor) -> torch.Tensor:
    """An ``[out, in]`` weight as :func:`packed_linear` reads it fastest; of as many bytes, but for padding. Several
    are the rows of one, one after the other.

    Where ``own_panel()`` is not 0, ``[out, in / 2, 2]``: the head of memory that holds panels ``[in / 2][panel][2]``,
    see ``csrc/blocked_linear.cpp``. Elsewhere what :func:`pack_for_onednn` makes.
    """
    rows = [weight.detach().contiguous() for weight in weights]
    if panel := own_panel():
        outputs, pairs = sum(map(len, rows)), -(-rows[0].shape[1] // 2)
        return lay_out_rows(rows, panel).view(-1)[: outputs * pairs * 2].view(outputs, pairs, 2)
    return pack_for_onednn(*rows)


def _holds_panels(weight: torch.Tensor, inputs: int, panel: int) -> bool:
    """True for what :func:`pack_weight` returns: behind the head is the memory that a copy of it lacks."""
    if not panel:
        return False
    outputs, pairs, two = weight.shape
    numbers = -(-outputs // panel) * panel * -(-inputs // STEP) * STEP
    held = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    return (pairs, two) == (-(-inputs // 2), 2) and held >= numbers


def unpack_weight(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """The ``[out, in]`` weight that :func:`pack_weight` laid out in panels.

    Raises:
        ValueError: it is not one of so many inputs, or a copy of its head.
    """
    if not _holds_panels(packed, inputs, own_panel()):
        raise ValueError(
            f"weight of shape {tuple(packed.shape)} holds no panels of {inputs} inputs; pass what pack_weight "
            "returned, not a copy of it"
        )
    outputs, panel = packed.shape[0], own_panel()
    panels, pairs = -(-outputs // panel), -(-inputs // STEP) * STEP // 2
    laid = packed.as_strided((panels, panel, pairs, 2), (pairs * panel * 2, 2, panel * 2, 1))
    return laid.reshape(panels * panel, pairs * 2)[:outputs, :inputs].contiguous()
