"""Decoding the rows of one ``generate`` call on the engine, with transformers' semantics.

transformers works on a padded ``[rows, width]`` tensor that grows by one column per step. The engine runs each row on
its own; a column is assembled once every open row has its token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from .runtime.engine.engine import Engine
from .runtime.requests.sampling_params import SamplingParams
from .runtime.requests.validation import check_prompt

# What transformers' `generate` puts into model_kwargs by itself, and the engine has its own of.
_KNOWN_MODEL_KWARGS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
_CACHE_NAMES = {"past_key_values", "cache", "cache_params", "state", "mems", "past_buckets_states"}


class Unsupported(Exception):
    """The engine cannot run this call as transformers would; the message gives the reason."""


@dataclass(frozen=True)
class DecodingPlan:
    """One ``generate`` call in the engine's terms.

    Attributes:
        input_ids: ``[rows, width]`` int64, as given, padding included.
        prompts: the rows without their padding.
        sampling: arguments of :class:`SamplingParams` that all rows share.
        samples: sample tokens instead of decoding greedily.
        eos_token_ids: tokens that end a row; empty when nothing does.
        pad_token_id: fills rows that have ended.
        max_length: maximum width of a row, padding included.
        criteria: stopping criteria to evaluate after every column; None if there are only EOS and length, which the
            engine checks itself.
        pads_finished: pad rows that have ended. Without an EOS criterion, transformers continues them until all rows
            have ended.
    """

    input_ids: torch.LongTensor
    prompts: list[list[int]]
    sampling: dict[str, Any]
    samples: bool
    eos_token_ids: frozenset[int]
    pad_token_id: int
    max_length: int
    criteria: StoppingCriteriaList | None
    pads_finished: bool

    def row_params(self) -> list[SamplingParams]:
        """Parameters of each row.

        Each sampling row gets a seed from torch's global generator, so ``torch.manual_seed`` reproduces a call
        however the engine batches it.
        """
        rows = len(self.prompts)
        seeds = torch.randint(0, 2**63 - 1, (rows,)).tolist() if self.samples else [None] * rows
        return [SamplingParams(seed=seed, **self.sampling).with_own_ends() for seed in seeds]

    def check_fits(self, max_model_len: int) -> None:
        """Raise :class:`Unsupported` if a row could exceed the engine's ``max_model_len``."""
        longest = max(map(len, self.prompts)) + self.sampling["max_tokens"]
        if longest > max_model_len:
            raise Unsupported(
                f"a row may reach {longest} tokens and the engine's max_model_len is {max_model_len}; lower "
                "max_new_tokens, or give pagoda.compile a larger max_model_len or kv_cache_memory"
            )


def plan_decoding(
    input_ids: torch.LongTensor,
    logits_processor: list[Any],
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    mask_given: bool,
) -> DecodingPlan:
    """Convert the arguments of a decoding method of ``GenerationMixin.generate``.

    Args:
        input_ids: ``[rows, width]``.
        mask_given: the caller passed an attention_mask; otherwise transformers inferred it from the pad
            token.

    Raises:
        Unsupported: a processor, or a model argument, without a counterpart in the engine.
        ValueError: the attention_mask is not left padding.
    """
    rows, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    starts = _row_starts(mask, rows, mask_given)
    _check_model_kwargs(model_kwargs, starts, width)
    max_length = stopping_criteria.max_length or config.max_length
    eos = {int(t) for c in stopping_criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.reshape(-1)}
    trivial = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in stopping_criteria)
    max_tokens = max_length - width
    sampling = _sampling_arguments(logits_processor, starts, width, bool(config.do_sample))
    sampling["min_tokens"] = min(sampling["min_tokens"], max_tokens)
    sampling |= {"max_tokens": max_tokens, "stop_token_ids": sorted(t for t in eos if t >= 0)}
    pad = config._pad_token_tensor
    ids = input_ids.tolist()
    return DecodingPlan(
        input_ids=input_ids,
        prompts=[row[start:] for row, start in zip(ids, starts, strict=True)],
        sampling=sampling,
        samples=bool(config.do_sample),
        eos_token_ids=frozenset(eos),
        pad_token_id=int(pad) if pad is not None else 0,
        max_length=max_length,
        criteria=None if trivial else stopping_criteria,
        pads_finished=any(hasattr(c, "eos_token_id") for c in stopping_criteria),
    )


def decode_rows(engine: Engine, plan: DecodingPlan, streamer: Any | None) -> torch.LongTensor:
    """Run the plan; returns ``[rows, width + new]`` int64 on the device of the input.

    In any case, no request of the plan stays in the engine.

    Raises:
        ValueError: a row has a token id out of the vocabulary; the message names it.
        RuntimeError: a row ended in an error.
    """
    for row, prompt in enumerate(plan.prompts):
        check_prompt(prompt, None, engine.limits, f"input_ids[{row}]")
    columns = _Columns(plan)
    rows: dict[str, int] = {}
    ended: set[str] = set()
    try:
        rows = {name: row for row, name in enumerate(engine.submit_many(plan.prompts, plan.row_params()))}
        while not columns.finished and len(ended) < len(rows):
            for output in engine.step():
                row = rows[output.request_id]
                if output.request_id in ended:
                    continue
                completion = output.outputs[0]
                if output.finished:
                    ended.add(output.request_id)
                    if completion.finish_reason not in ("stop", "length"):
                        raise RuntimeError(f"row {row} of generate failed: {completion.error}")
                columns.tokens[row] = list(completion.token_ids)
            if plan.criteria is not None or streamer is not None:
                columns.advance(streamer)
                for request_id in [i for i, row in rows.items() if columns.closed(row) and i not in ended]:
                    engine.cancel(request_id)
                    ended.add(request_id)
    finally:
        for request_id in rows.keys() - ended:
            engine.cancel(request_id)
        while engine.has_unfinished():  # a cancelled request's last output is still to be fetched
            engine.step()
    if plan.criteria is None and streamer is None:
        columns.take_all()
    if streamer is not None:
        streamer.end()
    return columns.sequences()


class _Columns:
    """The growing ``[rows, new]`` block of tokens, column by column as transformers would have made it."""

    def __init__(self, plan: DecodingPlan) -> None:
        self.plan = plan
        self.tokens: list[list[int]] = [[] for _ in plan.prompts]
        self.finished = False
        self._open = [True] * len(plan.prompts)
        self._made: list[torch.Tensor] = []

    def advance(self, streamer: Any | None) -> None:
        """Assemble every complete column; stream it and evaluate the criteria."""
        plan = self.plan
        while not self.finished:
            at = len(self._made)
            needed = [row for row, is_open in enumerate(self._open) if is_open or not plan.pads_finished]
            if any(len(self.tokens[row]) <= at for row in needed):
                return
            column = torch.full((len(self.tokens),), plan.pad_token_id, dtype=torch.long)
            for row in needed:
                column[row] = self.tokens[row][at]
            column = column.to(plan.input_ids.device)
            self._made.append(column)
            self._close(column)
            self.finished = not any(self._open)
            if streamer is not None:
                streamer.put(column.cpu())

    def closed(self, row: int) -> bool:
        """Whether this row needs no further token."""
        return self.finished or (self.plan.pads_finished and not self._open[row])

    def _close(self, column: torch.Tensor) -> None:
        plan = self.plan
        if plan.criteria is not None:
            done = plan.criteria(self.sequences(), None).tolist()
        else:
            at_end = plan.input_ids.shape[1] + len(self._made) >= plan.max_length
            done = [at_end or token in plan.eos_token_ids for token in column.tolist()]
        self._open = [is_open and not is_done for is_open, is_done in zip(self._open, done, strict=True)]

    def take_all(self) -> None:
        """All rows at once, right-padded; for a plan that the engine ended by itself."""
        width = max(len(tokens) for tokens in self.tokens)
        padded = [tokens + [self.plan.pad_token_id] * (width - len(tokens)) for tokens in self.tokens]
        self._made = list(torch.tensor(padded, dtype=torch.long, device=self.plan.input_ids.device).unbind(1))

    def sequences(self) -> torch.LongTensor:
        """``[rows, width + columns]``: the input and the columns assembled so far."""
        return torch.cat([self.plan.input_ids, torch.stack(self._made, dim=1)], dim=1)  # type: ignore[return-value]


def _row_starts(mask: torch.Tensor | None, rows: int, mask_given: bool) -> list[int]:
    """The start of each row's prompt, from a ``[rows, width]`` mask of 0 and 1."""
    if mask is None:
        return [0] * rows
    kept = mask != 0
    starts = kept.int().argmax(dim=1)
    is_left_padding = kept == (torch.arange(mask.shape[1], device=mask.device)[None, :] >= starts[:, None])
    bad = (~(is_left_padding.all(dim=1) & kept.any(dim=1))).nonzero().reshape(-1).tolist()
    if bad and not mask_given:
        raise Unsupported(
            "a prompt contains the pad token, which transformers masks without an attention_mask; pass one"
        )
    if bad:
        row = bad[0]
        what = "has holes or right padding" if bool(kept[row].any()) else "masks every token"
        raise ValueError(
            f"attention_mask[{row}] {what}; pad on the left (tokenizer.padding_side='left'), so that each "
            "row is zeros, then ones"
        )
    return starts.tolist()


def _check_model_kwargs(model_kwargs: dict[str, Any], starts: list[int], width: int) -> None:
    for name, value in model_kwargs.items():
        if name in _KNOWN_MODEL_KWARGS or name in _CACHE_NAMES or value is None or value is False:
            continue
        raise Unsupported(f"the engine does not support {name}")
    positions = model_kwargs.get("position_ids")
    if positions is None:
        return
    for row, start in enumerate(starts):
        # Positions have one row when they are the same for all.
        own = positions[row if positions.shape[0] > 1 else 0][..., start:]
        if not torch.equal(own, torch.arange(width - start, device=own.device, dtype=own.dtype).expand_as(own)):
            raise Unsupported("position_ids other than 0, 1, 2, … of each row are not supported by the engine")


def _sampling_arguments(processors: list[Any], starts: list[int], width: int, do_sample: bool) -> dict[str, Any]:
    """The processors that transformers built, as arguments of :class:`SamplingParams`.

    Args:
        starts: number of padding tokens before each row's prompt.
        width: number of tokens in each row, padding included.
    """
    arguments: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0, "min_tokens": 0}
    for processor in processors:
        kind = type(processor)
        if kind is logits_process.RepetitionPenaltyLogitsProcessor:
            ignored = processor.prompt_ignore_length
            left_out = ignored.tolist() if isinstance(ignored, torch.Tensor) else [ignored or 0] * len(starts)
            if left_out != starts:
                # transformers before 5.23 leaves no padding out.
                raise Unsupported(
                    "the engine's repetition_penalty counts all prompt tokens and no padding; transformers' counts "
                    "padding here, or ignores part of the prompt (prompt_ignore_length)"
                )
            arguments["repetition_penalty"] = processor.penalty
        elif kind is logits_process.MinLengthLogitsProcessor:
            arguments["min_tokens"] = max(arguments["min_tokens"], processor.min_length - width)
        elif kind is logits_process.MinNewTokensLengthLogitsProcessor:
            arguments["min_tokens"] = max(arguments["min_tokens"], processor.min_new_tokens)
        elif kind is logits_process.TemperatureLogitsWarper:
            arguments["temperature"] = processor.temperature
        elif kind is logits_process.TopKLogitsWarper:
            arguments["top_k"] = processor.top_k
        elif kind is logits_process.TopPLogitsWarper and processor.top_p > 0:
            arguments["top_p"] = processor.top_p
        elif kind is logits_process.MinPLogitsWarper:
            arguments["min_p"] = processor.min_p
        else:
            raise Unsupported(f"the engine has no counterpart of transformers' {kind.__name__}")
    if "min_p" in arguments and "top_p" in arguments:
        raise Unsupported("transformers applies min_p after top_p, the engine before top_p")
    return arguments
