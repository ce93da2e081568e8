"""llama.cpp as a worker: its C API, and continuous batching as its server does it.

The Python wrapper serves one request at a time. Here every step decodes the last tokens of all running requests and
fills what is left of 512 tokens with prompts, in their order; a request that ends gives its sequence to the next.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass

import llama_cpp
import numpy as np
from protocol import Generate, serve

MOST_SEQUENCES = 32
STEP_TOKENS = 512
CACHED_TOKENS = 12288


@dataclass
class Sequence:
    """A request that runs.

    Attributes:
        request: its index.
        slot: the sequence id that its keys and values have.
        pending: tokens that are not computed yet.
        computed: tokens that are.
        left: tokens to generate.
    """

    request: int
    slot: int
    pending: list[int]
    computed: int
    left: int


class Batch:
    """Tokens of one step; those that are asked for logits remember whose they are."""

    def __init__(self) -> None:
        self.tokens = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)
        self.asked: list[tuple[int, Sequence]] = []

    def clear(self) -> None:
        self.tokens.n_tokens = 0
        self.asked = []

    @property
    def room(self) -> int:
        return STEP_TOKENS - self.tokens.n_tokens

    def add(self, sequence: Sequence) -> None:
        """As many of a request's pending tokens as there is room for."""
        tokens, start = self.tokens, self.tokens.n_tokens
        count = min(len(sequence.pending), self.room)
        for i, token in enumerate(sequence.pending[:count]):
            at = start + i
            tokens.token[at] = token
            tokens.pos[at] = sequence.computed + i
            tokens.n_seq_id[at] = 1
            tokens.seq_id[at][0] = sequence.slot
            tokens.logits[at] = 0
        tokens.n_tokens += count
        sequence.computed += count
        del sequence.pending[:count]
        if count and not sequence.pending:
            tokens.logits[start + count - 1] = 1
            self.asked.append((start + count - 1, sequence))


def load(args: argparse.Namespace) -> Generate:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        f"{args.model}/model.gguf".encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp cannot load {args.model}/model.gguf")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = CACHED_TOKENS
    params.n_batch = params.n_ubatch = STEP_TOKENS
    params.n_seq_max = MOST_SEQUENCES
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = args.threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp makes no context")
    memory = llama_cpp.llama_get_memory(context)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = Batch()

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[int]:
        waiting = deque(range(len(prompts)))
        running: list[Sequence] = []
        slots = list(range(MOST_SEQUENCES))
        generated = [0] * len(prompts)
        room = CACHED_TOKENS
        while waiting or running:
            # A request starts when its prompt and all that it will generate fit into the cache.
            while waiting and slots and len(prompts[waiting[0]]) + outputs[waiting[0]] <= room:
                i = waiting.popleft()
                room -= len(prompts[i]) + outputs[i]
                running.append(Sequence(i, slots.pop(), list(prompts[i]), 0, outputs[i]))
            if not running:
                raise SystemExit(f"a request has more than {CACHED_TOKENS} tokens")
            batch.clear()
            for sequence in sorted(running, key=lambda s: len(s.pending) > 1):
                if not batch.room:
                    break
                batch.add(sequence)
            if code := llama_cpp.llama_decode(context, batch.tokens):
                raise SystemExit(f"llama_decode answered {code}")
            for at, sequence in batch.asked:
                logits = llama_cpp.llama_get_logits_ith(context, at)
                sequence.pending = [int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())]
                sequence.left -= 1
                generated[sequence.request] += 1
                if not sequence.left:
                    llama_cpp.llama_memory_seq_rm(memory, sequence.slot, -1, -1)
                    slots.append(sequence.slot)
                    room += len(prompts[sequence.request]) + outputs[sequence.request]
            running = [sequence for sequence in running if sequence.left]
        return generated

    return generate


serve(load)
