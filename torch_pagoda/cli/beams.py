"""``pagoda generate --beam-width``: which options go with it, and how its texts are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.requests.beam_search_params import BeamSearchParams
    from ..runtime.requests.outputs import BeamSearchOutput, RequestOutput

_ALLOWED = ("max_tokens", "ignore_eos", "n")


def beam_params(
    beam_width: int | None, length_penalty: float | None, sampling: Mapping[str, Any], defaults: Mapping[str, Any]
) -> BeamSearchParams | None:
    """Parameters of the search; None where no beam search is asked for.

    Args:
        beam_width: what ``--beam-width`` was given.
        length_penalty: what ``--length-penalty`` was given.
        sampling: option → value, of all options that say how to choose tokens.
        defaults: option → its value when it is not given; None for options that are not named.

    Raises:
        ValueError: an option was given that does not go with these; the message names it.
    """
    if beam_width is None:
        if length_penalty is not None:
            raise ValueError(f"--length-penalty {length_penalty:g} ranks beams; add --beam-width, or leave it out")
        return None
    for name, value in sampling.items():
        if name not in _ALLOWED and value != defaults.get(name):
            raise ValueError(
                f"--{name.replace('_', '-')} does not go with --beam-width {beam_width}, which chooses by the "
                "model's probabilities alone; leave one of them out"
            )
    from ..runtime.requests.beam_search_params import BeamSearchParams

    params = BeamSearchParams(
        beam_width,
        sampling["max_tokens"],
        ignore_eos=sampling["ignore_eos"],
        length_penalty=1.0 if length_penalty is None else length_penalty,
    )
    if sampling["n"] > beam_width:
        raise ValueError(f"--n {sampling['n']} is above --beam-width {beam_width}; raise the width")
    return params


def best_texts(output: BeamSearchOutput, count: int) -> tuple[RequestOutput, list[float]]:
    """The best texts as completions, with their scores; of a search that failed, its error in place of them."""
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
