"""The most that one request may ask for, so that it cannot stop the others."""

from __future__ import annotations

MAX_COMPLETIONS = 1024
"""Of one prompt (``n``, ``best_of``, ``beam_width``): all are sampled in the step that completes the prompt, and a
row of logits each is in memory then."""

MAX_LOGPROBS = 100
"""Likely tokens reported per token (``logprobs``, ``prompt_logprobs``): each is an object with its text."""

MAX_TOKEN_IDS = 2**20
"""Entries of ``logit_bias``, ``allowed_token_ids`` and ``stop_token_ids``; more than any vocabulary has."""

MAX_STOP_STRINGS = 10_000
"""Entries of ``stop``."""

MAX_STOP_CHARACTERS = 100_000
"""Of all ``stop`` strings together; the automaton that looks for them takes some hundred bytes for each."""

MAX_BAD_WORDS = 20_000
"""Entries of ``bad_words``, each of which is tokenised twice."""

MAX_BAD_WORDS_CHARACTERS = 200_000
"""Of all ``bad_words`` together."""

MAX_PRIORITY = 2**31 - 1
"""``priority`` lies between this and its negative: a rank is a float, to which smaller differences would be lost."""

MAX_WHOLE_NUMBER = 2**64 - 1
"""Of any other number of a request: what a 64-bit seed needs, and what a float can still stand for."""
