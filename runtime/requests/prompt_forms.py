"""The forms that a prompt may have: text, token ids, or vLLM's dicts of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | Mapping[str, Any]"
"""Text; token ids in any 1-D container of whole numbers; or a dict, ``{"prompt": text}`` or
``{"prompt_token_ids": ids}``. Where a dict has both, the ids run and the text is only carried along."""

_KEYS = ("prompt", "prompt_token_ids")


def open_prompt(prompt: object, name: str) -> tuple[Any, str | None]:
    """Text or token ids to run of a prompt, and the text that its dict carries beside token ids.

    Entries of a dict that are None count as absent. What is not a dict is returned as it is, unchecked.

    Raises:
        ValueError: a dict with other keys, with neither text nor ids, or with values of other kinds; one line that
            begins with ``name``.
    """
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given:
        if key not in _KEYS:
            raise ValueError(
                f"{name} has the key {key!r}, which is not served; keep 'prompt' (text) or 'prompt_token_ids' only, "
                "what else is known of a request are arguments of their own"
            )
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name}['prompt']={text!r} is not text; give token ids as 'prompt_token_ids'")
    if token_ids is None:
        if text is None:
            raise ValueError(f"{name}={prompt!r} holds no prompt; give 'prompt' (text) or 'prompt_token_ids'")
        return text, None
    if isinstance(token_ids, str | Mapping):
        raise ValueError(
            f"{name}['prompt_token_ids']={token_ids!r} is not a list of token ids; give text as 'prompt'"
        )
    return token_ids, text
