"""`pagoda::packed_linear`: a linear layer whose weight may be laid out in panels of outputs.

On x86 processors that multiply bf16, oneDNN lays weights out. It multiplies many rows at the processor's limit; for
few, which wait for memory, a kernel of ours reads the same weight (``csrc/blocked_linear.cpp``), where oneDNN's
layout is the one that it knows; that is looked at, weight by weight, when one is packed. On all other processors
weights are laid out here, in the same panels, and that kernel takes any number of rows.
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

from ..memory import advise_huge_pages
from .invariant_linear import invariant_linear_cpu
from .native import FLOAT_CODES, bind_function, kernel_function, load_kernels
from .registration import register_operator

log = logging.getLogger(__name__)

MOST_ROWS = 64
"""More go to oneDNN where it has packed the weight."""
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
    if weight.dim() == 3:
        weight = unpack_weight(weight, input.shape[-1])
    return F.linear(input, weight, bias)


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
    _SCHEMA, fake=_fake, reference=packed_linear_reference, cpu=packed_linear_cpu, opaque=True
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


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """An ``[out, in]`` weight as :func:`packed_linear` reads it fastest; of as many bytes, but for padding.

    Where ``own_panel()`` is not 0, ``[out, in / 2, 2]``: the head of memory that holds panels ``[in / 2][panel][2]``,
    see ``csrc/blocked_linear.cpp``. Elsewhere an opaque tensor in oneDNN's blocked layout. Its attribute ``blocked``
    says where that lies and how many outputs a panel of it has; there is none where our kernel does not know the
    layout.
    """
    weight = weight.detach().contiguous()
    if panel := own_panel():
        outputs, pairs = weight.shape[0], -(-weight.shape[1] // 2)
        return lay_out(weight, panel).view(-1)[: outputs * pairs * 2].view(outputs, pairs, 2)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    address = _address(packed)
    panel = _panel_size(weight, address, torch.ops.mkldnn._nbytes(packed)) if address else 0
    if panel:
        packed.blocked = (address, panel)  # type: ignore[attr-defined]
    else:
        log.info("a weight %s is in a layout of oneDNN's that only it can read", tuple(weight.shape))
    return packed


def lay_out(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """``[panels, in / 2, panel, 2]``: an ``[out, in]`` weight in panels, padded with zeros to 32 inputs."""
    outputs, inputs = weight.shape
    panels, pairs = -(-outputs // panel), -(-inputs // _STEP) * _STEP // 2
    laid = weight.new_empty(panels, pairs, panel, 2)
    advise_huge_pages(laid)
    if (outputs, inputs) != (panels * panel, pairs * 2):
        weight = F.pad(weight, (0, pairs * 2 - inputs, 0, panels * panel - outputs))
    if laid.element_size() == 2 and weight.storage_offset() % 2 == 0:
        # Two numbers that stay together are moved as one of 32 bits: in half the time.
        laid.view(torch.int32).copy_(weight.view(torch.int32).view(panels, panel, pairs, 1).transpose(1, 2))
        return laid
    return laid.copy_(weight.view(panels, panel, pairs, 2).transpose(1, 2))


def _holds_panels(weight: torch.Tensor, inputs: int, panel: int) -> bool:
    """True for what :func:`pack_weight` returns: behind the head is the memory that a copy of it lacks."""
    if not panel:
        return False
    outputs, pairs, two = weight.shape
    numbers = -(-outputs // panel) * panel * -(-inputs // _STEP) * _STEP
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
    panels, pairs = -(-outputs // panel), -(-inputs // _STEP) * _STEP // 2
    laid = packed.as_strided((panels, panel, pairs, 2), (pairs * panel * 2, 2, panel * 2, 1))
    return laid.reshape(panels * panel, pairs * 2)[:outputs, :inputs].contiguous()


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
