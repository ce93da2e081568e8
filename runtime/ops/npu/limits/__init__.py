"""The limits of each Ascend operator, as data: what its reference kernel and lowering refuse a call by.

Lowering holds every call against them before it emits it; a reference kernel, which knows no chip, holds what it is
given against those that hold on all of them. The meta functions of torch_npu accept far more than the kernels run.
Where they differ, these tables judge. Their facts come from the operator documents of op-plugin (docs/zh) and the
tests beside them; where a document is silent on a chip that torchair's converters and vllm-ascend use the operator
on, the chip is listed.
"""

from __future__ import annotations

import torch

from . import attention, caches, latent, linears, moe, norms, quantized, rope, sparse_attention, states
from .call import COMPARED, Call
from .rules import BF16, HALF, INFERENCE, Limits, alike

_FILES = (norms, rope, linears, caches, attention, latent, sparse_attention, moe, quantized, states)
_ALL = {name: limits for file in _FILES for name, limits in file.LIMITS.items()}

LIMITS: dict[str, Limits] = {name: limits for name, limits in _ALL.items() if limits.products}
"""Operator → its limits. Lowering emits no ``npu::`` operator that is not in here, and each of them has a converter
in torchair or one of ours, ``compiler.targets.npu.ge.converters``, or a rule that refuses it for graphs of GE."""


def violations(call: Call) -> list[str]:
    """The reasons why ``call`` is not legal on its chip, or in its reference kernel; [] when it is."""
    limits = (_ALL if call.is_reference else LIMITS).get(call.name)
    if limits is None:
        return [] if call.is_reference else [f"{call.name} is not in the table of limits"]
    found = [] if call.is_reference else _of_chip(call, limits)
    for name, allowed in limits.dtypes.items():
        known = allowed | COMPARED if call.is_reference and (allowed >= HALF or allowed == BF16) else allowed
        dtype = call.dtype(name)
        if dtype is not None and dtype not in known:
            found.append(f"{name} is {dtype}; it must be {' or '.join(sorted(map(str, allowed)))}")
    groups = () if call.is_reference and limits.mixes else limits.alike
    found += [reason for names in groups if (reason := alike(*names)(call))]
    for name, ranks in (limits.ranks if call.is_reference else {**limits.ranks, **limits.forms}).items():
        shape = call.shape(name)
        if call.tensor(name) is not None and len(shape) not in ranks:
            found.append(f"{name} has {len(shape)} dims; it must have {' or '.join(map(str, ranks))}")
    # The rules take ranks for granted. Two may say the same.
    return found or list(dict.fromkeys(reason for rule in limits.rules if (reason := rule(call))))


def _of_chip(call: Call, limits: Limits) -> list[str]:
    soc, dtypes = call.target.soc, {call.target.counted(tensor.dtype) for tensor in call.tensors().values()}
    if call.target.product not in limits.products:
        return [f"{soc} does not run it"]
    if call.target.product is INFERENCE and torch.bfloat16 in dtypes:
        return [f"{soc} has no bfloat16"]
    return []
