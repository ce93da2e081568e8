"""Text whose characters come as tokens of single bytes, by decoders that read bytes one by one and in runs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from torch_pagoda.runtime.requests.detokenizer import Detokenizer
from torch_pagoda.runtime.requests.stop_strings import StopStrings

from toy_program import character_tokenizer

WORDS = ["▁party", "▁done", "▁ok", "a", "b", "▁", "é", "日"]


def fallback(family: str) -> Any:
    """A tokenizer with the decoder of Llama 2, which strips a space at the beginning, or of Gemma."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if family == "llama":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


LLAMA, GEMMA, LEVEL = fallback("llama"), fallback("gemma"), character_tokenizer()
TOKENIZERS: Any = {"llama": LLAMA, "gemma": GEMMA, "byte level": LEVEL}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def spelled(name: str, *parts: str | bytes | int) -> list[int]:
    """Tokens: of words in whole, of other text and of bytes byte by byte; numbers are tokens."""
    found: list[int] = []
    for part in parts:
        if isinstance(part, int):
            found.append(part)
        elif name != "byte level":
            if isinstance(part, str) and part in WORDS:
                found.append(LLAMA.convert_tokens_to_ids(part))
            else:
                found += [3 + byte for byte in (part.encode() if isinstance(part, str) else part)]
        elif isinstance(part, str):
            found += LEVEL(part.replace("▁", " ")).input_ids
        else:
            alphabet = bytes_to_unicode()
            found += [LEVEL.convert_tokens_to_ids(alphabet[byte]) for byte in part]
    return found


def added_by(name: str, prompt: list[int], output: list[int], **options: Any) -> str:
    """What transformers' decoding of the whole gives for the output."""
    decode = TOKENIZERS[name].decode
    before, whole = decode(prompt, **options), decode(prompt + output, **options)
    assert whole.startswith(before)
    return str(whole[len(before) :])


def characters_of(data: bytes) -> str:
    """Its characters; each byte that belongs to none is U+FFFD."""
    return data.decode("utf-8", "surrogateescape").translate({0xDC00 + byte: "\ufffd" for byte in range(128, 256)})


def streamed(name: str, prompt: list[int], output: list[int], size: int = 1, **options: Any) -> tuple[str, list[str]]:
    """The text, and what it was after each piece."""
    detokenizer = Detokenizer(TOKENIZERS[name], prompt, **options)
    seen = []
    for start in range(0, len(output), size):
        detokenizer.append(output[start : start + size])
        seen.append(detokenizer.text)
    detokenizer.finish()
    for shorter, longer in zip(seen, [*seen[1:], detokenizer.text], strict=True):
        assert longer.startswith(shorter)
    return detokenizer.text, seen


@every_tokenizer
@pytest.mark.parametrize("words", [0, 1, 2, 3, 4, 5])
def test_a_long_run_of_bytes(name: str, words: int) -> None:
    prompt = spelled(name, *["a"] * words)
    output = spelled(name, "▁party", "▁", "🎉" * 30, "▁done")
    for size in (1, 2, 3, 7, 200):
        text, seen = streamed(name, prompt, output, size)
        assert text == added_by(name, prompt, output)
        assert "\ufffd" not in "".join(seen)
    assert streamed(name, spelled(name, "a"), output)[0] == " party " + "🎉" * 30 + " done"


@every_tokenizer
def test_a_character_is_given_out_with_its_last_byte(name: str) -> None:
    text = "🎉日é👩‍👩‍👧🇫🇷\n" * 6
    seen = streamed(name, spelled(name, "b"), spelled(name, *text.encode().split(b"~")))[1]
    assert seen == [text.encode()[: end + 1].decode("utf-8", "ignore") for end in range(len(text.encode()))]


@every_tokenizer
def test_a_prompt_whose_end_is_one_run_of_bytes(name: str) -> None:
    for count, before in product(range(1, 6), ("", "▁ok", "▁")):
        prompt = spelled(name, *([before] if before else []), "😀" * count)
        output = spelled(name, "😀", "▁ok")
        text, seen = streamed(name, prompt, output)
        assert (text, seen[2], seen[3]) == ("😀 ok", "", "😀")


@every_tokenizer
def test_a_prompt_that_ends_within_a_character(name: str) -> None:
    character = "😀".encode()
    for count, cut in product(range(6), range(1, 4)):
        prompt = spelled(name, "a", "é😀" * count, character[:cut])
        assert streamed(name, prompt, spelled(name, character[cut:], "😀日", "▁ok"))[0] == "😀😀日 ok"
        for other in ("😀🎉日", "日é日", "é\n😀"):  # it stays incomplete
            assert streamed(name, prompt, spelled(name, other.encode(), "▁ok"))[0] == other + " ok"


@every_tokenizer
def test_characters_before_one_that_is_cut_off(name: str) -> None:
    for count, cut, size in product((1, 3, 9), (1, 2, 3), (1, 2, 5, 99)):
        output = spelled(name, "▁party", "▁", "🎉" * count, "🎉".encode()[:cut])
        text, seen = streamed(name, spelled(name, "a"), output, size)
        missing = "\ufffd" if name == "byte level" else "\ufffd" * cut
        assert text == " party " + "🎉" * count + missing
        assert seen[-1] == " party " + "🎉" * count


@every_tokenizer
def test_bytes_that_are_no_character_spoil_no_other(name: str) -> None:
    for bad, tail, size in product((b"\xff", b"\x9f", b"\xc0\xff", b"\xff" * 9), ("日", "😀", "é日"), (1, 3, 99)):
        output = spelled(name, "▁party", "😀" * 4, bad, (tail * 12).encode(), "▁done")
        text = streamed(name, spelled(name, "a"), output, size)[0]
        assert text == " party" + "😀" * 4 + "\ufffd" * len(bad) + tail * 12 + " done"
        begun = spelled(name, "a", bad, (tail * 12).encode(), "▁done")
        assert streamed(name, spelled(name, "a"), begun, size)[0] == "a" + "\ufffd" * len(bad) + tail * 12 + " done"


@every_tokenizer
def test_special_tokens_at_the_end_of_a_prompt(name: str) -> None:
    special = 256 if name == "byte level" else 2
    for count, end in product(range(8), ("▁ok", "😀")):
        prompt = spelled(name, "a", end, *[special] * count)
        expected = "ok" if count >= 6 and name == "llama" else " ok"  # nothing that is read has text
        assert streamed(name, prompt, spelled(name, "▁ok"))[0] == expected


@every_tokenizer
def test_text_after_bytes_that_are_no_character_does_not_wait(name: str) -> None:
    text, seen = streamed(name, spelled(name, "a"), spelled(name, b"\xff\xff", "b", "a"))
    assert (text, seen) == ("\ufffd\ufffdba", ["", "", "\ufffd\ufffdb", text])


@every_tokenizer
def test_a_special_token_within_a_character(name: str) -> None:
    special, (first, *others) = 256 if name == "byte level" else 2, spelled(name, "😀".encode())
    for begun in ([first], [first, special]):
        for output in (others, [special, *others]):
            prompt = spelled(name, "a", "😀😀") + begun
            assert streamed(name, prompt, output + spelled(name, "▁ok"))[0] == "😀 ok"
            assert streamed(name, prompt, [special, *spelled(name, "▁ok")])[0] == " ok"


@every_tokenizer
def test_stop_strings_in_a_run_of_bytes(name: str) -> None:
    for before, after in product(range(24), (0, 1, 9)):
        output = spelled(name, "▁party", "🎉" * before + "🎊" + "🎉" * after, "▁done")
        detokenizer = Detokenizer(TOKENIZERS[name], spelled(name, "a"), StopStrings(["🎊"]))
        taken = next((count for count, token in enumerate(output, 1) if detokenizer.append([token])), None)
        assert taken == len(spelled(name, "▁party", "🎉" * before + "🎊"))
        assert (detokenizer.text, detokenizer.stop_string) == (" party" + "🎉" * before, "🎊")


characters = st.sampled_from(["🎉", "😀", "👩‍👩‍👧", "🇫🇷", "é", "日", "\n", "a", *WORDS])
specials = st.sampled_from([1, 2])


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(characters | specials, max_size=8),
    output=st.lists(characters | specials, min_size=1, max_size=30),
    size=st.integers(1, 30),
    skip=st.booleans(),
    repeated=st.integers(1, 4),
)
def test_any_text_is_that_of_the_whole(
    name: str, prompt: list[Any], output: list[Any], size: int, skip: bool, repeated: int
) -> None:
    def tokens(parts: list[Any]) -> list[int]:
        special = {1: 257, 2: 256} if name == "byte level" else {1: 1, 2: 2}
        return spelled(name, *(special.get(part, part) for part in parts))

    before, ids = tokens(prompt), tokens(output) * repeated
    text, seen = streamed(name, before, ids, size, skip_special_tokens=skip)
    assert text == added_by(name, before, ids, skip_special_tokens=skip)
    assert all(text.startswith(part) for part in seen)
    assert "\ufffd" not in text


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(
    prompt=st.binary(max_size=12),
    # A space is a token of its own, never the byte.
    output=st.lists(
        st.binary(min_size=1, max_size=3).filter(lambda data: b" " not in data) | characters, min_size=1, max_size=20
    ),
    size=st.integers(2, 60),
)
def test_any_bytes_whatever_comes_together(name: str, prompt: bytes, output: list[Any], size: int) -> None:
    before, ids = spelled(name, "a", prompt), spelled(name, *output)
    text = streamed(name, before, ids)[0]
    assert text == streamed(name, before, ids, size)[0]
    if LEVEL.decode(spelled("byte level", prompt)).endswith("\ufffd"):
        return
    if name == "byte level":
        assert text == added_by(name, before, ids)
    else:
        expected, run = "", b""
        for part in [*output, ""]:
            if isinstance(part, str) and (part in WORDS or not part):
                expected, run = expected + characters_of(run) + part.replace("▁", " "), b""
            else:
                run += part.encode() if isinstance(part, str) else part
        assert text == expected
