"""The maximum depth of a Lark grammar: chains of rules, and brackets within them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

_OPAQUE = re.compile(
    r"""
    "(?:\\.|[^"\\])*"               # texts, those of JSON included
    | /(?:\\.|[^/\\])+/             # regular expressions
    | <[^<>]+>                      # special tokens
    | (?:\#|//)[^\n]*              # comments
    | (?<![\w-])0[xX][0-9a-fA-F]+   # numbers, whose letters would run into a name
    """,
    re.VERBOSE,
)
"""Lexemes that lead to no rule, found from the left as llguidance does: any of them may hold the marks of others."""
_JSON_KEY = re.compile(r'""\s*:')
_COLON = re.compile("(?<!:):(?!:)")
_NAME = re.compile("_?(?:[a-z][a-z0-9_-]*|[A-Z][A-Z0-9_-]*)")
_HEAD = re.compile(rf"\s*[!?]*({_NAME.pattern})\s*(?:::_\s*)?(\[[^\n]*\])?\s*")


def lark_depth(text: str) -> int:
    """An upper bound of how deep a walk through a grammar that visits each rule once can get.

    Rules count one, and as many more as brackets lie within each other in them; rules that lead back to each other
    all count, since a walk can meet one behind the other. Where one does not begin in a line of its own, or a grammar
    stands within the other, all rules count.

    Args:
        text: Lark.
    """
    text = _JSON_KEY.sub("", _OPAQUE.sub('""', text))
    weights: dict[str, int] = {}
    leads_to: dict[str, set[str]] = {}
    is_plain = "%lark" not in text
    # A last line without a rule, so that all bodies end before one.
    for before, behind in pairwise(_COLON.split(f"{text}\nend")):
        head = _HEAD.fullmatch(before.rpartition("\n")[2])
        is_plain = is_plain and head is not None
        name, attributes = (head[1], head[2] or "") if head else ("", "")
        body = behind.rpartition("\n")[0] or behind
        weights[name] = weights.get(name, 0) + 1 + _nesting(body)
        leads_to.setdefault(name, set()).update(_NAME.findall(attributes + body))
    if not is_plain:
        return sum(weights.values())
    depths: dict[str, int] = {}
    for ring in _rings({name: sorted(found & weights.keys()) for name, found in leads_to.items()}):
        below = max((depths[other] for name in ring for other in leads_to[name] if other in depths), default=0)
        depth = below + sum(weights[name] for name in ring)
        depths.update(dict.fromkeys(ring, depth))
    return max(depths.values(), default=0)


def _nesting(body: str) -> int:
    depth = most = 0
    for sign in re.findall(r"[()\[\]]", body):
        depth = depth + 1 if sign in "([" else max(depth - 1, 0)
        most = max(most, depth)
    return most


def _rings(leads_to: dict[str, list[str]]) -> Iterator[list[str]]:
    """Strongly connected components, those that others lead to first (Tarjan 1972, without recursion)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_names: list[str] = []
    is_open: set[str] = set()
    for root in leads_to:
        if root in order:
            continue
        path = [(root, iter(leads_to[root]))]
        while path:
            name, others = path[-1]
            if name not in order:
                order[name] = lowest[name] = len(order)
                open_names.append(name)
                is_open.add(name)
            for other in others:
                if other not in order:
                    path.append((other, iter(leads_to[other])))
                    break
                if other in is_open:
                    lowest[name] = min(lowest[name], order[other])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == order[name]:
                    ring = [open_names.pop()]
                    while ring[-1] != name:
                        ring.append(open_names.pop())
                    is_open.difference_update(ring)
                    yield ring
