"""A tokenizer of any size, for models of random weights: each of their tokens has a text of its own."""

from __future__ import annotations

import random
import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 256


def synthetic_tokenizer(size: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of so many tokens: bytes, ``</s>``, numbers up to 999, marks, and random words."""
    rng = random.Random(seed)
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    words: dict[str, None] = {str(i): None for i in range(10, 1000)}
    marks = '{}[]":,.-_/\\()<>=+*&%$#@!?;'
    while len(tokens) + len(words) + 1 < size:
        draw = rng.random()
        if draw < 0.04:
            words["".join(rng.choices(marks, k=rng.randint(2, 4)))] = None
        elif draw < 0.08:
            words["".join(rng.choices("ĠĊĉ", weights=[8, 2, 1], k=rng.randint(2, 12)))] = None
        else:
            letters = "".join(rng.choices(string.ascii_lowercase, k=rng.choices(range(2, 11), range(1, 10))[0]))
            word = letters.capitalize() if rng.random() < 0.2 else letters
            words["Ġ" + word if rng.random() < 0.5 else word] = None
    vocab = {token: i if i < EOS else i + 1 for i, token in enumerate([*tokens, *words])}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "</s>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
