"""The layered layout: arrows go down, boxes do not overlap, routes end where their boxes are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.reports.drawing import Box, LayerGraph
from torch_pagoda.reports.layout import layered
from torch_pagoda.reports.svg import svg


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    widths = draw(st.lists(st.integers(20, 160), min_size=count, max_size=count))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    arrows = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=22)) if pairs else []
    return widths, arrows


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_layout(graph):
    widths, arrows = graph
    layout = layered(widths, arrows)
    assert all(layout.rank[a] < layout.rank[b] for a, b in arrows)
    for row in range(layout.ranks):
        boxes = sorted((layout.x[i], widths[i]) for i in range(len(widths)) if layout.rank[i] == row)
        for (left, left_width), (right, right_width) in pairwise(boxes):
            assert right - left >= (left_width + right_width) / 2
    for (start, end), route in zip(arrows, layout.routes, strict=True):
        assert route[0] == (layout.x[start], layout.rank[start])
        assert route[-1] == (layout.x[end], layout.rank[end])
        assert [row for _, row in route] == list(range(layout.rank[start], layout.rank[end] + 1))
    for x, width in zip(layout.x, widths, strict=True):
        assert x - width / 2 >= -1e-6 and x + width / 2 <= layout.width + 1e-6


def test_a_chain_is_straight():
    layout = layered([50, 90, 30, 70], [(0, 1), (1, 2), (2, 3)])
    assert layout.x == pytest.approx([layout.x[0]] * 4)


def test_a_bypass_goes_around_the_boxes_that_it_passes():
    layout = layered([60] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    for x, row in layout.routes[3][1:-1]:
        assert abs(x - layout.x[row]) >= 30


def test_a_late_input_stands_just_above_its_reader():
    layout = layered([60] * 4, [(0, 1), (1, 3), (2, 3)])
    assert layout.rank == [0, 1, 1, 2]


def test_drawing_escapes_and_draws_everything():
    boxes = (Box("aten.mm", "f32 T × 4", "projection", ("a <b> & c",)), Box("out", "f32 T × 4", "output"))
    text = svg(LayerGraph(boxes, ((0, 1),)), "a & b")
    assert text.count("<rect") == 2 and text.count('class="head"') == 1
    assert ">mm<" in text and "a &lt;b&gt; &amp; c" in text and 'aria-label="a &amp; b"' in text
    assert svg(LayerGraph((), ()), "nothing").startswith("<svg")
