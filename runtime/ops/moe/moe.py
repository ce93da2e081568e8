"""`pagoda::moe` and `pagoda::moe_gating`: the routed experts of a mixture of experts, and their router."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..arguments import MoeArguments
from ..elementwise import elementwise_cpu
from ..gated_activation import activation_cpu, activation_reference, gated_activation_cpu, gated_activation_reference
from ..linear.invariant_linear import invariant_linear_cpu
from ..native import kernel_function
from ..registration import Facts, like_input, register_operator

aten = torch.ops.aten

_SCHEMA = (
    "moe(Tensor input, Tensor topk_weights, Tensor topk_ids, Tensor up, Tensor down, Tensor? up_bias, "
    "Tensor? down_bias, str activation, float alpha, float limit, str layout, bool transposed, bool weight_input, "
    "bool batch_invariant=False) -> Tensor"
)
_GATING_SCHEMA = (
    "moe_gating(Tensor logits, Tensor? correction_bias, int top_k, str scoring, int groups, int topk_groups, "
    "str group_scoring, str weighting, float epsilon, float scaling, bool batch_invariant=False) "
    "-> (Tensor weights, Tensor ids)"
)

LAYOUTS = ("halves", "interleaved", "plain")
"""Where the first product of a gated expert holds gate and up; "plain" for experts without a gate."""

NOWHERE = -1
"""The id of an expert that another rank holds; its term is zero."""

SCORINGS = ("softmax", "sigmoid", "sqrt_softplus", "none")
GROUP_SCORINGS = ("max", "top2")
WEIGHTINGS = ("none", "sum", "clamped_sum", "softmax", "sigmoid")

INVARIANT_SCORINGS = frozenset(("softmax", "sigmoid", "none", "sum", "clamped_sum"))
"""Scorings and weightings that do not depend on the batch when asked not to."""

Activate = Callable[..., torch.Tensor]
_Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor]
_Scoring = Callable[[torch.Tensor], torch.Tensor]
_Call = MoeArguments[torch.Tensor]


def moe_reference(*arguments: Any) -> torch.Tensor:
    """``sum_k weight[n, k] * expert[ids[n, k]](input[n])``, the routed part of a mixture of experts.

    ``expert(x) = down(act(up(x)))``. In half precision the products, the biases added to them and the weighted
    terms are rounded one after the other, as transformers does; the sum is taken in float32. Terms are in the wider
    of the dtypes of ``input`` and ``topk_weights``.

    Args:
        arguments: the fields of :class:`MoeArguments`, in order.

    Returns:
        ``[N, O]`` in the dtype of ``input``, contiguous.

    Raises:
        ValueError: shapes that do not fit together; an unknown activation or layout.
        IndexError: an id that is neither below ``E`` nor ``NOWHERE``.
    """
    call: _Call = MoeArguments(*arguments)
    _check(call)
    tokens, count = call.topk_ids.shape
    chosen = call.input.new_zeros(tokens, count, call.down.shape[2 if call.transposed else 1])
    for expert in call.topk_ids[call.topk_ids != NOWHERE].unique().tolist():
        token, slot = aten.where(call.topk_ids == expert)
        rows = call.input[token]
        if call.weight_input:
            rows = (rows * call.topk_weights[token, slot, None]).to(call.input.dtype)
        hidden = _product(rows, call.up[expert], call.up_bias, expert, call.transposed)
        hidden = activate(hidden, call.activation, call.alpha, call.limit, call.layout)
        chosen[token, slot] = _product(hidden, call.down[expert], call.down_bias, expert, call.transposed)
    terms = chosen if call.weight_input else chosen * call.topk_weights[..., None]
    return terms.sum(1).to(call.input.dtype)


def _product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: int, transposed: bool
) -> torch.Tensor:
    result = rows @ (weight if transposed else weight.t())
    return result if bias is None else result + bias[expert]


def _activate(
    hidden: torch.Tensor,
    activation: str,
    alpha: float,
    limit: float,
    layout: str,
    dim: int,
    gated: Activate,
    plain: Activate,
) -> torch.Tensor:
    """From the first product, whose features lie along ``dim``, to the input of the second."""
    if layout == "plain":
        return plain(hidden, activation)
    if layout == "halves":
        gate, up = hidden.chunk(2, dim)
    else:
        gate, up = hidden.unflatten(dim, (-1, 2)).unbind(dim if dim < 0 else dim + 1)
    if limit > 0 and activation != "clipped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gated(gate, up, activation, alpha, limit)


def activate(hidden: torch.Tensor, activation: str, alpha: float, limit: float, layout: str) -> torch.Tensor:
    """The middle of an expert, from its first product ``[..., J]`` to the input of the second ``[..., I]``."""
    return _activate(hidden, activation, alpha, limit, layout, -1, gated_activation_reference, activation_reference)


def activate_cpu(hidden: torch.Tensor, activation: str, alpha: float, limit: float, layout: str) -> torch.Tensor:
    """The same by the CPU's kernels."""
    return _activate(hidden, activation, alpha, limit, layout, -1, gated_activation_cpu, activation_cpu)


def _check(call: _Call) -> None:
    input, up, down = call.input, call.up, call.down
    if call.layout not in LAYOUTS:
        raise ValueError(f"layout is {call.layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if input.dim() != 2 or call.topk_ids.dim() != 2 or call.topk_weights.shape != call.topk_ids.shape:
        raise ValueError(
            f"input {tuple(input.shape)}, topk_weights {tuple(call.topk_weights.shape)} and topk_ids "
            f"{tuple(call.topk_ids.shape)} must be [N, H], [N, K] and [N, K]; flatten batch and positions"
        )
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0]:
        raise ValueError(f"up {tuple(up.shape)} and down {tuple(down.shape)} must be of rank 3, one entry per expert")
    into, out_of = (1, 2) if call.transposed else (2, 1)
    inner = up.shape[out_of] if call.layout == "plain" else up.shape[out_of] // 2
    if up.shape[into] != input.shape[1] or down.shape[into] != inner:
        raise ValueError(
            f"up {tuple(up.shape)} and down {tuple(down.shape)} do not fit an input of {input.shape[1]} features "
            f"with layout={call.layout!r} and transposed={call.transposed}"
        )


def _fake(*arguments: Any) -> torch.Tensor:
    call: _Call = MoeArguments(*arguments)
    return call.input.new_empty(call.input.shape[0], call.down.shape[2 if call.transposed else 1])


def moe_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`moe_reference` for CPU tensors: rows sorted by expert once, two products per expert that has any.

    Products are accumulated in float32; so are the weighted terms, which are not rounded before they are summed.
    """
    call: _Call = MoeArguments(*arguments)
    _check(call)
    tokens, count = call.topk_ids.shape
    never = tokens * count + 1
    columns_from = never if call.transposed else _COLUMNS_FROM.get(call.input.dtype, never)
    few = _FEW_ROWS.get((call.input.dtype, call.transposed), 0) if kernel_function("pagoda_invariant_linear") else 0

    def run(rows: torch.Tensor, expert: int) -> torch.Tensor:
        if call.batch_invariant or len(rows) <= few:
            return _run_expert(call, rows, expert, _invariant_product, -1)
        if len(rows) >= columns_from:
            return _run_expert(call, rows.t(), expert, _columns_product, 0).t()
        return _run_expert(call, rows, expert, _rows_product, -1)

    return routed(call, call.down.shape[2 if call.transposed else 1], run)


def routed(call: _Call, outputs: int, run: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Each token's experts over it, weighted and summed: rows are sorted by expert once.

    Args:
        call: of whose arguments neither weights nor biases are read.
        outputs: features of the result.
        run: an expert over some rows, by its number.
    """
    by_expert = rows_by_expert(call)
    chosen = call.input.new_empty(len(by_expert.rows), outputs)
    starts: list[int] = by_expert.starts.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        if start < end:
            chosen[start:end] = run(by_expert.rows[start:end], expert)
    return weighted_sum(call, chosen, by_expert.order)


class RowsByExpert(NamedTuple):
    """The rows that experts are given, those of one expert after another's.

    Attributes:
        rows: ``[N K, H]``, of the input, times their weights where ``weight_input`` says so.
        order: ``[N K]`` int64, without what goes ``NOWHERE``: row i is for choice ``order[i] % K`` of token
            ``order[i] // K``.
        starts: ``[E + 1]`` int64: expert e has the rows from ``starts[e]`` up to ``starts[e + 1]``.
    """

    rows: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor


def rows_by_expert(call: _Call) -> RowsByExpert:
    """Each token's row once for each of its experts, sorted by expert; neither weights nor biases are read.

    Raises:
        IndexError: an id is not one of an expert.
    """
    input, count, num_experts = call.input, call.topk_ids.shape[1], call.up.shape[0]
    experts, order = call.topk_ids.reshape(-1).sort(stable=True)
    starts = aten.searchsorted(experts, torch.arange(num_experts + 1, dtype=experts.dtype))
    if starts[0] > 0 and experts[0] == NOWHERE == experts[starts[0] - 1]:
        experts, order, starts = experts[starts[0] :], order[starts[0] :], starts - starts[0]
    if len(experts) and (starts[0] > 0 or starts[-1] < len(experts)):
        raise IndexError(
            f"topk_ids goes from {int(experts[0])} to {int(experts[-1])}; there are {num_experts} experts"
        )
    rows = input.index_select(0, order.div(count, rounding_mode="floor"))
    if call.weight_input:
        rows = (rows * call.topk_weights.reshape(-1, 1).index_select(0, order)).to(input.dtype)
    return RowsByExpert(rows, order, starts)


def weighted_sum(call: _Call, chosen: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """What the experts made of their rows, weighted and summed for each token.

    Args:
        call: of whose arguments neither weights nor biases are read.
        chosen: ``[N K, O]``, in the ``order`` of :class:`RowsByExpert`.
        order: that one.

    Returns:
        ``[N, O]`` in the dtype of the input.
    """
    input, topk_weights = call.input, call.topk_weights
    make = chosen.new_empty if len(order) == topk_weights.numel() else chosen.new_zeros
    terms = make(topk_weights.numel(), chosen.shape[1]).index_copy_(0, order, chosen)
    terms = terms.view(*call.topk_ids.shape, chosen.shape[1])
    if call.batch_invariant:
        common = torch.promote_types(torch.promote_types(topk_weights.dtype, input.dtype), torch.float32)
        weighted = terms.to(common) if call.weight_input else terms.to(common) * topk_weights.to(common)[..., None]
        return _in_order(weighted, 1).to(input.dtype)
    if call.weight_input:
        return terms.sum(1)
    common = torch.promote_types(topk_weights.dtype, input.dtype)
    return aten.bmm(topk_weights.to(common).unsqueeze(1), terms.to(common)).squeeze(1).to(input.dtype)


# Rows up to which pagoda's own product, which reads weights as fast as memory gives them, beats oneDNN's, by dtype
# and by whether weights are transposed: 0.45 to 0.65 of the time with one row, on Zen 5.
_FEW_ROWS = {
    (torch.bfloat16, False): 8,
    (torch.bfloat16, True): 4,
    (torch.float32, False): 16,
    (torch.float32, True): 8,
}

# Number of rows from which ``weight @ rows.T`` beats ``rows @ weight.T`` for weights [out, in]: oneDNN then streams
# the weight as it lies, instead of packing it. 10 to 40 % less time on Sapphire Rapids with 2048 to 1536 features.
_COLUMNS_FROM = {torch.bfloat16: 1, torch.float32: 4}


def _run_expert(call: _Call, tokens: torch.Tensor, expert: int, product: _Product, dim: int) -> torch.Tensor:
    """One expert over its tokens, whose features lie along ``dim``, as those of the result do."""
    bias = None if call.up_bias is None else call.up_bias[expert]
    hidden = product(tokens, call.up[expert], bias, call.transposed)
    formula = (call.activation, call.alpha, call.limit, call.layout)
    hidden = _activate(hidden, *formula, dim, gated_activation_cpu, activation_cpu)
    bias = None if call.down_bias is None else call.down_bias[expert]
    return product(hidden, call.down[expert], bias, call.transposed)


def _columns_product(
    columns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """``weight @ columns + bias``, tokens side by side; never with ``transposed``."""
    result = aten.mm(weight, columns) if columns.shape[1] > 1 else aten.mv(weight, columns.squeeze(1)).unsqueeze(1)
    return result if bias is None else result + bias[:, None]


def _rows_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """``rows @ weight + bias``, tokens below each other."""
    weight = weight if transposed else weight.t()
    result = aten.mm(rows, weight)
    return result if bias is None else result + bias


def _invariant_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """The same, each row alike whatever the others are."""
    return invariant_linear_cpu(rows, weight.t() if transposed else weight, bias)


def moe_gating_reference(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    groups: int,
    topk_groups: int,
    group_scoring: str,
    weighting: str,
    epsilon: float,
    scaling: float,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that each token goes to, and their weights.

    ``scores = scoring(logits)``. The ``top_k`` experts with the largest ``scores + correction_bias`` are chosen,
    out of the ``topk_groups`` best groups of neighboring experts if there are groups. The weights are made of the
    chosen scores, without the bias (DeepSeek-V3, section 2.1.2).

    Args:
        logits: ``[N, E]`` floating point; everything is computed in its dtype.
        correction_bias: ``[E]`` floating point, or None.
        top_k: experts per token.
        scoring: "softmax" (over all experts), "sigmoid", "sqrt_softplus" (square root of softplus), "none".
        groups: number of equal groups that the experts form; 1 for none.
        topk_groups: groups that a token chooses from; 1 without groups.
        group_scoring: what ranks a group: "max", its best expert; "top2", the sum of its best two.
        weighting: what is done to the chosen scores: "none"; "sum", divided by their sum plus ``epsilon``;
            "clamped_sum", divided by their sum or ``epsilon``, whichever is larger; "softmax" or "sigmoid" of them.
        epsilon: see ``weighting``.
        scaling: multiplies the weights at last.
        batch_invariant: a token's weights do not change by a bit with the other tokens; on a CPU with kernels only,
            and for the scorings and weightings in ``INVARIANT_SCORINGS``.

    Returns:
        weights: ``[N, top_k]`` in the dtype of ``logits``, contiguous.
        ids: ``[N, top_k]`` int64, contiguous, best choice first.

    Raises:
        ValueError: an unknown scoring, group scoring or weighting; experts that do not divide into the groups.
    """
    for name, given, known in (
        ("scoring", scoring, SCORINGS),
        ("group_scoring", group_scoring, GROUP_SCORINGS),
        ("weighting", weighting, WEIGHTINGS),
    ):
        if given not in known:
            raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(known)}")
    experts = logits.shape[1]
    if experts % groups or not 1 <= topk_groups <= groups:
        raise ValueError(
            f"groups={groups} and topk_groups={topk_groups} do not fit {experts} experts: groups must divide them, "
            "and topk_groups lie between 1 and groups"
        )
    softmax = _invariant_softmax if batch_invariant else functools.partial(aten.softmax, dim=-1)
    sigmoid = functools.partial(elementwise_cpu, function="sigmoid") if batch_invariant else aten.sigmoid
    scores = _scored(logits, scoring, softmax, sigmoid)
    choice = scores if correction_bias is None else scores + correction_bias
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        ranks = grouped.amax(-1) if group_scoring == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        best = ranks.topk(topk_groups, dim=-1, sorted=False).indices
        dropped = torch.ones_like(ranks, dtype=torch.bool).scatter(1, best, False)
        choice = grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if weighting == "sum":
        total = _total(weights, batch_invariant)
        weights = weights / (total + epsilon if epsilon else total)
    elif weighting == "clamped_sum":
        weights = weights / _total(weights, batch_invariant).clamp(min=epsilon)
    elif weighting == "softmax":
        weights = softmax(weights)
    elif weighting == "sigmoid":
        weights = sigmoid(weights)
    return (weights if scaling == 1.0 else weights * scaling), ids


def _scored(logits: torch.Tensor, scoring: str, softmax: _Scoring, sigmoid: _Scoring) -> torch.Tensor:
    if scoring == "softmax":
        return softmax(logits)
    if scoring == "sigmoid":
        return sigmoid(logits)
    return aten.softplus(logits).sqrt() if scoring == "sqrt_softplus" else logits


def _invariant_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Over the last dim, ``[N, E]``; the sum of a row is taken in one order."""
    powers = elementwise_cpu((scores - scores.amax(-1, keepdim=True)).float(), "exp")
    total = invariant_linear_cpu(powers, powers.new_ones(1, powers.shape[1]))
    return (powers / total).to(scores.dtype)


def _total(weights: torch.Tensor, batch_invariant: bool) -> torch.Tensor:
    if not batch_invariant:
        return weights.sum(-1, keepdim=True)
    return _in_order(weights.float(), -1).to(weights.dtype)[:, None]


def _in_order(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """Their sum along a dim, one added after the other."""
    first, *others = terms.unbind(dim)
    for term in others:
        first = first + term
    return first


def _gating_fake(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, top_k: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def local_experts_reference(ids: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of experts as the rank counts them that holds some of them.

    Args:
        ids: ``[N, K]`` int64 or int32, counted over all ranks.
        first: ``[1]`` int64, the first one of this rank.
        count: number that every rank holds.

    Returns:
        The shape and dtype of ``ids``: ``ids - first``, and ``NOWHERE`` for those of other ranks.
    """
    local = ids - first.to(ids.dtype)
    return aten.where((local >= 0) & (local < count), local, NOWHERE).to(ids.dtype)


moe = register_operator(
    _SCHEMA,
    Facts(over="rows", invariant=True, kind="moe", spelled_out=False),
    fake=_fake,
    reference=moe_reference,
    cpu=moe_cpu,
)
moe_gating = register_operator(
    _GATING_SCHEMA,
    Facts(over="rows", invariant=True, kind="", spelled_out=True),
    fake=_gating_fake,
    reference=moe_gating_reference,
    cpu=moe_gating_reference,
)
local_experts = register_operator(
    "local_experts(Tensor ids, Tensor first, int count) -> Tensor",
    Facts(over="elements", invariant=True, kind="", spelled_out=True),
    fake=like_input,
    reference=local_experts_reference,
    cpu=local_experts_reference,
)
