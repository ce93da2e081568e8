"""Limits on a single request, so that it cannot starve the others."""

from __future__ import annotations

MAX_COMPLETIONS = 1024
"""Completions of one prompt (``n``, ``best_of``, ``beam_width``): the step that completes the prompt samples all of
them, and holds one row of logits for each in memory."""

MAX_LOGPROBS = 100
"""Likely tokens reported per token (``logprobs``, ``prompt_logprobs``): each is an object with its text."""

MAX_TOKEN_IDS = 2**20
"""Entries of ``logit_bias``, ``allowed_token_ids`` and ``stop_token_ids``; more than any vocabulary has."""

MAX_STOP_STRINGS = 10_000
"""Number of ``stop`` strings."""

MAX_STOP_CHARACTERS = 100_000
"""Characters of all ``stop`` strings together; their automaton takes some hundred bytes per character."""

MAX_BAD_WORDS = 20_000
"""Number of ``bad_words``; each is tokenized twice."""

MAX_BAD_WORDS_CHARACTERS = 200_000
"""Characters of all ``bad_words`` together."""

MAX_PRIORITY = 2**31 - 1
"""``priority`` is between this and its negative: a rank is a float and would lose smaller differences."""

MAX_WHOLE_NUMBER = 2**64 - 1
"""Any other number in a request: large enough for a 64-bit seed, and still representable as a float."""
