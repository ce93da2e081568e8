"""Parameters of a beam search; the names are vLLM's and HuggingFace's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .checks import check_bool, real_number, whole_number
from .request_limits import MAX_COMPLETIONS


@dataclass(frozen=True)
class BeamSearchParams:
    """Width, length and scoring of a beam search.

    Attributes:
        beam_width: number of beams kept, and the most texts returned.
        max_tokens: most tokens to generate, >= 1; None: until the context is full.
        ignore_eos: go on after the model's end-of-sequence token.
        length_penalty: the sum of a text's log-probabilities is divided by its number of generated tokens to this
            power: 0 compares the sums, 1 the means; larger values favor long texts, negative ones short texts.
            In [-7, 7], the range in which fp32 scores of 100,000 tokens stay finite.
        early_stopping: when ``beam_width`` texts are finished: True ends the search; False ends it when no live
            beam, had it ended now, would be among them; "never" only when none could be later (this differs from
            False for a positive ``length_penalty``).

    Raises:
        ValueError: a value is out of range; the message names argument, value and remedy.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put(
            "beam_width",
            whole_number("beam_width", self.beam_width, 1, "keep at least one beam", highest=MAX_COMPLETIONS),
        )
        if self.max_tokens is not None:
            remedy = "generate at least one token, or use None to fill the context"
            put("max_tokens", whole_number("max_tokens", self.max_tokens, 1, remedy))
        check_bool("ignore_eos", self.ignore_eos)
        remedy = "use 0.0 to compare sums of log-probabilities"
        put("length_penalty", real_number("length_penalty", self.length_penalty, -7, 7, remedy))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping={self.early_stopping!r} is unknown; use True, False or "never"')
