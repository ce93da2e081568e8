"""Checks a caller's prompts and sampling parameters before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .beam_search_params import BeamSearchParams
from .checks import shown as _short
from .detokenizer import Tokenizer
from .prompt_forms import Prompt, open_prompt
from .sampling_params import SamplingParams
from .tokenize import cut_above, tokenize


@dataclass(frozen=True)
class PromptLimits:
    """Limits that a prompt must respect.

    Attributes:
        vocab_size: exclusive upper bound of token ids.
        max_model_len: most prompt and generated tokens together.
        reason: origin of ``max_model_len`` with the remedy; ends the message about a long prompt.
    """

    vocab_size: int
    max_model_len: int
    reason: str


@dataclass(frozen=True)
class CheckedPrompt:
    """A checked prompt that the engine can run.

    Attributes:
        text: None if the caller passed token ids, unless their dict had a text, too.
        token_ids: at least one, all within the vocabulary, leaving room for the tokens to generate.
    """

    text: str | None
    token_ids: list[int]


def check_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, limits: PromptLimits, name: str = "prompt", params: object = None
) -> CheckedPrompt:
    """Tokenize the prompt if it is text, and check that it can run.

    Args:
        prompt: text or token ids.
        tokenizer: tokenizer for text prompts.
        limits: limits of the engine.
        name: name of the prompt in messages.
        params: parameters of the prompt, checked or not: with ``max_tokens=0`` it may fill the context.

    Raises:
        ValueError: one line with ``name``, the value and the remedy.
    """
    prompt, text = open_prompt(prompt, name)
    if isinstance(prompt, str):
        text = prompt
        if tokenizer is None:
            raise ValueError(f"{name}={_short(prompt)} is text; pass token ids, or give the engine a tokenizer")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            at = f"{name}[{error.start}]={prompt[error.start]!a}"
            raise ValueError(f"{at} is half of a surrogate pair; give valid Unicode") from error
        token_ids = tokenize(prompt, tokenizer, limits.max_model_len)
        if not token_ids:
            raise ValueError(f"{name}={_short(prompt)} has no tokens after tokenizing; give other text")
    else:
        token_ids = _whole_numbers(prompt, name)
        if not token_ids:
            raise ValueError(f"{name}=[] is empty; give at least one token id")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise ValueError(
            f"{name}[{token_ids.index(bad)}]={bad} is outside the vocabulary [0, {limits.vocab_size}); "
            + ("use the model's own tokenizer" if text is not None else "use ids of the model's tokenizer")
        )
    room = int(not isinstance(params, SamplingParams) or params.max_tokens != 0)
    if len(token_ids) + room > limits.max_model_len:
        count = f"{len(token_ids)} tokens"
        if text is not None and len(token_ids) > cut_above(limits.max_model_len):
            count += " or more"
        raise ValueError(
            f"{name} has {count}, which {'leaves no room for a new one within' if room else 'is above'} "
            f"max_model_len={limits.max_model_len}; shorten it or {limits.reason}"
        )
    return CheckedPrompt(text, token_ids)


def check_params(
    params: object, tokenizer: Tokenizer | None, limits: PromptLimits, name: str = "sampling_params"
) -> SamplingParams:
    """Return the parameters, or the default ones for None; their ``bad_words`` are tokenized.

    Raises:
        ValueError: they are not ``SamplingParams``, need a tokenizer that the engine does not have, or name tokens
            outside the vocabulary.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{name}={_short(params)} is not SamplingParams; use SamplingParams(max_tokens=..., ...)")
    if params.stop_strings and tokenizer is None:
        raise ValueError(
            f"{name}.stop={_short(list(params.stop_strings))} needs a tokenizer; use stop_token_ids or pass one"
        )
    for field in ("logit_bias", "allowed_token_ids"):
        highest = max(getattr(params, field) or (0,))
        if highest >= limits.vocab_size:
            raise ValueError(
                f"{name}.{field} holds {highest}, which is outside the vocabulary [0, {limits.vocab_size}); "
                "use ids of the model's tokenizer"
            )
    if params.bad_words:
        return params.with_bad_words_token_ids(_bad_word_sequences(list(params.bad_words), tokenizer, limits, name))
    return params


def _bad_word_sequences(
    words: Sequence[str], tokenizer: Tokenizer | None, limits: PromptLimits, name: str
) -> list[tuple[int, ...]]:
    """Return the tokens of each word, both at the beginning of a text and after a space.

    vLLM drops the second sequence if its number of tokens differs from the first's; the word could then still be
    generated, so both are kept here.
    """
    if tokenizer is None:
        raise ValueError(f"{name}.bad_words={_short(words)} needs a tokenizer; use logit_bias or pass one")
    texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    sequences: dict[tuple[int, ...], None] = {}
    for i, entry in enumerate(tokenizer(texts, add_special_tokens=False).input_ids):
        token_ids = tuple(int(token) for token in entry)
        if not token_ids:
            raise ValueError(f"{name}.bad_words holds {_short(words[i // 2])}, which has no tokens; leave it out")
        if max(token_ids) >= limits.vocab_size:
            raise ValueError(
                f"{name}.bad_words holds {_short(words[i // 2])}, whose token {max(token_ids)} is outside the "
                f"vocabulary [0, {limits.vocab_size}); use the model's own tokenizer"
            )
        sequences[token_ids] = None
    return list(sequences)


def check_batch(
    prompts: object,
    params: object,
    tokenizer: Tokenizer | None,
    limits: PromptLimits,
    default: SamplingParams | None = None,
) -> list[tuple[CheckedPrompt, SamplingParams]]:
    """Check a whole batch: one prompt or a list of them, one ``SamplingParams`` or one per prompt.

    Parameters that are None are ``default``.

    Raises:
        ValueError: the message names the index of the first bad prompt or parameters.
    """
    batch = as_batch(prompts)
    if isinstance(params, (list, tuple)):
        _check_count("sampling_params", len(params), len(batch))
        each = [
            check_params(default if entry is None else entry, tokenizer, limits, f"sampling_params[{i}]")
            for i, entry in enumerate(params)
        ]
    else:
        each = [check_params(default if params is None else params, tokenizer, limits)] * len(batch)
    return [
        (check_prompt(prompt, tokenizer, limits, f"prompts[{i}]", entry), entry)
        for i, (prompt, entry) in enumerate(zip(batch, each, strict=True))
    ]


def check_beam_batch(
    prompts: object, params: object, tokenizer: Tokenizer | None, limits: PromptLimits
) -> list[tuple[CheckedPrompt, BeamSearchParams]]:
    """Check a whole batch as ``check_batch`` does, with ``BeamSearchParams``.

    Raises:
        ValueError: the message names the index of the first bad prompt or parameters.
    """
    batch = as_batch(prompts)
    if isinstance(params, (list, tuple)):
        _check_count("params", len(params), len(batch))
        each = list(params)
    else:
        each = [params] * len(batch)
    for i, entry in enumerate(each):
        if not isinstance(entry, BeamSearchParams):
            name = f"params[{i}]" if isinstance(params, (list, tuple)) else "params"
            raise ValueError(
                f"{name}={_short(entry)} is not BeamSearchParams; use BeamSearchParams(beam_width=..., ...)"
            )
    return [
        (check_prompt(prompt, tokenizer, limits, f"prompts[{i}]"), entry)
        for i, (prompt, entry) in enumerate(zip(batch, each, strict=True))
    ]


def _check_count(name: str, count: int, num_prompts: int) -> None:
    if count != num_prompts:
        raise ValueError(f"{name} has {count} entries for {num_prompts} prompts; give one, or one per prompt")


def as_batch(prompts: object) -> list[Any]:
    """Return a list of prompts from one prompt or several, without checking the prompts themselves.

    Raises:
        ValueError: ``prompts`` is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, (torch.Tensor, np.ndarray)):
        return list(prompts) if prompts.ndim > 1 else [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValueError(f"prompts={_short(prompts)} is not a prompt or a list of prompts; use [prompt, ...]")
    batch = list(prompts)
    if batch and all(isinstance(entry, (int, np.integer)) for entry in batch):
        return [batch]
    return batch


def _whole_numbers(prompt: object, name: str) -> list[int]:
    """Return the entries as ints; bools and floats are rejected, even 1.0."""
    if isinstance(prompt, torch.Tensor):
        if prompt.dtype.is_floating_point or prompt.dtype.is_complex:
            raise ValueError(f"{name} has dtype {prompt.dtype}; give token ids as integers")
        prompt = prompt.cpu().numpy()
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1:
            raise ValueError(f"{name} has shape {list(prompt.shape)}; give a 1-D list of token ids per prompt")
        if not np.issubdtype(prompt.dtype, np.integer):
            raise ValueError(f"{name} has dtype {prompt.dtype}; give token ids as integers")
        result: list[int] = prompt.tolist()
        return result
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray, dict)):
        raise ValueError(f"{name}={_short(prompt)} is not a prompt; give text or a list of token ids")
    entries = list(prompt)
    if set(map(type, entries)) <= {int}:
        return entries
    for i, entry in enumerate(entries):
        if isinstance(entry, (bool, np.bool_)) or not hasattr(entry, "__index__"):
            raise ValueError(f"{name}[{i}]={_short(entry)} is not a token id; use integers")
    return [operator.index(entry) for entry in entries]
