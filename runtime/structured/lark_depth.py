"""The deepest way through a Lark grammar: rules that lead to each other, and brackets within them."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TEXT = re.compile(r'"(?:\\.|[^"\\])*"')
_RULE = re.compile(r'([^\s"|()\[\]{}:]+)\s*(?:\[[^\]\n]*\]\s*)?:')
_NAME = re.compile(r'[^\s"|()\[\]{}:,?*+~]+')


def lark_depth(text: str) -> int:
    """An upper bound of how deep a walk through a grammar that visits each rule once can get.

    Rules count one, and as many more as brackets lie within each other in them; rules that lead back to each other
    all count, since a walk can meet one behind the other.

    Args:
        text: Lark; what is not understood is taken for names of rules, which makes the bound no smaller.
    """
    text = _TEXT.sub('""', text)
    starts = list(_RULE.finditer(text))
    weights: dict[str, int] = {}
    leads_to: dict[str, set[str]] = {}
    for i, start in enumerate(starts):
        following = starts[i + 1] if i + 1 < len(starts) else None
        body = text[start.end() : following.start() if following else len(text)]
        weights[start[1]] = weights.get(start[1], 0) + 1 + _nesting(body)
        found = leads_to.setdefault(start[1], set())
        found.update(_NAME.findall(body))
        if following and "\n" not in body:  # its colon may be one of a regular expression: the rule goes on behind it
            found.add(following[1])
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
