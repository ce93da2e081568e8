"""Small tokenizers of whole words, of each kind that models have."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from trained_model import TEXT
from transformers import PreTrainedTokenizerFast

KINDS = ("byte-level", "metaspace", "metaspace with added words", "byte-level with tags")
SPECIAL = ("<|im_start|>", "[INST]", "</tool_call>")
WORDS = ("NEWTOK", "[toxicity]", "\n\n", "  ")
TAGS = ("<think>", "</think>", "<unused99>", "<b>", "</b>", "<td>", "</td>")


@cache
def word_tokenizer(kind: str, vocab_size: int = 600) -> Any:
    """A tokenizer of one of ``KINDS``: BPE trained on ``TEXT``, with ``SPECIAL`` tokens, a BOS and an end.

    Metaspace is Llama 2's: a mark for spaces that the normalizer prepends, byte fallback, and a decoder that strips
    the first space. Byte-level is Qwen's: text is normalized to NFC. ``WORDS`` and ``TAGS`` are added tokens, not
    special.
    """
    is_metaspace = kind.startswith("metaspace")
    base = _metaspace(vocab_size) if is_metaspace else _byte_level(vocab_size)
    bos, eos = ("<s>", "</s>") if is_metaspace else ("<|begin|>", "<|endoftext|>")
    begin = base.token_to_id(bos)
    base.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, begin)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, bos_token=bos, eos_token=eos)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if kind.endswith("words"):
        tokenizer.add_tokens([AddedToken(word, normalized=word.isalpha()) for word in WORDS])
    if kind.endswith("tags"):
        tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def _byte_level(vocab_size: int) -> Tokenizer:
    base = Tokenizer(models.BPE())
    base.normalizer = normalizers.NFC()
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|begin|>"]
    base.train_from_iterator(
        TEXT.splitlines(),
        trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
        ),
    )
    return base


def _metaspace(vocab_size: int) -> Tokenizer:
    base = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    specials = ["<unk>", "<s>", "</s>", *byte_pieces]
    # Words are kept apart while it learns, as SentencePiece does.
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    base.train_from_iterator(
        TEXT.splitlines(),
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False),
    )
    base.pre_tokenizer = None
    base.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    written = json.loads(base.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] not in byte_pieces]
    return Tokenizer.from_str(json.dumps(written))
