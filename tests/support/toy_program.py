"""A tiny transformer over the paged cache for tests of the runtime; the same numbers without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_pagoda.runtime.ops import paged_attention_reference
from torch_pagoda.runtime.program import CacheSpec, KVCache
from torch_pagoda.runtime.step_metadata import GROUP_FIELDS, StepMetadata

LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 2, 4, 2, 8, 97


class ToyProgram:
    """Obeys ``runtime.program.Program``. Weights are random and fixed; tokens and positions both matter.

    Args:
        max_model_len: positions.
        vocab_size: of the logits.
        windows: sliding window of each layer, 0 for none; layers with different ones are groups.
        dtype: of weights and caches. In float64 no batch mate changes a bit of the logits, which are float32.

    Attributes:
        steps: per call (tokens, sequences, asked rows).
        before_call: called with the step's token ids ``[T]`` first; tests raise or interrupt there.
        change_logits: called with logits ``[R, V]`` and the asked rows' token ids; its result is returned.
    """

    def __init__(
        self,
        max_model_len: int | None = 128,
        vocab_size: int = VOCAB,
        windows: Sequence[int] = (0,) * LAYERS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        width = HEADS * DIM
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype) * shape[-1] ** -0.5

        kinds = list(dict.fromkeys(windows))
        self.caches = [
            CacheSpec(KV_HEADS, DIM, DIM, dtype, sliding_window=window, group=kinds.index(window))
            for window in windows
        ]
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.restart_length: int | None = None
        self.rope_switch: int | None = None
        self.block_size: int | None = None
        self.device = torch.device("cpu")
        self.steps: list[tuple[int, int, int]] = []
        self.before_call: Callable[[torch.Tensor], None] | None = None
        self.change_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._embedding = weight(vocab_size, width) * width**0.5
        self._positions = weight(1024, width) * width**0.5
        self._qkv = [weight((HEADS + 2 * KV_HEADS) * DIM, width) for _ in range(LAYERS)]
        self._out = [weight(width, width) for _ in range(LAYERS)]
        self._head = weight(vocab_size, width) * 3
        self._kv_cache: KVCache = []

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        return 0

    def bind(self, kv_cache: KVCache) -> None:
        for pair in kv_cache:
            for cache in pair:
                cache.fill_(float("nan"))  # whoever reads what was never written shows it
        self._kv_cache = kv_cache

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        tokens = input_ids[0]
        self.steps.append((len(tokens), len(step.seq_lens), len(step.logits_rows)))
        if self.before_call is not None:
            self.before_call(tokens)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return paged_attention_reference(
                q,
                k,
                v,
                *self._kv_cache[layer],
                *(
                    step.field(f"{name}_{group}" if (group := self.caches[layer].group) else name)
                    for name in GROUP_FIELDS
                ),
                step.query_start_loc,
                step.seq_lens,
                None,
                None,
                DIM**-0.5,
                self.caches[layer].sliding_window,
                0,
                0.0,
            )

        logits = self._forward(tokens, position_ids[0], attend)[step.logits_rows].float()
        if self.change_logits is not None:
            logits = self.change_logits(logits, tokens[step.logits_rows])
        return logits

    def dense_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """``[T, V]`` logits of one sequence, without a cache."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            distance = torch.arange(len(token_ids))[:, None] - torch.arange(len(token_ids))
            window = self.caches[layer].sliding_window or len(token_ids)
            mask = (distance >= 0) & (distance < window)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

        return self._forward(torch.tensor(list(token_ids)), torch.arange(len(token_ids)), attend)

    def dense_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens of greedy decoding, without a cache."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _embedded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._embedding[tokens] + self._positions[positions]

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        x = self._embedded(tokens, positions)
        for layer in range(LAYERS):
            heads = torch.nn.functional.rms_norm(x, (x.shape[-1],)) @ self._qkv[layer].T
            q, k, v = heads.view(1, len(tokens), -1, DIM).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
            mixed = attend(layer, q, k, v).transpose(1, 2).reshape(len(tokens), -1)
            x = x + mixed @ self._out[layer].T
        return x @ self._head.T


def character_tokenizer() -> object:
    """A byte-level HuggingFace tokenizer without merges: 256 bytes, then ``</s>`` (256) and ``<s>`` (257)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")
