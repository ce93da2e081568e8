"""Converts fields of a request to ``SamplingParams`` and ``RequestOptions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...runtime.requests.request_limits import MAX_PRIORITY
from ...runtime.requests.sampling_params import SamplingParams
from ..http.errors import from_value_error, refuse
from ..settings import Settings
from .fields import GenerationBody
from .structured import structured_outputs

_SAME_NAME = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids"),
    *("n", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output"),
)
"""Fields with the same name in ``SamplingParams``."""


def sampling_params(
    body: GenerationBody, defaults: Mapping[str, Any], settings: Settings, *, max_tokens: int | None, **changes: Any
) -> dict[str, Any]:
    """Values for ``Submit.params``, validated.

    Args:
        body: the request's body.
        defaults: the checkpoint's recommendations; the request overrides them.
        settings: the server's limits.
        max_tokens: the limit; None: the rest of the context.
        changes: parameters that the kind of request sets; None: unchanged.

    Raises:
        ApiError: 400.
    """
    body.check_common()
    params = dict(defaults)
    for name in _SAME_NAME:
        if (value := getattr(body, name)) is not None:
            params[name] = value
    if (biases := body.biases()) is not None:
        params["logit_bias"] = biases
    params |= {name: value for name, value in changes.items() if value is not None}
    params["max_tokens"] = max_tokens
    for name in ("logprobs", "prompt_logprobs"):
        if (params.get(name) or 0) > settings.max_logprobs:
            refuse(name, f"{name}={params[name]} exceeds the limit of {settings.max_logprobs}; request fewer")
    for name in ("n", "best_of"):
        if (params.get(name) or 1) > settings.max_n:
            refuse(name, f"{name}={params[name]} exceeds the limit of {settings.max_n}; request fewer")
    if (constraint := structured_outputs(body)) is not None:
        params["structured_outputs"] = constraint
    try:
        SamplingParams(**params)
    except ValueError as error:
        raise from_value_error(error) from error
    return params


def request_options(body: GenerationBody, settings: Settings, key_name: str | None) -> dict[str, Any]:
    """Values for ``Submit.options``.

    Raises:
        ApiError: 400.
    """
    # Users of different keys are different clients: nobody sees what drafts the other's answers make.
    options: dict[str, Any] = {"client": "\0".join(name for name in (key_name, body.user) if name)}
    if body.priority is not None:
        if abs(body.priority) > MAX_PRIORITY:
            refuse("priority", f"priority={body.priority} is out of range; use {-MAX_PRIORITY} to {MAX_PRIORITY}")
        options["priority"] = body.priority
    limits = [seconds for seconds in (body.timeout, settings.request_timeout) if seconds is not None]
    if limits:
        options["deadline"] = min(limits)
    salt = body.cache_salt or ""
    if settings.isolate_keys and key_name is not None:
        salt = f"{key_name}\0{salt}"
    if salt:
        options["cache_salt"] = salt
    return options
