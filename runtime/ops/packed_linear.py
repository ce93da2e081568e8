"""`pagoda::packed_linear`: a linear layer whose weight may be laid out for oneDNN.

oneDNN multiplies many rows at the processor's limit. For few, which wait for memory, a kernel of ours reads the same
weight (``csrc/blocked_linear.cpp``), where oneDNN's layout is the one that it knows; that is looked at, weight by
weight, when one is packed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from .native import FLOAT_CODES, kernel_function
from .registration import register_operator

log = logging.getLogger(__name__)

MOST_ROWS = 64
"""More go to oneDNN."""
_SCHEMA = "packed_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor"
_ARGUMENTS = struct.Struct("=11q")  # BlockedLinearArguments in csrc/blocked_linear.cpp
_PANELS = (16, 32, 64)
_STEP = 32


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
    return F.linear(input, weight, bias)


def packed_linear_cpu(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`packed_linear_reference` by the C++ kernel for up to ``MOST_ROWS`` rows and weights in a layout that it
    knows, else by oneDNN."""
    blocked: tuple[int, int] | None = getattr(weight, "blocked", None)
    if blocked is None or input.numel() > MOST_ROWS * input.shape[-1]:
        return packed_linear_reference(input, weight, bias)
    kernel = kernel_function("pagoda_blocked_linear")
    inputs, outputs = input.shape[-1], weight.shape[0]
    if kernel is None or input.dtype is not torch.bfloat16 or inputs != weight.shape[1]:
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


packed_linear = register_operator(_SCHEMA, fake=_fake, reference=packed_linear_reference, cpu=packed_linear_cpu)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN has packed products in ``dtype``: bf16 where the CPU has instructions for it."""
    if not torch.backends.mkldnn.is_available() or dtype is not torch.bfloat16:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """An ``[out, in]`` weight in oneDNN's blocked layout: an opaque tensor of as many bytes.

    Its attribute ``blocked`` says where that lies and how many outputs a panel of it has; there is none where our
    kernel does not know the layout.
    """
    weight = weight.detach().contiguous()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    address = _address(packed)
    panel = _panel_size(weight, address, torch.ops.mkldnn._nbytes(packed)) if address else 0
    if panel:
        packed.blocked = (address, panel)  # type: ignore[attr-defined]
    else:
        log.info("a weight %s is in a layout of oneDNN's that only it can read", tuple(weight.shape))
    return packed


def _panel_size(weight: torch.Tensor, address: int, size: int) -> int:
    """Outputs of a panel of a packed weight whose layout is ``[out / panel][in / 2][panel][2]``; 0 where it is not.

    Its first, middle and last panel are compared. Where these hold the same numbers in any order, nothing is learnt.
    """
    outputs, inputs = weight.shape
    if weight.dtype is not torch.bfloat16:
        return 0
    padded = -(-inputs // _STEP) * _STEP
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.int16)
    found = []
    for panel in _PANELS:
        panels = -(-outputs // panel)
        if panels * panel * padded * 2 > size:
            continue
        same = varied = True
        for i in {0, panels // 2, panels - 1}:
            rows = weight[i * panel : (i + 1) * panel].view(torch.int16)
            rows = F.pad(rows, (0, padded - inputs, 0, panel - rows.shape[0]))
            blocked = rows.view(panel, padded // 2, 2).transpose(0, 1)
            same &= torch.equal(blocked.reshape(-1), memory[i * panel * padded :][: panel * padded])
            varied &= not torch.equal(rows, rows.roll(1, 0)) and not torch.equal(rows, rows.roll(2, 1))
        if same and varied:
            found.append(panel)
    return found[0] if len(found) == 1 else 0


@functools.cache
def _data_pointer() -> Any:
    """The C function of torch that says where the elements of an opaque tensor lie; None where there is none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = library.aoti_torch_get_data_ptr
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
    return function


def _address(packed: torch.Tensor) -> int:
    """Where the elements of an opaque tensor lie; 0 where torch does not say."""
    function = _data_pointer()
    aoti: Any = getattr(torch._C, "_aoti", None)
    if function is None or not hasattr(aoti, "unsafe_alloc_void_ptr_from_tensor"):
        return 0
    handle = aoti.unsafe_alloc_void_ptr_from_tensor(packed)
    try:
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        found = ctypes.c_void_p()
        failed = function(get(handle, None), ctypes.byref(found))
    finally:
        aoti.alloc_tensor_by_stealing_from_void_ptr(handle)
    return 0 if failed else found.value or 0
