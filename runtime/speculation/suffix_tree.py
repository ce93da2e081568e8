"""Looks up what followed earlier where the last tokens were the same: in a request's own tokens, and in others'.

Suffix decoding (arXiv 2411.04975). A draft is a path of a suffix tree: the longest suffix of the tokens that occurs
in the tree, and what follows it most often. The tree is not spelled out below its first nodes, but read in the texts
themselves: the request's own tokens are compared as arrays, those of others are found through an index of the first
nodes. Prompt lookup (``"ngram"``) is the same with the request's own tokens only, to a limited depth, and takes the
latest match.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ..requests.request import Request
from .config import SpeculativeConfig

_Ids = npt.NDArray[np.int64]

MOST_PLACES: Final = 64
"""Latest occurrences of a match that are counted."""

_TOKEN_BYTES: Final = 240
"""Of an indexed token: two integers in arrays, and an entry of a dictionary."""

_END: Final = -1
"""Stands between the texts of a tree; no token equals it."""


class Match(NamedTuple):
    """An earlier occurrence of the last tokens.

    Attributes:
        length: tokens that are the same.
        ids: what followed.
    """

    length: int
    ids: list[int]


NO_MATCH: Final = Match(0, [])


class OwnTokens:
    """The tokens of one request, prompt and output."""

    def __init__(self) -> None:
        self._ids: _Ids = np.empty(0, np.int64)
        self._count = 0

    def follow(self, request: Request) -> _Ids:
        """Return all tokens of the request, after adding those that are new."""
        total = request.num_tokens
        if total < self._count:
            self._count = 0  # an interrupt has taken tokens back
        if total > len(self._ids):
            wider = np.empty(total + total // 2 + 64, np.int64)
            wider[: self._count] = self._ids[: self._count]
            self._ids = wider
        if total > self._count:
            self._ids[self._count : total] = request.tokens(self._count, total)
            self._count = total
        return self._ids[:total]


def own_match(ids: _Ids, config: SpeculativeConfig, most: int) -> Match:
    """Look up what followed the last tokens earlier in the same text."""
    places = np.flatnonzero(ids[:-1] == ids[-1])
    length = 1
    while len(places) and length < config.longest_match:
        longer = places[places >= length]
        longer = longer[ids[longer - length] == ids[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    if not len(places) or length < config.least_match:
        return NO_MATCH
    return Match(length, _likeliest(ids, places[-MOST_PLACES:].tolist(), config, _most(length, config, most)))


def _most(length: int, config: SpeculativeConfig, most: int) -> int:
    return most if config.spec_factor is None else min(most, int(length * config.spec_factor))


def _likeliest(ids: _Ids | array[int], places: list[int], config: SpeculativeConfig, most: int) -> list[int]:
    """Follow the most frequent continuation of the places, the latest of equally frequent ones."""
    if config.spec_factor is None:
        places = places[-1:]
    found: list[int] = []
    probability, end = 1.0, len(ids)
    while len(found) < most and places:
        step = len(found) + 1
        following = [(place, int(ids[place + step])) for place in places if place + step < end]
        counts = Counter([token for _, token in reversed(following) if token != _END])
        if not counts:
            break
        token, count = counts.most_common(1)[0]
        probability *= count / len(following)
        if probability < config.least_probability:
            break
        found.append(token)
        places = [place for place, other in following if other == token]
    return found


class SuffixTree:
    """Texts of ended requests, found by their runs of ``depth`` tokens.

    Args:
        depth: tokens of a run.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ids = array("q")
        self._before = array("q")  # the place before this one where the same run ends; -1: none
        self._latest: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: Sequence[int]) -> None:
        """Add a text."""
        first, depth, latest = len(self._ids), self._depth, self._latest
        self._ids.extend(ids)
        self._ids.append(_END)
        self._before.extend([-1] * (len(ids) + 1))
        for end in range(depth - 1, len(ids)):
            run = tuple(ids[end - depth + 1 : end + 1])
            self._before[first + end] = latest.get(run, -1)
            latest[run] = first + end

    def match(self, tail: Sequence[int], config: SpeculativeConfig, most: int) -> Match:
        """Look up what followed the ``tail``, the last tokens of a request."""
        if len(tail) < self._depth:
            return NO_MATCH
        place = self._latest.get(tuple(tail[len(tail) - self._depth :]), -1)
        longest = 0
        places: list[int] = []
        for _ in range(MOST_PLACES):
            if place < 0:
                break
            length = self._length(tail, place)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place)
            place = self._before[place]
        if not places:
            return NO_MATCH
        return Match(longest, _likeliest(self._ids, places[::-1], config, _most(longest, config, most)))

    def _length(self, tail: Sequence[int], place: int) -> int:
        """How many tokens up to ``place`` are the same as at the end of ``tail``."""
        ids, length = self._ids, self._depth
        while length < len(tail) and length <= place and ids[place - length] == tail[-1 - length]:
            length += 1
        return length


class SharedTrees:
    """Suffix trees of ended requests, one for each owner: who may see what others were answered.

    A tree has two halves; when the younger is full, it becomes the older one, whose texts are forgotten. A text that
    is of use comes again, as the output of the request that it was of use to. Trees that were not used for the
    longest time go first.

    Args:
        depth: see ``SuffixTree``.
        most_bytes: of all trees together, about.
    """

    def __init__(self, depth: int, most_bytes: int) -> None:
        self._depth = depth
        self._most = max(1, most_bytes // _TOKEN_BYTES)
        self._trees: OrderedDict[tuple[str, str], list[SuffixTree]] = OrderedDict()
        self._num_tokens = 0  # of all trees; there may be thousands

    @property
    def num_bytes(self) -> int:
        """Bytes of all trees, about."""
        return _TOKEN_BYTES * self._num_tokens

    def add(self, owner: tuple[str, str], ids: Sequence[int]) -> None:
        """Add a text to the owner's tree."""
        half = self._most // 2
        ids = ids[-half:] if half else ()
        halves = self._trees.setdefault(owner, [SuffixTree(self._depth), SuffixTree(self._depth)])
        self._trees.move_to_end(owner)
        before = sum(map(len, halves))
        if len(halves[0]) + len(ids) > half:
            halves[:] = [SuffixTree(self._depth), halves[0]]
        halves[0].add(ids)
        self._num_tokens += sum(map(len, halves)) - before
        while self._num_tokens > self._most and len(self._trees) > 1:
            _, gone = self._trees.popitem(last=False)
            self._num_tokens -= sum(map(len, gone))

    def match(self, owner: tuple[str, str], tail: Sequence[int], config: SpeculativeConfig, most: int) -> Match:
        """Look up what followed the ``tail`` in the owner's tree."""
        halves = self._trees.get(owner)
        if halves is None:
            return NO_MATCH
        self._trees.move_to_end(owner)
        return max([tree.match(tail, config, most) for tree in halves], key=lambda match: match.length)


class SuffixDrafter:
    """Drafts what followed the last tokens earlier, see ``SpeculativeConfig``."""

    expected = 0.5

    def __init__(self, config: SpeculativeConfig) -> None:
        self.name = config.method
        self._config = config
        self._own: WeakKeyDictionary[Request, OwnTokens] = WeakKeyDictionary()
        self.shared = SharedTrees(config.least_match, config.shared_bytes) if config.shared_bytes else None

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return what followed the longest match, of the request's own tokens or of others."""
        most = min(most, self._config.num_speculative_tokens)
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = OwnTokens()
        ids = own.follow(request)
        found = own_match(ids, self._config, most)
        if self.shared is not None:
            tail = ids[-self._config.longest_match :].tolist()
            other = self.shared.match(owner_of(request), tail, self._config, most)
            found = other if other.length > found.length else found
        return found.ids

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        """Do nothing: new tokens are added when they are looked up."""

    def finished(self, request: Request) -> None:
        """Forget the request, and remember its output for others of its owner."""
        self._own.pop(request, None)
        if self.shared is not None and request.output_token_ids:
            # With the end of the prompt, behind which the output began.
            first = max(0, request.num_prompt_tokens - self._config.longest_match)
            self.shared.add(owner_of(request), list(map(int, request.tokens(first, request.num_tokens))))


def owner_of(request: Request) -> tuple[str, str]:
    """Return those who share a tree with the request: of the same cache salt and client."""
    return request.cache_salt, request.client
