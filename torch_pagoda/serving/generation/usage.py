"""Token counts of a response, as OpenAI counts."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Ids: TypeAlias = list[Count]


class CachedTokens(Struct):
    """Details of the prompt tokens: those from the prefix cache."""

    cached_tokens: Count


class UsageSoFar(Struct):
    """Tokens of all prompts and choices; cached ones are known at the end only."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class Usage(UsageSoFar):
    """Tokens of all prompts and choices."""

    prompt_tokens_details: CachedTokens
