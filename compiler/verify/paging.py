"""The check that all attention of a graph reads the paged cache, and all else along the tokens a state, and that no
token sees another sequence's."""

from __future__ import annotations

from ...passes import Rejection, TracedGraph, UnsupportedModel
from ...passes.graph.attention_node import PagedAttentionCall, attention_nodes, paged_attention_nodes
from ...passes.graph.fx_nodes import callee, module_path
from ...passes.proof.token_axis import mixers
from ...runtime.cache.cache_specs import has_state
from ..report import CompileReport, rejection_line


def check_paging(traced: TracedGraph, report: CompileReport) -> None:
    """Count the attention, and refuse what does not read the paged cache or lets tokens see each other.

    Raises:
        UnsupportedModel: the message says which node and why.
    """
    keeps_state = has_state(traced.caches)
    if traced.npu is not None and any(PagedAttentionCall.of(n).relative_bias for n in paged_attention_nodes(traced)):
        raise UnsupportedModel(
            f"{report.model} adds a bias by distance to attention scores, which Ascend NPUs do not support "
            "yet; use target='cpu'"
        )
    report.attention_recognized = len(list(paged_attention_nodes(traced)))
    left = _left_over(traced, report)
    report.attention_total = report.attention_recognized + len(left)
    if left:
        raise UnsupportedModel(f"{report.model}: {len(left)} attention calls cannot be paged: {left[0]}")
    if not report.attention_recognized and not keeps_state:
        recognizers = [record for record in report.passes if record.name.startswith("recognize_")]
        near_misses = [r for record in recognizers for r in record.rejections] + mixers(traced)
        why = f"; {rejection_line(near_misses[0])}" if near_misses else ""
        raise UnsupportedModel(f"{report.model} has no attention that a pass recognizes{why}")
    found = mixers(traced)
    if found:
        raise UnsupportedModel(f"{report.model} cannot run several sequences in one step: {rejection_line(found[0])}")


def _left_over(traced: TracedGraph, report: CompileReport) -> list[str]:
    """Attention that does not read the paged cache, with the reason that a pass gave for it."""
    reasons: dict[str, Rejection] = {}
    for record in report.passes:
        for rejection in record.rejections:
            reasons.setdefault(rejection.node, rejection)
    attention = set(attention_nodes(traced))
    left = []
    for node in traced.graph.nodes:
        if callee(node) == "scaled_dot_product_attention" or node in attention:
            why = reasons.get(node.name)
            left.append(rejection_line(why) if why else f"{node.name} in {module_path(node)} was not rewritten")
    return left
