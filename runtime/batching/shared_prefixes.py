"""Prefixes that requests share: the hashes of their blocks, and the effect on the order of admission."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from ..blocks import BlockManager, chain_start, extend_chain
from ..requests.request import Request
from .policies import Policy
from .waiting import WaitingQueue

_MAX_DELAYS = 16
"""Most times that a request is overtaken by ones with a longer cached prefix, and most times that it is deferred."""


class SharedPrefixes:
    """Hashes the blocks of requests and uses the hashes to decide on admission.

    Args:
        blocks: knows the cached blocks.
        policy: the order of waiting requests, and how many of them may be compared.
        key_variant: returns what a request's keys depend on in addition to its tokens.
    """

    def __init__(self, blocks: BlockManager, policy: Policy, key_variant: Callable[[Request], str]) -> None:
        self.blocks = blocks
        self.policy = policy
        self.key_variant = key_variant
        self._overtaken: dict[Request, int] = {}
        self._deferrals: dict[Request, int] = {}

    def full_blocks(self, request: Request) -> list[bytes]:
        """Return the hashes of blocks that may come from the cache; the last token is computed for its logits."""
        if not self.blocks.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        self.extend(request, request.num_tokens)
        return request.block_hashes[: (request.num_tokens - 1) // self.blocks.block_size]

    def extend(self, request: Request, num_tokens: int) -> None:
        """Make ``request.block_hashes`` cover its first ``num_tokens`` tokens."""
        size, hashes = self.blocks.block_size, request.block_hashes
        if num_tokens // size <= len(hashes):
            return
        first = len(hashes) * size
        start = chain_start(request.cache_salt, self.key_variant(request))
        extend_chain(hashes, request.tokens(first, num_tokens), first, size, start)

    def next(self, waiting: WaitingQueue) -> Request:
        """Return the next request to admit: the first, or of those compared the one with most tokens cached."""
        first = waiting.first()
        assert first is not None
        if self.policy.lookahead < 2 or not self.blocks.enable_prefix_caching:
            return first
        if self._overtaken.get(first, 0) >= _MAX_DELAYS:
            return first
        best, longest = first, -1
        for request in waiting.leading(self.policy.lookahead):
            found = self.blocks.find_prefix(self.full_blocks(request)).num_blocks
            if found > longest:
                best, longest = request, found
        return best

    def admitted(self, request: Request, waiting: WaitingQueue) -> None:
        """Record that the request is admitted, ahead of those that still wait."""
        self.forget(request)
        first = waiting.first()
        if first is not None and first.rank < request.rank:
            self._overtaken[first] = self._overtaken.get(first, 0) + 1

    def being_computed(self, running: Iterable[Request]) -> set[bytes]:
        """Return the hashes of the blocks that running requests are about to compute."""
        if not self.blocks.enable_prefix_caching:
            return set()
        prefills = (r for r in running if r.num_tokens - r.num_computed_tokens > 1)
        return {content for request in prefills for content in self.uncomputed(request)}

    def uncomputed(self, request: Request) -> list[bytes]:
        """Return the hashes of the request's blocks that it has not computed yet."""
        return request.block_hashes[request.num_computed_tokens // self.blocks.block_size :]

    def defers(self, request: Request, computing: set[bytes]) -> bool:
        """Return True to admit the request later, because others are computing most of it and it will be cached soon.

        A request is deferred a few times at most: the blocks of others may be evicted before it uses them.
        """
        if not computing or self._deferrals.get(request, 0) >= _MAX_DELAYS:
            return False
        hashes = self.full_blocks(request)
        known = self.blocks.find_prefix(hashes).num_blocks
        coming = sum(1 for _ in itertools.takewhile(computing.__contains__, hashes[known:]))
        size = self.blocks.block_size
        if 2 * coming * size < request.num_tokens - known * size:
            return False
        self._deferrals[request] = self._deferrals.get(request, 0) + 1
        return True

    def forget(self, request: Request) -> None:
        """Forget the request's counts of waiting: it runs, or has ended."""
        self._overtaken.pop(request, None)
        self._deferrals.pop(request, None)

    def keep(self, requests: Iterable[Request]) -> None:
        """Forget all but these requests."""
        kept = set(requests)
        self._overtaken = {r: n for r, n in self._overtaken.items() if r in kept}
        self._deferrals = {r: n for r, n in self._deferrals.items() if r in kept}
