from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from torch_pagoda.runtime.requests.detokenizer import Detokenizer
from torch_pagoda.runtime.requests.special_tokens import special_tokens
from torch_pagoda.runtime.requests.stop_strings import StopStrings

from toy_program import character_tokenizer

BYTES: Any = character_tokenizer()


def ids(text: str | bytes) -> list[int]:
    if isinstance(text, str):
        return BYTES(text).input_ids
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = bytes_to_unicode()
    return [BYTES.convert_tokens_to_ids(alphabet[byte]) for byte in text]


def words() -> Any:
    """Word tokens whose leading space the decoder strips at the start, as Llama's sentencepiece does."""
    vocab = {"▁Hello": 0, "▁world": 1, "s": 2, "▁and": 3, "</s>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_no_half_character_is_given_out() -> None:
    text = "naïve 日本語 😀!"
    detokenizer = Detokenizer(BYTES, ids("x"))
    seen = ""
    for token in ids(text):
        detokenizer.append([token])
        assert detokenizer.text.startswith(seen) and text.startswith(detokenizer.text)
        seen = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text == text


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_pieces_of_any_size_give_the_text_of_the_whole(size: int) -> None:
    text = "The quick bröwn fox — jumps over 🦥🦥 lazy dogs. " * 9
    tokens = ids(text)
    detokenizer = Detokenizer(BYTES, ids("Once é"))
    for start in range(0, len(tokens), size):
        detokenizer.append(tokens[start : start + size])
    detokenizer.finish()
    assert detokenizer.text == text == BYTES.decode(tokens)


def test_broken_utf8_never_blocks() -> None:
    rng = random.Random(0)
    for _ in range(20):
        data = bytes(rng.choice([rng.randrange(256), 0xE6, 0x97, 0xF0, 0x9F]) for _ in range(120))
        detokenizer = Detokenizer(BYTES, [])
        for count, token in enumerate(ids(data), 1):
            detokenizer.append([token])
            given = len(detokenizer.text.encode("utf-8", "replace"))
            assert given >= len(data[: max(0, count - 4)].decode("utf-8", "ignore").encode())
        detokenizer.finish()
        assert detokenizer.text == data.decode("utf-8", "replace")


def test_incomplete_character_at_the_end_is_shown() -> None:
    detokenizer = Detokenizer(BYTES, [])
    detokenizer.append(ids("a" + "é")[:-1])
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == "a\ufffd"


def test_a_character_that_the_prompt_began() -> None:
    first, second = ids("é")
    detokenizer = Detokenizer(BYTES, [*ids("caf"), first])
    detokenizer.append([second])
    detokenizer.append(ids("s"))
    assert detokenizer.text == "és"


def test_leading_spaces_follow_the_prompt() -> None:
    tokenizer = words()
    detokenizer = Detokenizer(tokenizer, [0])
    assert tokenizer.decode([1, 2]) == "worlds"
    detokenizer.append([1])
    detokenizer.append([2])
    detokenizer.append([3, 1, 4, 1])
    assert detokenizer.text == " worlds and world world"
    at_start = Detokenizer(tokenizer, [4])
    at_start.append([0, 1])
    assert at_start.text == "Hello world"


def feed(detokenizer: Detokenizer, text: str) -> list[int]:
    """Token by token until a stop string; the stable lengths after each."""
    lengths = []
    for token in ids(text):
        stopped = detokenizer.append([token])
        lengths.append(detokenizer.stable_length)
        assert detokenizer.stable_length <= len(detokenizer.text)
        if stopped:
            break
    return lengths


def test_stop_string_over_several_tokens_is_cut_off() -> None:
    detokenizer = Detokenizer(BYTES, ids("p"), stop=StopStrings(["END", "\n\n"]))
    lengths = feed(detokenizer, "some ENtry\nthen END more")
    assert detokenizer.text == "some ENtry\nthen "
    assert detokenizer.stop_string == "END"
    assert lengths == sorted(lengths), "what was given out is never taken back"
    assert max(lengths) == len("some ENtry\nthen ")
    before = detokenizer.text
    assert detokenizer.append(ids("x")) and detokenizer.finish()
    assert detokenizer.text == before


def test_the_stop_string_that_is_complete_first_wins() -> None:
    detokenizer = Detokenizer(BYTES, [], stop=StopStrings(["bcd", "c"]))
    feed(detokenizer, "abcd")
    assert (detokenizer.text, detokenizer.stop_string) == ("ab", "c")
    detokenizer = Detokenizer(BYTES, [], stop=StopStrings(["c", "abc"]))
    feed(detokenizer, "xabcd")
    assert (detokenizer.text, detokenizer.stop_string) == ("x", "abc")


def test_a_stop_string_within_one_token() -> None:
    detokenizer = Detokenizer(words(), [0], stop=StopStrings(["or"]))
    assert detokenizer.append([1])
    assert detokenizer.text == " w"


def test_text_before_the_check_starts_does_not_stop() -> None:
    detokenizer = Detokenizer(BYTES, [], stop=StopStrings(["ab"]))
    for token in ids("abxa"):
        assert not detokenizer.append([token], check_stop=False)
    assert not detokenizer.append(ids("x"))
    assert not detokenizer.append(ids("a"))
    assert detokenizer.append(ids("b"))
    assert detokenizer.text == "abxax"


def test_stop_strings_equal_a_search_in_the_whole_text() -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice("abé") for _ in range(rng.randrange(1, 80)))
        stops = ["".join(rng.choice("abé") for _ in range(rng.randrange(1, 6))) for _ in range(2)]
        detokenizer = Detokenizer(BYTES, ids("ab"), stop=StopStrings(stops))
        lengths = feed(detokenizer, text)
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        assert detokenizer.text == (text[: min(ends)[1]] if ends else text)
        assert lengths == sorted(lengths)
        assert not ends or max(lengths) <= min(ends)[1]


def test_reset_forgets_the_output_only() -> None:
    first, second = ids("é")
    detokenizer = Detokenizer(BYTES, [first], stop=StopStrings(["z"]))
    detokenizer.append([second, *ids("abcz")])
    detokenizer.reset()
    assert (detokenizer.text, detokenizer.num_tokens, detokenizer.stop_string) == ("", 0, None)
    detokenizer.append([second])
    assert detokenizer.text == "é"


def test_cost_per_token_is_constant() -> None:
    decoded = 0

    class Counting:
        def __call__(self, text: str) -> Any:
            raise AssertionError

        def decode(self, token_ids: Any, **kwargs: Any) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return BYTES.decode(token_ids, **kwargs)

    detokenizer = Detokenizer(Counting(), [])
    for token in ids(b"\xe6" * 500 + b"plain text" * 50):
        detokenizer.append([token])
    assert decoded < 1000 * 100


def test_special_tokens_are_those_that_have_a_name_and_those_that_are_added_as_special() -> None:
    class Named:
        all_special_ids, all_special_tokens = [3, None], ["</s>", "<pad>"]

    assert dict(special_tokens(Named())) == {3: "</s>"}
    tokenizer: Any = character_tokenizer()
    tokenizer.add_tokens(["<plain>"])
    tokenizer.backend_tokenizer.add_special_tokens(["<added>"])
    assert dict(special_tokens(tokenizer)) == {256: "</s>", 257: "<s>", 259: "<added>"}


def test_kept_special_tokens_are_text_with_the_spaces_that_the_tokenizer_gives_them() -> None:
    tokenizer = words()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    tokens = [0, 5, 1, 6, 2, 4, 3]
    for kept in ((), (5,), (5, 6), (4,)):
        detokenizer = Detokenizer(tokenizer, [0], kept_special_token_ids=kept)
        for token in tokens:
            detokenizer.append([token])
        seen = [token for token in tokens if token < 4 or token in kept]
        assert detokenizer.text == tokenizer.decode([0, *seen])[len("Hello") :]
