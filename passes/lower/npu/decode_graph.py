"""The graph for decode steps, of one token per sequence, where it differs from that for all others.

Prompts and decode steps take the same inputs and keep the same caches, so a program can have a graph for each: a copy
of the lowered graph with attention over int8 caches by the kernel (``attention.decode_attention``) and operators with
state in their single-token form (``decode_states``).
"""

from __future__ import annotations

from ...graph.fx_nodes import eliminate_dead_code
from ...graph.traced import TracedGraph
from .attention.decode_attention import decode_attention
from .decode_states import decode_states


def decode_graph(traced: TracedGraph) -> TracedGraph | None:
    """A copy of a lowered graph for steps of one token per sequence; None where it would be the same.

    The copy has the same inputs. Where calls are captured, sequences without tokens may stand behind the others.

    Raises:
        ValueError: the nodes of a noted unfused computation have changed.
    """
    found = traced.copy()
    if decode_attention(found) + decode_states(found) == 0:
        return None
    eliminate_dead_code(found.graph)
    found.recompile()
    return found


def decode_graph_or_reason(traced: TracedGraph) -> tuple[TracedGraph | None, str]:
    """``decode_graph``; None and the reason if the nodes of a noted unfused computation have changed."""
    try:
        return decode_graph(traced), ""
    except ValueError as error:
        return None, str(error)
