"""``pagoda generate --beam-width``: checks its options and prints its texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.requests.beam_search_params import BeamSearchParams
    from ..runtime.requests.outputs import BeamSearchOutput, RequestOutput
    from .generate import GenerateOptions

_ALLOWED = ("max_tokens", "ignore_eos", "n")


def beam_params(own: GenerateOptions, max_tokens: int, names: Sequence[str]) -> BeamSearchParams | None:
    """Parameters of the search; None without a beam search.

    Args:
        own: options of the command.
        max_tokens: maximum new tokens per beam.
        names: all sampling options.

    Raises:
        ValueError: an option conflicts with these; the message names it.
    """
    width, penalty = own.beam_width, own.length_penalty
    if width is None:
        if penalty is not None:
            raise ValueError("--length-penalty requires --beam-width")
        return None
    for name in names:
        if name not in _ALLOWED and getattr(own, name) != getattr(type(own), name):
            raise ValueError(
                f"--{name.replace('_', '-')} conflicts with --beam-width {width}, which uses the model's "
                "probabilities alone; omit one of them"
            )
    from ..runtime.requests.beam_search_params import BeamSearchParams

    params = BeamSearchParams(
        width, max_tokens, ignore_eos=own.ignore_eos, length_penalty=1.0 if penalty is None else penalty
    )
    if own.n > width:
        raise ValueError(f"--n {own.n} is above --beam-width {width}; raise the width")
    return params


def best_texts(output: BeamSearchOutput, count: int) -> tuple[RequestOutput, list[float]]:
    """The best texts as completions, with their scores; for a failed search, its error."""
    from ..runtime.requests.outputs import CompletionOutput, RequestOutput

    best = output.sequences[:count]
    completions = [
        CompletionOutput(place, text.text, text.token_ids, finish_reason=text.finish_reason)
        for place, text in enumerate(best)
    ]
    if output.error is not None:
        completions = [CompletionOutput(0, "", [], finish_reason="error", error=output.error)]
    found = RequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        completions,
        True,
        output.metrics,
        num_cached_tokens=output.num_cached_tokens,
    )
    return found, [] if output.error is not None else [text.score for text in best]
