"""A traced graph keeps what its inputs are for, and its notes are its own."""

from __future__ import annotations

from aten_graphs import aten_of_tiny_model

from torch_pagoda.passes.graph.fx_nodes import cache_index, step_field
from torch_pagoda.passes.graph.notes import GraphNotes


def test_inputs_keep_their_roles_from_graph_to_graph():
    """From Dynamo's graph to ATen's, and to a copy of that; Gemma 2 has two groups of layers."""
    graph = aten_of_tiny_model("gemma2").copy()
    caches = {node.name: index for node in graph.placeholders if (index := cache_index(node)) is not None}
    assert caches == {f"{part}_cache_{i}": i for i in range(len(graph.caches)) for part in ("key", "value")}
    fields = {node.name: field for node in graph.placeholders if (field := step_field(node))}
    assert list(fields) == graph.step_inputs
    assert fields["block_table_1"] == fields["block_table"] == "block_table"


def test_notes_of_a_copy_are_its_own():
    notes = GraphNotes(followed_literals={8: {"mask"}})
    copy = notes.copy()
    assert copy == notes
    copy.merged["merged_q"] = ("q", "k")
    copy.followed_literals[8].add("arange")
    copy.fold(("table", "table"))
    assert notes == GraphNotes(followed_literals={8: {"mask"}})
    assert copy.folded == ["table"]
