"""A program whose state is a rolling hash of the tokens seen: its logits tell at once whose state was read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from torch_pagoda.runtime.program import CacheSpec, KVCache, StateSpec
from torch_pagoda.runtime.step_metadata import StepMetadata

VOCAB = 61
_MODULUS = (1 << 31) - 1
_GARBAGE = 1234567


class ToyStateProgram:
    """Obeys ``runtime.program.Program``; exact integers, so that the smallest mistake is another token.

    A sequence's state is the number of its tokens, their hash, and in a second tensor the last two of them. With keys
    and values, each token stores the hash up to it, and all of them are summed up for the logits. Sequences of a step
    are computed one after the other in random order, as an operator may do it.

    Args:
        with_kv: it has attention, too.
        max_model_len: positions.
        width: numbers of the second tensor, all but two of which are of no use.

    Attributes:
        mistakes: what was wrong with the slots that the steps named; empty if nothing was.
        before_call: called with the step's token ids ``[T]`` first; tests raise or interrupt there.
        halfway: called when the states of a part of the sequences are written; likewise.
        steps: per call (tokens, sequences).
        num_shared: steps in which two sequences went on from one slot.
    """

    def __init__(self, *, with_kv: bool = True, max_model_len: int | None = 96, width: int = 2) -> None:
        states = int(with_kv)
        self.caches: list[CacheSpec | StateSpec] = [
            StateSpec("conv_state", (2,), torch.int64, group=states),
            *([CacheSpec(1, 1, 1, torch.float64)] if with_kv else []),
            StateSpec("recurrent_state", (1, width), torch.int64, group=states),
        ]
        self.with_kv = with_kv
        self.vocab_size = VOCAB
        self.max_model_len = max_model_len
        self.restart_length: int | None = None
        self.rope_switch: int | None = None
        self.block_size: int | None = None
        self.device = torch.device("cpu")
        self.mistakes: list[str] = []
        self.before_call: Callable[[torch.Tensor], None] | None = None
        self.halfway: Callable[[torch.Tensor], None] | None = None
        self.steps: list[tuple[int, int]] = []
        self.num_shared = 0
        self._order = random.Random(0)
        self._kv_cache: KVCache = []

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        return 1

    def bind(self, kv_cache: KVCache) -> None:
        for tensors in kv_cache:
            for tensor in tensors:
                tensor.fill_(_GARBAGE)  # whoever reads what was never written shows it
        self._kv_cache = kv_cache

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        tokens = input_ids[0]
        if self.before_call is not None:
            self.before_call(tokens)
        assert step.state_read is not None and step.state_write is not None
        assert step.state_read.dtype == step.state_write.dtype == torch.int32
        reads, writes = step.state_read.tolist(), step.state_write.tolist()
        bounds = step.query_start_loc.tolist()
        self.steps.append((len(tokens), len(reads)))
        self._check_slots(reads, writes, [int(position_ids[0, begin]) for begin in bounds[:-1]])
        hashes = torch.zeros(len(tokens), dtype=torch.int64)
        order = list(range(len(reads)))
        self._order.shuffle(order)
        for count, s in enumerate(order):
            if self.halfway is not None and count == len(order) // 2:
                self.halfway(tokens)
            self._advance(tokens, position_ids[0], hashes, range(bounds[s], bounds[s + 1]), reads[s], writes[s])
        seen = self._attend(step, hashes) if self.with_kv else hashes
        return logits_of(seen[step.logits_rows])

    def dense_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """``[T, V]`` logits of one sequence, without a cache."""
        seen, total, state = [], 0, (0, 0)
        last = [0, 0]
        for token in token_ids:
            state, last, value = _next(state, last, int(token))
            total += value
            seen.append(total if self.with_kv else value)
        return logits_of(torch.tensor(seen))

    def dense_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens of greedy decoding, without a cache."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _check_slots(self, reads: list[int], writes: list[int], starts: list[int]) -> None:
        if len(set(writes)) < len(writes) or min(writes) < 0:
            self.mistakes.append(f"written twice, or nowhere: {writes}")
        for read, write, start in zip(reads, writes, starts, strict=True):
            if (read < 0) != (start == 0):
                self.mistakes.append(f"slot {read} is read at token {start}")
            if read != write and read in writes:
                self.mistakes.append(f"slot {read} is written while another reads it")
        self.num_shared += len({r for r in reads if r >= 0}) < sum(r >= 0 for r in reads)

    def _advance(
        self, tokens: torch.Tensor, positions: torch.Tensor, hashes: torch.Tensor, own: range, read: int, write: int
    ) -> None:
        (conv,), (recurrent,) = self._kv_cache[0], self._kv_cache[-1]
        state, last = ((0, 0), [0, 0]) if read < 0 else (tuple(recurrent[read, 0, :2].tolist()), conv[read].tolist())
        if own and state[0] != int(positions[own[0]]):
            self.mistakes.append(f"token {int(positions[own[0]])} finds the state of {state[0]} tokens")
        for t in own:
            state, last, hashes[t] = _next(state, last, int(tokens[t]))
        recurrent[write, 0, :2], conv[write] = torch.tensor(state), torch.tensor(last)

    def _attend(self, step: StepMetadata, hashes: torch.Tensor) -> torch.Tensor:
        keys, values = self._kv_cache[1]
        size = keys.shape[1]
        block, offset = step.slot_mapping // size, step.slot_mapping % size
        keys[block, offset, 0, 0] = values[block, offset, 0, 0] = hashes.double()
        sums = torch.zeros(len(hashes), dtype=torch.int64)
        for s, end in enumerate(step.query_ends):
            length = step.kv_lens[s]
            table = step.block_table[s, : -(-length // size)].long()
            known = values[table].reshape(-1)[:length].long()
            count = step.query_lens[s]
            sums[end - count : end] = known.cumsum(0)[length - count :]
        return sums


def _next(state: tuple[int, ...], last: list[int], token: int) -> tuple[tuple[int, int], list[int], int]:
    """The state after a token, the last two tokens, and what the logits see of both."""
    value = (state[1] * 48271 + token + 1) % _MODULUS
    return (state[0] + 1, value), [last[1], token + 1], (value * 7919 + last[0] * 131 + last[1]) % _MODULUS


def logits_of(seen: torch.Tensor) -> torch.Tensor:
    """``[R, V]`` float32: a permutation of few values for each row, without ties."""
    mixed = (seen[:, None] % _MODULUS * 69621 + torch.arange(VOCAB) * 40692 * (seen[:, None] % 1009 + 1)) % _MODULUS
    rank = mixed.argsort(dim=1, stable=True).argsort(dim=1)
    return rank.float() * 0.13
