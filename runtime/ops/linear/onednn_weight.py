"""Weights that oneDNN multiplies with: opaque tensors in its blocked layout, and what lies in their memory.

oneDNN takes several times as long to lay out a weight as the memory traffic needs, and stores it on pages of 4 KiB.
If its layout for a shape is one of ours, which is checked entry by entry, this module lays out the weights of that
shape on huge pages, and oneDNN reads them there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .weight_panels import SIZES, lay_out, lay_out_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layout:
    """How oneDNN lays the weights of a shape out.

    Attributes:
        panel: outputs of a panel.
        description: oneDNN's own, as bytes.
    """

    panel: int
    description: torch.Tensor


_layouts: dict[tuple[int, int, int], _Layout] = {}
"""Of weights of bf16; by outputs, inputs and threads."""


def pack_for_onednn(*weights: torch.Tensor) -> torch.Tensor:
    """An opaque tensor with the elements of an ``[out, in]`` weight in oneDNN's blocked layout. Several are the rows
    of one, one after the other.

    Its attribute ``blocked`` says where that lies and how many outputs a panel of it has; there is none where the
    layout is not one of ours (``weight_panels``).
    """
    sizes = sum(map(len, weights)), weights[0].shape[1]
    key = *sizes, torch.get_num_threads()
    layout = _layouts.get(key) if weights[0].dtype is torch.bfloat16 else None
    if layout is not None and (ours := _over_panels(sizes, lay_out_rows(weights, layout.panel), layout)) is not None:
        return ours
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    address, size = address_of(packed), torch.ops.mkldnn._nbytes(packed)
    laid = panels_in(weight, address, size) if address else None
    if laid is None:
        log.info("oneDNN chose an opaque layout for a weight %s", tuple(weight.shape))
        return packed
    packed.blocked = (address, laid.shape[2])  # type: ignore[attr-defined]
    layout = _Layout(laid.shape[2], torch.ops.mkldnn._get_mkldnn_serialized_md(packed))
    if laid.nbytes != size or (ours := _over_panels(sizes, laid, layout)) is None:
        return packed
    _layouts[key] = layout
    return ours


def _over_panels(sizes: tuple[int, int], laid: torch.Tensor, layout: _Layout) -> torch.Tensor | None:
    """The opaque ``[out, in]`` tensor over a weight that is laid out here; None where torch makes none.

    Its attribute ``memory`` keeps that; a detached copy of the tensor does not.
    """
    create, delete = _function("aoti_torch_create_tensor_from_blob_v2"), _function("aoti_torch_delete_tensor_object")
    aoti: Any = getattr(torch._C, "_aoti", None)
    if create is None or delete is None or not hasattr(aoti, "alloc_tensor_by_stealing_from_void_ptr"):
        return None
    strides = (ctypes.c_int64 * 2)(sizes[1], 1)
    found = ctypes.c_void_p()
    description = layout.description
    failed = create(
        ctypes.c_void_p(laid.data_ptr()),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(*sizes),
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(_constant("aoti_torch_dtype_bfloat16")),
        ctypes.c_int32(_constant("aoti_torch_device_type_cpu")),
        ctypes.c_int32(0),
        ctypes.byref(found),
        ctypes.c_int32(_constant("aoti_torch_layout__mkldnn")),
        ctypes.c_void_p(description.data_ptr()),
        ctypes.c_int64(description.numel()),
    )
    if failed or not found.value:
        return None
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    packed: torch.Tensor = aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(found.value, None, None))
    if packed._use_count() > 1:  # type: ignore[attr-defined]  # it was copied, not stolen
        delete(found)
    packed.blocked = (laid.data_ptr(), layout.panel)  # type: ignore[attr-defined]
    packed.memory = laid  # type: ignore[attr-defined]  # which it does not own
    return packed


def panels_in(weight: torch.Tensor, address: int, size: int) -> torch.Tensor | None:
    """A packed weight laid out in panels as it is in memory, ``[out / panel][in / 2][panel][2]``; None where that is
    in none of our layouts.

    Every entry is compared. Where the first rows would be the same in another layout, or with rows or pairs
    exchanged, nothing is learnt.
    """
    if weight.dtype is not torch.bfloat16:
        return None
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.int16)

    def is_there(laid: torch.Tensor) -> bool:
        return laid.nbytes <= size and torch.equal(laid.view(torch.int16).view(-1), memory[: laid.numel()])

    first = weight[: max(SIZES)].view(torch.int16)
    outputs, inputs = first.shape
    if (outputs > 1 and torch.equal(first, first.roll(1, 0))) or (
        inputs > 2 and torch.equal(first, first.roll(2, 1))
    ):
        return None
    panels = [panel for panel in SIZES if is_there(lay_out(weight[:panel], panel))]
    laid = lay_out(weight, panels[0]) if len(panels) == 1 else None
    return laid if laid is not None and is_there(laid) else None


def address_of(packed: torch.Tensor) -> int:
    """Where the elements of an opaque tensor lie; 0 where torch does not say."""
    get_pointer, delete = _function("aoti_torch_get_data_ptr"), _function("aoti_torch_delete_tensor_object")
    aoti: Any = getattr(torch._C, "_aoti", None)
    if get_pointer is None or delete is None or not hasattr(aoti, "unsafe_alloc_void_ptr_from_tensor"):
        return 0
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    handle = ctypes.c_void_p(get(aoti.unsafe_alloc_void_ptr_from_tensor(packed), None))
    found = ctypes.c_void_p()
    failed = get_pointer(handle, ctypes.byref(found))
    delete(handle)
    return 0 if failed else found.value or 0


@functools.cache
def _function(name: str) -> Any:
    """A C function of torch's stable interface; None where it has none of that name."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return getattr(library, name)
    except (OSError, AttributeError):
        return None


@functools.cache
def _constant(name: str) -> int:
    """What a C function of torch's without arguments returns."""
    return int(_function(name)())
