"""Compute the LM head only for the rows whose logits are requested.

Matches:
    output(f(linear(h, W)))      # f: softcap, scaling, casts; h: [1, T, hidden]
Becomes:
    output(f(linear(h[:, logits_rows], W)))
    output(f(linear(h[:, logits_rows], W)), h)     # where the hidden rows are asked for
Why it is faster:
    the head is the largest matrix of many models; a prefill step of 512 tokens needs it for one row, not 512.

Level 0.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.fx_nodes import callee, is_dynamic, is_tensor, shape
from ..graph.record import PassRecord, Rejection
from ..graph.traced import TracedGraph, UnsupportedModel

_PER_ELEMENT = frozenset("mul div truediv tanh to float contiguous add sub neg clone type".split())


def gather_logits(traced: TracedGraph) -> PassRecord:
    """Move the selection of ``logits_rows`` in front of the LM head. Flat (paged) graphs only.

    Where the head is not recognized the rows are selected from the finished logits, which is as exact.
    """
    record = PassRecord("gather_logits")
    if not traced.paged or "logits_rows" in traced.step_inputs:
        return record
    (results,) = traced.output.args
    logits = results[0]
    if not any(is_dynamic(s) for s in shape(logits)):
        raise UnsupportedModel("the number of tokens became fixed while tracing")
    chain = _down_to_head(logits)
    rows = traced.step_input("logits_rows")
    if chain is None and traced.taps_hidden:
        raise UnsupportedModel(
            "speculative_config: method 'mtp' needs the hidden rows that the head reads, and no linear head stands "
            "above the logits; use method 'suffix'"
        )
    if chain is None:
        record.rejections.append(Rejection(logits.name, "no linear head above the logits; gathered at the end"))
        with traced.graph.inserting_before(traced.output):
            gathered = traced.call(torch.index_select, logits, _token_dim(logits), rows)
        traced.output.args = ((gathered,),)
        return record
    head = chain[-1]
    hidden = head.args[0]
    assert isinstance(hidden, fx.Node)
    with traced.before(head):
        gathered = traced.call(torch.index_select, hidden, _token_dim(hidden), rows)
    head.replace_input_with(hidden, gathered)
    if traced.taps_hidden:
        traced.output.args = ((logits, hidden),)
    for node in reversed(chain):
        traced.propagate(node)
    record.matches = 1
    return record


def _token_dim(node: fx.Node) -> int:
    return next(i for i, s in enumerate(shape(node)) if is_dynamic(s))


def _down_to_head(logits: fx.Node) -> list[fx.Node] | None:
    """The nodes from the logits down to the head's linear, all used only here."""
    chain = []
    node = logits
    while True:
        if len(node.users) != 1:
            return None
        chain.append(node)
        if callee(node) == "linear":
            dims = [i for i, s in enumerate(shape(node.args[0])) if is_dynamic(s)]
            return chain if len(dims) == 1 else None
        if callee(node) not in _PER_ELEMENT:
            return None
        tensors = [n for n in node.all_input_nodes if is_tensor(n) and any(is_dynamic(s) for s in shape(n))]
        if len(tensors) != 1 or any(
            is_dynamic(s) for n in node.all_input_nodes if n not in tensors for s in shape(n)
        ):
            return None
        node = tensors[0]
