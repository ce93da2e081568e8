"""Mixtures of experts in plain ATen operators with static shapes: the fallback of lowering on Ascend."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import MoeArguments
from .moe import activate

aten = torch.ops.aten


def every_expert(*arguments: Any) -> torch.Tensor:
    """``pagoda::moe`` with every expert run over every token: E / K times the work, no sizes that follow the data.

    Args:
        arguments: the fields of :class:`MoeArguments`, in order.

    Returns:
        ``[N, O]`` in the dtype of ``input``. The experts' results ``[E, N, O]`` are there at once; in half precision
        they are rounded, then weighted and summed in the wider of the dtypes of ``input`` and ``topk_weights``.
    """
    call: MoeArguments[torch.Tensor] = MoeArguments(*arguments)
    experts = call.up.shape[0]
    up, down = (w if call.transposed else w.transpose(1, 2) for w in (call.up, call.down))
    # [N, E]: the weight of each expert for each token, and whether it was chosen.
    chosen = (call.topk_ids[..., None] == aten.arange(experts, device=call.topk_ids.device)).long()
    weights = (chosen.to(call.topk_weights.dtype) * call.topk_weights[..., None]).sum(1)
    rows = call.input.expand(experts, -1, -1)
    if call.weight_input:
        rows = (rows * weights.t()[..., None]).to(call.input.dtype)
    hidden = rows @ up
    if call.up_bias is not None:
        hidden = hidden + call.up_bias[:, None]
    hidden = activate(hidden, call.activation, call.alpha, call.limit, call.layout)
    out = hidden @ down
    if call.down_bias is not None:
        out = out + call.down_bias[:, None]
    scale = chosen.sum(1).to(out.dtype) if call.weight_input else weights
    return (out * scale.t()[..., None]).sum(0).to(call.input.dtype)
