"""Lay the weights of a lowered graph out once, when it is loaded, as the operators of Ascend read them.

A weight that the graph reads as a transposed or sliced view is copied to a tensor of its own: torchair would copy it
in every step (a discontiguous input), and most operators take none. A matrix that only matrix products read goes to
the format FRACTAL_NZ, tiles of 16 × 16 in the order of the cube unit, which the products convert to otherwise. Such a
tensor cannot be viewed, sliced or made contiguous afterwards (``npu_format_cast`` in the vendor's documentation), so
everything that reads it has to take it whole.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ....passes import TracedGraph
from ....runtime.ops import npu  # noqa: F401  registers the operators
from ...weights.merged_weights import link_merged_weights

log = logging.getLogger(__name__)

FRACTAL_NZ = 29
"""``torch_npu.Format.FRACTAL_NZ``."""

_TILE = 16
# Which of an operator's arguments may come in that format.
_MATRICES = {
    torch.ops.npu.npu_linear: ("weight",),
    torch.ops.npu.npu_grouped_matmul: ("weight",),
    torch.ops.npu.npu_mla_prolog_v3: ("weight_dq", "weight_uq_qr", "weight_dkv_kr"),
}
# Operators that take no other.
_DEMANDING = (torch.ops.npu.npu_mla_prolog_v3,)


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
        reason = _why_not_nz(node, tensor)
        demanded = any(_packet(user) in _DEMANDING and _takes_whole(user, node) for user in node.users)
        plans.append(WeightPlan(node.name, not tensor.is_contiguous(), not reason, reason, demanded))
    return plans


def prepare_weights(traced: TracedGraph, *, fractal_nz: bool, release: bool) -> int:
    """Prepare the weights of a lowered graph, one at a time. On a CPU no format is cast.

    Args:
        traced: its merged weights get linked, and its constants become what is described above.
        fractal_nz: cast formats too; without ``release`` that keeps every matrix twice. What an operator demands is
            cast in any case.
        release: free each source once it is copied, unless something else reads it. Only for weights that nobody else
            uses: the module cannot run by itself afterwards.

    Returns:
        bytes of the new tensors.
    """
    link_merged_weights(traced)
    size = 0
    for plan in plan_weights(traced):
        old = traced.constants[plan.name]
        new = old.detach().contiguous() if plan.contiguous else old
        if plan.fractal_nz and (fractal_nz or plan.demanded):
            new = _cast_to_nz(new)
        elif plan.demanded:
            log.warning(
                "%s stays in its format, though its operator takes FRACTAL_NZ only: %s", plan.name, plan.reason
            )
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
        kept = "in place of" if release else "beside"
        log.info("%.2f GiB of weights are laid out anew %s the model's own", size / 2**30, kept)
    return size


def _why_not_nz(node: fx.Node, tensor: torch.Tensor) -> str:
    if tensor.dim() != 2:
        return f"it has {tensor.dim()} dims, not 2"
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return f"it is {tensor.dtype}, not float16 or bfloat16"
    if any(size % _TILE for size in tensor.shape):
        return f"its sizes {tuple(tensor.shape)} are no multiples of {_TILE}"
    for user in node.users:
        if not _takes_whole(user, node):
            return f"{user.name} reads it too, and is no matrix product of the whole"
    return ""


def _takes_whole(user: fx.Node, weight: fx.Node) -> bool:
    """True if ``user`` is a matrix product that has ``weight`` for one of its matrices and for nothing else."""
    matrices = _MATRICES.get(_packet(user))
    if matrices is None:
        return False
    names = [parameter.name for parameter in user.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, user.args, strict=False)), **user.kwargs}
    readers = [name for name, leaves in given.items() if weight in pytree.tree_leaves(leaves)]
    return len(readers) == 1 and readers[0] in matrices


def _packet(user: fx.Node) -> Any:
    return getattr(user.target, "overloadpacket", None) if user.op == "call_function" else None


def _cast_to_nz(weight: torch.Tensor) -> torch.Tensor:
    if weight.device.type != "npu":
        return weight
    import torch_npu

    torch.npu.config.allow_internal_format = True  # type: ignore[attr-defined]
    cast: torch.Tensor = torch_npu.npu_format_cast(weight.detach(), FRACTAL_NZ)
    return cast


def _let_go(traced: TracedGraph, name: str, old: torch.Tensor, release: bool) -> None:
    """Free what lies in the memory of ``old``, or note that the program holds a copy of it."""
    memory = old.untyped_storage().data_ptr()
    sharing = {n: t for n, t in traced.constants.items() if n != name and t.untyped_storage().data_ptr() == memory}
    read = {node.name for node in traced.placeholders if node.users}
    traced.notes.merged.pop(name, None)
    if release and not read & set(sharing):
        for tensor in (*sharing.values(), old):
            tensor.data = tensor.new_empty(0)
    else:
        traced.notes.fold(sharing)
