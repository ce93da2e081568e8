from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.requests.validation import PromptLimits, check_batch, check_params

LIMITS = PromptLimits(vocab_size=100, max_model_len=50, reason="raise max_model_len")


class Letters:
    """One token per letter, 26 further on after a space; whole words that it knows are one token."""

    def __init__(self, **words: int) -> None:
        self.words = words

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> Any:
        if isinstance(text, list):
            return SimpleNamespace(input_ids=[self(one, add_special_tokens).input_ids for one in text])
        ids = [99] if add_special_tokens else []
        for piece in text.split(" ") if " " in text else [text]:
            if piece in self.words:
                ids.append(self.words[piece])
            elif piece:
                ids += [ord(letter) - ord("a") + 26 * (" " in text) * (i == 0) for i, letter in enumerate(piece)]
        return SimpleNamespace(input_ids=ids)

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        raise NotImplementedError


def tokenized(words: Any, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    return check_params(SamplingParams(bad_words=words), tokenizer, LIMITS).bad_words_token_ids


def test_bad_words_are_tokenized_with_and_without_a_space_and_without_special_tokens() -> None:
    assert tokenized(["ab", "c"], Letters()) == ((0, 1), (26, 1), (2,), (28,))
    assert tokenized([" ab", "ab"], Letters()) == ((0, 1), (26, 1)), "a space of one's own changes nothing"
    assert tokenized("ab", Letters(ab=77)) == ((77,),), "the same tokens count once"
    mixed = Letters()
    mixed.words[""] = 60  # the space is a token of its own
    assert tokenized("ab", mixed) == ((0, 1), (60, 26, 1)), "also where the numbers of tokens differ"


def test_bad_words_that_cannot_be_ruled_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling_params\.bad_words=\['ab'\] needs a tokenizer"):
        tokenized("ab", None)
    with pytest.raises(ValueError, match=r"bad_words holds ' ', which has no tokens"):
        tokenized(["a", " "], Letters())
    with pytest.raises(
        ValueError, match=r"bad_words holds 'ab', whose token 100 is outside the vocabulary \[0, 100\)"
    ):
        tokenized("ab", Letters(ab=100))


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
def test_token_ids_are_checked_against_the_vocabulary(field: str) -> None:
    def params(token: int) -> SamplingParams:
        return SamplingParams(**{field: {3: 1.0, token: 1.0} if field == "logit_bias" else [3, token]})

    good = params(99)
    assert check_params(good, None, LIMITS) is good
    with pytest.raises(ValueError, match=rf"sampling_params\.{field} holds 100, .* \[0, 100\)"):
        check_params(params(100), None, LIMITS)
    with pytest.raises(ValueError, match=rf"sampling_params\[1\]\.{field} holds 200"):
        check_batch([[1], [2]], [good, params(200)], None, LIMITS)


def test_a_batch_shares_tokenized_parameters() -> None:
    checked = check_batch([[1], [2]], SamplingParams(bad_words=["ab"]), Letters(), LIMITS)
    assert [params.bad_words_token_ids for _, params in checked] == [((0, 1), (26, 1))] * 2


def test_no_parameters_are_the_default_ones() -> None:
    assert check_params(None, None, LIMITS) == SamplingParams()


def test_bad_words_are_tokenized_in_one_call_however_many() -> None:
    class Counted(Letters):
        batches = 0

        def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> Any:
            self.batches += isinstance(text, list)
            return super().__call__(text, add_special_tokens)

    tokenizer = Counted()
    words = [first + second for first in "abcdefgh" for second in "abcdefgh"]
    assert len(tokenized(words, tokenizer)) == 2 * len(words)
    assert tokenizer.batches == 1
