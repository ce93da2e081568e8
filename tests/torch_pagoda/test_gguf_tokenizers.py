"""Tokenizers that GGUF files hold give the ids that llama.cpp gives, and say what they lack."""

from __future__ import annotations

import heapq
import random
from pathlib import Path
from typing import Any

import pytest
from gguf_files import all_of, file_of
from transformers import PreTrainedTokenizerBase

from torch_pagoda.checkpoint.configs import load_tokenizer

from tiny_models import build_tiny_model

pytest.importorskip("transformers.integrations.gguf", reason="older releases read no file of two layers")

LETTERS = "▁abcehnost"
PAIRS = "▁a ▁th th the he ▁the ▁t ca cat ▁cat at an ▁an and nt nth ▁▁ est tes".split()
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *PAIRS]
SCORES = [0.0] * (len(PIECES) - len(PAIRS)) + [-1.0 - i for i in range(len(PAIRS))]
OF_PIECES = {
    "model": "llama",
    "pre": "default",
    "tokens": PIECES,
    "scores": SCORES,
    "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}
OF_BYTES = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<s>", "</s>", *"theca", "th", "thec"],
    "token_type": [3, 3, *[1] * 7],
    "merges": ["t h"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tokenizer_with(folder: Path, model_type: str = "llama", **said: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a file that says this of it; None leaves an entry out."""
    model = build_tiny_model(model_type, vocab_size=300, tie_word_embeddings="gemma" in model_type)
    file = file_of(model, all_of("F32"))
    for key in [key for key in file.metadata if key.startswith("tokenizer.")]:
        del file.metadata[key]
    kind = OF_BYTES if said.get("model") == "gpt2" else OF_PIECES
    file.metadata |= {f"tokenizer.ggml.{key}": x for key, x in {**kind, **said}.items() if x is not None}
    found = load_tokenizer(file.write(folder / "model.gguf"), False, required=True)
    assert found is not None
    return found


def pieces_of(text: str, space: bool) -> list[int]:
    """As llama.cpp's tokenizer of SentencePiece vocabularies splits a text: the best pair is joined first, and of
    equally good ones the leftmost."""
    ids = {piece: i for i, piece in enumerate(PIECES)}
    symbols = list((" " * space + text).replace(" ", "▁"))
    before, behind = list(range(-1, len(symbols) - 1)), [*range(1, len(symbols)), -1]
    queue: list[tuple[float, int, int, str]] = []

    def add(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and symbols[left] + symbols[right] in ids:
            joined = symbols[left] + symbols[right]
            heapq.heappush(queue, (-SCORES[ids[joined]], left, right, joined))

    for i in range(1, len(symbols)):
        add(i - 1, i)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
            continue
        symbols[left], symbols[right] = joined, ""
        behind[left] = behind[right]
        if behind[left] >= 0:
            before[behind[left]] = left
        add(before[left], left)
        add(left, behind[left])
    found: list[int] = []
    for symbol in filter(None, symbols):
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
@pytest.mark.parametrize(
    ("said", "space"), [({}, True), ({"add_space_prefix": True}, True), ({"add_space_prefix": False}, False)]
)
def test_the_space_before_a_text_is_as_the_file_says(
    said: dict[str, bool], space: bool, model_type: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(tmp_path, model_type, **said)
    draw = random.Random(0)
    texts = ["the cat", "a", "é the", *("".join(draw.choices("abcehnost ", k=12)).strip() for _ in range(40))]
    for text in texts:
        assert tokenizer(text)["input_ids"] == [1, *pieces_of(text, space)], text
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text
    if not space:
        assert tokenizer(" the")["input_ids"] == [1, PIECES.index("▁the")]
        assert tokenizer.decode([PIECES.index("▁the")]) == " the"
        assert tokenizer("</s>the")["input_ids"] == [1, 2, PIECES.index("the")]


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_gemmas_put_none(model_type: str, tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, model_type, add_space_prefix=False)("the")["input_ids"] == [
        1,
        PIECES.index("the"),
    ]
    with pytest.raises(ValueError, match=r"'tokenizer\.ggml\.add_space_prefix' is True, which transformers'"):
        tokenizer_with(tmp_path, model_type, add_space_prefix=True)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "<s> ▁the"),
        ({"add_bos_token": False}, "▁the"),
        ({"add_eos_token": True}, "<s> ▁the </s>"),
        ({"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}, "the </s>"),
        ({"remove_extra_whitespaces": True}, "<s> ▁the"),  # which llama.cpp reads of other kinds only
        ({"model": "gpt2"}, "th e"),
        ({"model": "gpt2", "add_space_prefix": True}, "th e"),
        ({"model": "gpt2", "add_bos_token": True}, "<s> th e"),
        ({"model": "gpt2", "pre": "llama-bpe"}, "<s> th e"),
        ({"model": "gpt2", "pre": "tekken"}, "<s> th e"),
        ({"model": "gpt2", "pre": "llama-bpe", "add_bos_token": False}, "th e"),
        ({"model": "gpt2", "pre": "qwen2", "add_eos_token": True}, "th e </s>"),
    ],
)
def test_what_stands_around_a_text_is_as_the_file_says(said: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, **said)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the")["input_ids"]) == expected.split()


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", "thec"), ("gpt-2", "th e c")])
def test_words_that_are_tokens_are_not_split(pre: str, expected: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, model="gpt2", pre=pre, add_bos_token=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer("thec")["input_ids"]) == expected.split()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"scores": None}, r"model\.gguf holds no 'tokenizer\.ggml\.scores'"),
        ({"scores": [0.0, 1.0]}, rf"holds 2 of {len(PIECES)} 'tokenizer\.ggml\.scores'"),
        ({"tokens": None}, "holds no tokens"),
        ({"model": "gpt2", "merges": None}, r"has no 'tokenizer\.ggml\.merges'"),
    ],
)
def test_what_is_missing_is_named(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{words}.*pass tokenizer="):
        tokenizer_with(tmp_path, **said)


def test_merges_do_without_scores(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, scores=None, merges=["t h", "th e"], add_space_prefix=False)
    assert tokenizer("the")["input_ids"] == [1, PIECES.index("the")]
