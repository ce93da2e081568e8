"""Lay the weights of a lowered graph out once, when it is loaded, as the operators of Ascend read them.

A weight that the graph reads as a transposed or sliced view is copied to a tensor of its own: torchair would copy it
in every step (a discontiguous input), and most operators take none. A matrix that only matrix products read goes to
the format FRACTAL_NZ, tiles of 16 × 16 in the order of the cube unit, which the products convert to otherwise. Such a
tensor cannot be viewed, sliced or made contiguous afterwards (``npu_format_cast`` in the vendor's documentation), so
everything that reads it has to take it whole.

What products read in 8 bits is made here of the weight, which is rounded or stored so by a quantized checkpoint.
Stored weights that other operators read are unpacked.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .....passes import TracedGraph
from .....runtime.npu_target import Product
from .....runtime.ops import npu  # noqa: F401  registers the operators
from .....runtime.ops.linear.stored_weight import StoredWeight
from .....runtime.phases import phase
from ....weights.merged_weights import link_merged_weights
from .quantized_weights import check_inputs, make_inputs

log = logging.getLogger(__name__)

FRACTAL_NZ = 29
"""``torch_npu.Format.FRACTAL_NZ``."""

_TILES = {torch.float16: (16, 16), torch.bfloat16: (16, 16), torch.int8: (16, 32)}
_GATED = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2
# Which of an operator's arguments may come in that format.
_MATRICES = {
    torch.ops.npu.npu_linear: ("weight",),
    torch.ops.npu.npu_grouped_matmul: ("weight",),
    _GATED: ("weight",),
    torch.ops.npu.npu_quant_matmul: ("x2",),
    torch.ops.npu.npu_mla_prolog_v3: ("weight_dq", "weight_uq_qr", "weight_dkv_kr"),
}
# Operators that take no other, the second one of int8.
_DEMANDING = (torch.ops.npu.npu_mla_prolog_v3, _GATED)


@dataclass(frozen=True)
class WeightPlan:
    """The treatment of one weight that a graph reads.

    Attributes:
        name: of the graph input.
        contiguous: it is a view with gaps or in another order, and is copied.
        fractal_nz: it goes to FRACTAL_NZ.
        reason: why it does not; "" when it does.
        demanded: an operator takes it in that format only.
    """

    name: str
    contiguous: bool
    fractal_nz: bool
    reason: str = ""
    demanded: bool = False


def plan_weights(traced: TracedGraph) -> list[WeightPlan]:
    """The treatment of each weight of a linked graph by ``prepare_weights``, in the order of its inputs."""
    plans = []
    for node in traced.placeholders:
        tensor = traced.constants.get(node.name)
        if tensor is None or not node.users:
            continue
        in_rows = traced.npu is not None and traced.npu.product is Product.A5
        in_rows = in_rows and any(_packet(user) is _GATED for user in node.users)
        reason = "this chip reads it in rows" if in_rows else _why_not_nz(node, tensor)
        packed_or_in_rows = in_rows or tensor.dtype is torch.int32
        demanded = not packed_or_in_rows and any(
            _packet(user) in _DEMANDING and _takes_whole(user, node) for user in node.users
        )
        plans.append(WeightPlan(node.name, not tensor.is_contiguous(), not reason, reason, demanded))
    return plans


@phase("pack")
def prepare_weights(traced: TracedGraph, *, fractal_nz: bool, release: bool, check: bool = False) -> int:
    """Prepare the weights of a lowered graph, one at a time. On a CPU no format is cast.

    Args:
        traced: its merged weights get linked, and its constants become what is described above.
        fractal_nz: cast formats too; without ``release`` that keeps every matrix twice. What an operator demands is
            cast in any case.
        release: free each source once it is copied, unless something else reads it. Only for weights that nobody else
            uses: the module cannot run by itself afterwards.
        check: compare weights that are made of others with these.

    Returns:
        bytes of the new tensors.

    Raises:
        UnsupportedModel: a rounded weight is wrong.
    """
    link_merged_weights(traced, stored=True)
    size = _make_quantized(traced, release, check) + _unpack_stored(traced, release)
    for plan in plan_weights(traced):
        old = traced.constants[plan.name]
        new = old.detach().contiguous() if plan.contiguous else old
        if plan.fractal_nz and (fractal_nz or plan.demanded):
            new = cast_to_nz(new)
        elif plan.demanded:
            log.warning("%s keeps its format, although its operator needs FRACTAL_NZ: %s", plan.name, plan.reason)
        if new is old:
            continue
        size += new.numel() * new.element_size()
        traced.constants[plan.name] = new
        _let_go(traced, plan.name, old, release)
        if plan.contiguous:
            node = traced.placeholder(plan.name)
            with traced.fake_mode:
                node.meta["example_value"] = node.meta["example_value"].detach().contiguous()
    if size:
        kept = "in place of" if release else "in addition to"
        log.info("converted %.2f GiB of weights %s the model's own", size / 2**30, kept)
    return size


def _make_quantized(traced: TracedGraph, release: bool, check: bool) -> int:
    """Make the inputs of quantized products, and free what they are made of where nothing else reads it; their
    bytes."""
    size = 0
    for inputs in traced.notes.quantized:
        if inputs.numbers in traced.constants:
            continue
        weight = traced.constants[inputs.source]
        bias = traced.constants[inputs.bias] if inputs.bias else None
        made = make_inputs(weight, inputs, bias)
        if check:
            check_inputs(weight, inputs, made, bias)
        if inputs.bias:
            traced.notes.fold(traced.notes.merged.get(inputs.bias, (inputs.bias,)))
        traced.constants.update(made)
        size += sum(tensor.numel() * tensor.element_size() for tensor in made.values())
        if not traced.placeholder(inputs.source).users and not _waits(traced, inputs.source):
            _let_go(traced, inputs.source, weight, release)
    for name, source in traced.notes.widened.items():
        if name not in traced.constants:
            traced.constants[name] = traced.constants[source].detach().float()
            traced.notes.fold(traced.notes.merged.get(source, (source,)))
    return size


def _waits(traced: TracedGraph, source: str) -> bool:
    """Whether another form of a weight is still to be made."""
    return any(each.source == source and each.numbers not in traced.constants for each in traced.notes.quantized)


def _unpack_stored(traced: TracedGraph, release: bool) -> int:
    """Make ordinary tensors of stored weights, of those that something reads; their bytes."""
    size = 0
    for node in traced.placeholders:
        stored = traced.constants.get(node.name)
        if isinstance(stored, StoredWeight) and node.users:
            dense = stored.dense()
            _let_go(traced, node.name, stored, release)
            traced.constants[node.name] = dense
            size += dense.numel() * dense.element_size()
    return size


def _why_not_nz(node: fx.Node, tensor: torch.Tensor) -> str:
    tiles = _TILES.get(tensor.dtype)
    if tensor.dim() != 2 and not (tensor.dim() == 3 and tensor.dtype is torch.int8):
        return f"it has {tensor.dim()} dims, not 2"
    if tiles is None:
        return f"it is {tensor.dtype}, not float16, bfloat16 or int8"
    if any(size % tile for size, tile in zip(tensor.shape[-2:], tiles, strict=True)):
        return f"its sizes {tuple(tensor.shape)} are not multiples of {tiles[0] if len({*tiles}) == 1 else tiles}"
    for user in node.users:
        if not _takes_whole(user, node):
            return f"{user.name} reads it too, and is not a matrix product of the whole"
    return ""


def _takes_whole(user: fx.Node, weight: fx.Node) -> bool:
    """True if ``user`` is a matrix product that has ``weight`` for one of its matrices and for nothing else."""
    matrices = _MATRICES.get(_packet(user))
    if matrices is None:
        return False
    names = [parameter.name for parameter in user.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, user.args, strict=False)), **user.kwargs}
    readers = [name for name, leaves in given.items() if weight in pytree.tree_leaves(leaves)]
    # Matrices that are unpacked as they are read lie in rows (CANN, aclnnGroupedMatmulV5, A16W8 and A16W4).
    return len(readers) == 1 and readers[0] in matrices and given.get("antiquant_scale") is None


def _packet(user: fx.Node) -> Any:
    return getattr(user.target, "overloadpacket", None) if user.op == "call_function" else None


def cast_to_nz(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in format FRACTAL_NZ; on a CPU as it is."""
    if weight.device.type != "npu":
        return weight
    import torch_npu

    torch.npu.config.allow_internal_format = True  # type: ignore[attr-defined]
    cast: torch.Tensor = torch_npu.npu_format_cast(weight.detach(), FRACTAL_NZ)
    return cast


def _let_go(traced: TracedGraph, name: str, old: torch.Tensor, release: bool) -> None:
    """Free what lies in the memory of ``old``, or note that the program holds a copy of it."""
    memory = _memory(old)
    sharing = {n: t for n, t in traced.constants.items() if n != name and _memory(t) == memory}
    read = {node.name for node in traced.placeholders if node.users}
    traced.notes.merged.pop(name, None)
    waits = {inputs.source for inputs in traced.notes.quantized if inputs.numbers not in traced.constants}
    if release and not (read | waits) & set(sharing):
        for tensor in (*sharing.values(), old):
            if isinstance(tensor, StoredWeight):
                tensor.release()
            else:
                tensor.data = tensor.new_empty(0)
    else:
        traced.notes.fold((*sharing, name) if name in _parameters(traced) else sharing)


def _memory(tensor: torch.Tensor) -> int:
    """Where its elements lie."""
    return (tensor.codes if isinstance(tensor, StoredWeight) else tensor).untyped_storage().data_ptr()


def _parameters(traced: TracedGraph) -> frozenset[str]:
    """Inputs whose tensors are the module's own."""
    return frozenset(name for name, tensor in traced.constants.items() if isinstance(tensor, torch.nn.Parameter))
