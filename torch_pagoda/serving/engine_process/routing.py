"""The choice of an engine for a prompt, by what each has cached and how much each has to do."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_MOST_COMING = 1 << 18
"""Hashes that are remembered of prompts whose blocks no engine has reported yet."""


class PrefixRouter:
    """Chooses the engine that holds most of a prompt, unless it has much more to do than the others.

    The engines report which blocks they hold, by the hashes of ``runtime.blocks.hashing``. Until an engine has
    computed a prompt that was sent to it, the router counts its blocks as held, so that prompts that arrive together
    and begin alike go to one engine.

    A choice costs one lookup per block of the prompt, whatever the number of engines.

    Args:
        slack: requests that an engine may have beyond the mean before a prompt that it holds goes elsewhere.
        imbalance: the same as a share of the mean; the larger of the two counts.
        seed: of the choice between engines that hold nothing of a prompt.
    """

    def __init__(self, *, slack: float = 1.0, imbalance: float = 0.25, seed: int = 0) -> None:
        self._slack, self._imbalance = slack, imbalance
        self._random = random.Random(seed)
        self._held: dict[bytes, int] = {}  # hash → bits of the engines that reported it
        self._coming: OrderedDict[bytes, int] = OrderedDict()  # the same of those that are about to

    def stored(self, engine: int, hashes: Iterable[bytes]) -> None:
        """Note that an engine holds these blocks."""
        held, bit = self._held, 1 << engine
        for content in hashes:
            held[content] = held.get(content, 0) | bit

    def removed(self, engine: int, hashes: Iterable[bytes]) -> None:
        """Note that an engine holds these blocks no more."""
        bit = 1 << engine
        for content in hashes:
            for known in (self._held, self._coming):
                if (left := known.get(content, 0) & ~bit) == 0:
                    known.pop(content, None)
                else:
                    known[content] = left

    def cleared(self, engine: int) -> None:
        """Note that an engine holds nothing: it has started, or has dropped its cache."""
        self.removed(engine, [*self._held])
        self.removed(engine, [*self._coming])

    def num_held(self, hashes: Sequence[bytes], engines: Iterable[int]) -> int:
        """Return how many leading blocks of a prompt one of these engines holds, those without their keys and values
        between others counted."""
        bits = sum(1 << engine for engine in engines)
        return next((i for i in range(len(hashes), 0, -1) if self._held.get(hashes[i - 1], 0) & bits), 0)

    def choose(self, hashes: Sequence[bytes], loads: Sequence[float | None]) -> int:
        """Return the engine for a prompt, and expect it to hold the prompt's blocks from now on.

        Args:
            hashes: of the prompt's full blocks, in order.
            loads: requests that each engine has to do, divided by its speed; None: the engine takes no requests.

        Raises:
            ValueError: no engine takes requests.
        """
        open_to = [engine for engine, load in enumerate(loads) if load is not None]
        if not open_to:
            raise ValueError("no engine takes requests")
        known = [load for load in loads if load is not None]
        mean = sum(known) / len(known)
        limit = mean + max(self._slack, self._imbalance * mean)
        chosen = self._holder(hashes, loads, limit)
        if chosen is None:
            chosen = self._less_loaded(open_to, loads)
        coming, bit = self._coming, 1 << chosen
        for content in hashes:
            if not self._held.get(content, 0) & bit:
                coming[content] = coming.pop(content, 0) | bit
        while len(coming) > _MOST_COMING:
            coming.popitem(last=False)
        return chosen

    def _holder(self, hashes: Sequence[bytes], loads: Sequence[float | None], limit: float) -> int | None:
        """The engine that holds the longest part of a prompt, the least loaded of several; None if those that hold
        some of it have too much to do."""
        seen = 0
        # Back to front: the last block that an engine holds counts. Of states only some blocks are kept at all.
        for content in reversed(hashes):
            fresh = (self._held.get(content, 0) | self._coming.get(content, 0)) & ~seen
            if not fresh:
                continue
            seen |= fresh
            fitting = []
            while fresh:
                engine = (fresh & -fresh).bit_length() - 1
                fresh &= fresh - 1
                load = loads[engine]
                if load is not None and load <= limit:
                    fitting.append((load, engine))
            if fitting:
                return min(fitting)[1]
        return None

    def _less_loaded(self, engines: Sequence[int], loads: Sequence[float | None]) -> int:
        """The less loaded of two engines by chance (the power of two choices), of few engines the least loaded."""
        drawn = engines if len(engines) <= 4 else self._random.sample(engines, 2)
        least = min(loads[engine] or 0.0 for engine in drawn)
        return self._random.choice([engine for engine in drawn if (loads[engine] or 0.0) == least])
