"""The bound of a walk through a grammar."""

from __future__ import annotations

import random

import pytest

from torch_pagoda.runtime.structured.lark_depth import lark_depth


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ('start: "a"', 1),
        ('start: a b\na: "x"\nb: c\nc: "y"', 3),
        ("start: ((a) [b])\na: (((b)))\nb: /x/", 2 + 1 + 3 + 1 + 1),
        ("start: a\na: b\nb: a | c\nc: /x/", 4),
        ('start: "a: b" b\nb: "start"', 2),
        ('start: %json {"a": {"b": 1}} b\nb: c\nc: /x/', 3),
        ("start: A\nA[lazy]: /(?s:.*)/ B\nB: /y/", 3),
        ("a: b b: c c: /x/", 3),
        ('start: a b\na: /"/\nb: c\nc: d\nd: /"/', 4),
        ('start: a\n// "\na: b\nb: /x/\n# "', 3),
        ('start: a\na: b <"> <b>\nb: c // "\nc: <">', 4),
        ("start: a\n?a: b\n!b: c\n!?_c: /x/\nc: _c", 5),
        ("start: (/[)]/ (/[)]/ (/[)]/ a)))\na: /(((/", 5),
        ("start: aB\na: /x/\nB: C\nC: /y/", 3),
        ("start: a::0xabr\na::_: /x/\nr: c\nc: /y/", 3),
        ("start: a::1\na::_: /x/\n | b::incr(_)\nb::_: /y/", 3 + 1),
        ('start: a\na[suffix="]:", stop=END]: /x/\nEND: B\nB: /y/', 4),
        ('start: a b c\na: /x/\nb: %json {"k":\n[1]}\nc: /y/', 3),
        ("start: a b\na: /x/\nb: %lark {\nstart: c\nc: /y/\n}", 5),
        ("start: a b\na: /x/\n%override b: /y/\nc: /z/", 4),
        ('start: a\na: "x" | b -> y c: d\nb: c\nd: /z/', 5),
        ("", 0),
    ],
)
def test_depth(text: str, depth: int) -> None:
    assert lark_depth(text) == depth


@pytest.mark.parametrize("is_ring", [False, True])
def test_chains_of_any_length(is_ring: bool) -> None:
    rules = [f"r{i}: r{i + 1}" for i in range(50_000)] + [f"r50000: {'r0' if is_ring else '/x/'}"]
    random.Random(0).shuffle(rules)
    assert lark_depth("\n".join(rules)) == 50_001


def test_many_rules_beside_each_other_are_not_deep() -> None:
    rules = [f'r{i}: "<p{i}>" (r{3 * i + 1} | r{3 * i + 2})?' for i in range(10_000)]
    assert lark_depth("\n".join(["start: r0", *rules])) < 60


def test_no_walk_gets_deeper() -> None:
    """Walks at random, each rule once."""
    draw = random.Random(1)
    for _ in range(50):
        names = [f"n{i}" for i in range(12)]
        leads = {name: draw.sample(names, draw.randrange(4)) for name in names}
        bound = lark_depth("\n".join(f'{name}: "x" {" ".join(others)}' for name, others in leads.items()))
        for _ in range(50):
            name, seen = draw.choice(names), list[str]()
            while name not in seen:
                seen.append(name)
                left = [other for other in leads[name] if other not in seen]
                if not left:
                    break
                name = draw.choice(left)
            assert len(seen) <= bound
