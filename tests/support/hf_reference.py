"""What transformers itself answers: greedy tokens and log-probabilities of one prompt that runs alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation.

    Attributes:
        tokens: the chosen ids.
        logprobs: ``[len(tokens), V]`` float32, log-softmax of the logits that each was chosen from.
    """

    tokens: list[int]
    logprobs: torch.Tensor

    def largest_error(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> float:
        """Largest |difference| of reported log-probabilities, up to the first token that differs.

        Args:
            token_ids: the served tokens.
            logprobs: per token a dict of token id → object with ``.logprob``, as in ``CompletionOutput``.

        Returns:
            The error in nats; ``inf`` if something reported is not finite.
        """
        worst = 0.0
        for reported, served, expected, row in zip(logprobs, token_ids, self.tokens, self.logprobs, strict=False):
            for token_id, entry in reported.items():
                difference = abs(entry.logprob - float(row[token_id]))
                worst = max(worst, difference if math.isfinite(difference) else math.inf)
            if served != expected:
                break
        return worst


@torch.inference_mode()
def logits_of(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits ``[T, V]`` of one sequence from one forward pass without a cache, in the model's dtype.

    Positions 0..T-1 are given explicitly where the module takes them, as transformers' ``generate`` does.
    """
    positions = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions["position_ids"] = torch.arange(len(token_ids))[None]
    output = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, **positions)
    return (output.logits if hasattr(output, "logits") else output[0])[0]


def greedy_without_cache(model: Any, prompt: Sequence[int], max_tokens: int) -> Greedy:
    """The greedy continuation with all positions computed anew for every token."""
    ids, rows = list(prompt), []
    for _ in range(max_tokens):
        rows.append(logits_of(model, ids)[-1].float().log_softmax(-1))
        ids.append(int(rows[-1].argmax()))
    return Greedy(ids[len(prompt) :], torch.stack(rows))


def greedy_with_cache(model: Any, prompt: Sequence[int], max_tokens: int) -> Greedy:
    """The same from ``generate`` and its cache, for rotary frequencies that follow the sequence's length."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    rows = [logits[0].float().log_softmax(-1) for logits in output.logits]
    return Greedy(output.sequences[0, len(prompt) :].tolist(), torch.stack(rows))


def forced(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Greedy:
    """What transformers would have answered after each prefix of ``tokens``, from one forward pass.

    The tokens of the result equal ``tokens`` exactly if ``tokens`` is the greedy continuation, provided that
    the model is causal: then the logits of one position do not depend on what follows it.
    """
    logits = logits_of(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].float()
    return Greedy(logits.argmax(-1).tolist(), logits.log_softmax(-1))


def assert_served(model: Any, outputs: Sequence[Any], tolerance: float = 1e-4) -> None:
    """Assert that every completion has the tokens of transformers' module and log-probabilities within ``tolerance``
    nats of its own; the requests asked for log-probabilities."""
    for output in outputs:
        for completion in output.outputs:
            expected = forced(model, output.prompt_token_ids, completion.token_ids)
            assert completion.logprobs is not None
            assert expected.largest_error(completion.token_ids, completion.logprobs) < tolerance
            assert list(completion.token_ids) == expected.tokens
