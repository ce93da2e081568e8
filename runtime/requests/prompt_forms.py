"""The accepted forms of a prompt: text, token ids, or vLLM's dicts of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | Mapping[str, Any]"
"""Text; token ids in any 1-D container of integers; or a dict, ``{"prompt": text}`` or
``{"prompt_token_ids": ids}``. If a dict has both, the engine runs the ids and only passes the text on."""

_KEYS = ("prompt", "prompt_token_ids")


def open_prompt(prompt: object, name: str) -> tuple[Any, str | None]:
    """Return the text or token ids to run, and the text that a dict has in addition to token ids.

    Entries of a dict that are None count as absent. Anything but a dict is returned unchanged and unchecked.

    Raises:
        ValueError: a dict has other keys, neither text nor ids, or values of the wrong type; one line that begins
            with ``name``.
    """
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given:
        if key not in _KEYS:
            raise ValueError(
                f"{name} has the unsupported key {key!r}; keep only 'prompt' (text) or 'prompt_token_ids', "
                "and pass everything else as arguments of the call"
            )
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name}['prompt']={text!r} is not text; pass token ids as 'prompt_token_ids'")
    if token_ids is None:
        if text is None:
            raise ValueError(f"{name}={prompt!r} contains no prompt; pass 'prompt' (text) or 'prompt_token_ids'")
        return text, None
    if isinstance(token_ids, str | Mapping):
        raise ValueError(
            f"{name}['prompt_token_ids']={token_ids!r} is not a list of token ids; pass text as 'prompt'"
        )
    return token_ids, text
