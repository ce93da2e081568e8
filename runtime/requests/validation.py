"""Checks what a caller hands to the engine, before anything runs: prompts and their sampling parameters."""

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
from .tokenise import cut_above, tokenise


@dataclass(frozen=True)
class PromptLimits:
    """Limits that a prompt must respect.

    Attributes:
        vocab_size: ids are below it.
        max_model_len: prompt and generated tokens together.
        reason: where ``max_model_len`` comes from, with the remedy; ends the message about a long prompt.
    """

    vocab_size: int
    max_model_len: int
    reason: str


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt that can run.

    Attributes:
        text: None when token ids were given, unless their dict had it, too.
        token_ids: at least one, all within the vocabulary, leaving room for what is to be generated.
    """

    text: str | None
    token_ids: list[int]


def check_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, limits: PromptLimits, name: str = "prompt", params: object = None
) -> CheckedPrompt:
    """Tokenise the prompt if it is text, and check that it can run.

    Args:
        prompt: text or token ids.
        tokenizer: of text.
        limits: of the engine.
        name: of the prompt in messages.
        params: its parameters, checked or not: with ``max_tokens=0`` it may fill the context.

    Raises:
        ValueError: one line with ``name``, the value and the remedy.
    """
    prompt, text = open_prompt(prompt, name)
    if isinstance(prompt, str):
        text = prompt
        if tokenizer is None:
            raise ValueError(f"{name}={_short(prompt)} is text; give token ids, or a tokenizer to the engine")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            at = f"{name}[{error.start}]={prompt[error.start]!a}"
            raise ValueError(f"{at} is half of a surrogate pair; give valid Unicode") from error
        token_ids = tokenise(prompt, tokenizer, limits.max_model_len)
        if not token_ids:
            raise ValueError(f"{name}={_short(prompt)} has no tokens after tokenising; give other text")
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
    """The parameters, or the default ones for None; their ``bad_words`` are tokenised.

    Raises:
        ValueError: they are not ``SamplingParams``, ask for what needs a tokenizer where there is none, or name
            tokens outside the vocabulary.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{name}={_short(params)} is not SamplingParams; use SamplingParams(max_tokens=..., ...)")
    if params.stop_strings and tokenizer is None:
        raise ValueError(
            f"{name}.stop={_short(list(params.stop_strings))} needs text; use stop_token_ids, or give a tokenizer"
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
    """The tokens of each word at the beginning of a text and after a space.

    vLLM leaves the second out where it has another number of tokens than the first; the word could be
    generated then, so that both are kept here.
    """
    if tokenizer is None:
        raise ValueError(f"{name}.bad_words={_short(words)} needs a tokenizer; use logit_bias, or give one")
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
    """As ``check_batch``, with ``BeamSearchParams``.

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
    """A list of prompts, of one prompt or several; the prompts themselves are not checked.

    Raises:
        ValueError: it is neither.
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
    """The entries as ints; bools and floats are refused, even 1.0."""
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
            raise ValueError(f"{name}[{i}]={_short(entry)} is not a token id; give whole numbers")
    return [operator.index(entry) for entry in entries]
