"""Log-probabilities of tokens: sampled tokens, prompt tokens, and the most likely tokens of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..requests.outputs import Logprob

_WORK_ELEMENTS = 2**23  # logits processed at once; bounds temporary memory


def ranked(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest values of each row and their ids, largest first, equal ones by ascending id.

    If values tie at the very end, it is arbitrary which are included, unless the whole row is requested.
    """
    if count >= x.shape[-1]:
        return x.sort(dim=-1, descending=True, stable=True)
    values, ids = x.topk(count, sorted=False)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def report_logprobs(raw: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> Iterator[dict[int, Logprob]]:
    """Yield one entry per row: the row's token, then its most likely ones, by rank.

    Args:
        raw: ``[M, V]`` fp32 log-probabilities.
        tokens: M token ids.
        counts: number of likely tokens to report for each row.
    """
    vocab = raw.shape[1]
    most = min(max(counts), vocab)
    own = raw.gather(-1, torch.tensor(tokens, device=raw.device)[:, None])[:, 0].tolist()
    values, ids = ranked(raw, min(most + 32, vocab))
    if most and bool((values[:, most - 1] == values[:, -1]).any()):
        values, ids = ranked(raw, vocab)
    columns = zip(tokens, own, counts, values.tolist(), ids.tolist(), strict=True)
    for row, (token, logprob, wanted, top_values, top_ids) in enumerate(columns):
        if logprob > top_values[-1] or len(top_ids) == vocab:
            rank = top_ids.index(token) + 1
        else:
            above = torch.count_nonzero(raw[row] > logprob)
            rank = 1 + int(above + torch.count_nonzero(raw[row, :token] == logprob))
        entry = {token: Logprob(logprob, rank)}
        for place, (i, value) in enumerate(zip(top_ids[:wanted], top_values[:wanted], strict=True), 1):
            if i != token:
                entry[i] = Logprob(value, place)
        yield entry


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, prompt_token_ids: Sequence[int], start: int, count: int
) -> list[dict[int, Logprob]]:
    """Return log-probabilities of a part of a prompt.

    Args:
        logits: ``[C, V]``, any float dtype: the rows of prompt positions ``start`` to ``start + C - 1``.
        prompt_token_ids: the whole prompt.
        start: position of the first row.
        count: number of likely tokens to report in addition to the prompt's own.

    Returns:
        The entries of positions ``start + 1`` to ``start + C``, one less if the prompt ends in this part.

    Raises:
        ValueError: the rows are not within the prompt.
    """
    if logits.dim() != 2 or not 0 <= start <= len(prompt_token_ids) - len(logits):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} from start={start} on do not match a prompt of "
            f"{len(prompt_token_ids)} tokens; pass the rows of one chunk of the prompt"
        )
    tokens = [int(token) for token in prompt_token_ids[start + 1 : start + 1 + len(logits)]]
    batch = max(1, _WORK_ELEMENTS // logits.shape[1])
    entries: list[dict[int, Logprob]] = []
    for first in range(0, len(tokens), batch):
        part = tokens[first : first + batch]
        raw = logits[first : first + len(part)].float().log_softmax(-1)
        entries += report_logprobs(raw, part, [count] * len(part))
    return entries


class PromptLogprobs:
    """Collects a prompt's log-probabilities chunk by chunk; recomputed positions are skipped.

    Args:
        prompt_token_ids: the whole prompt.
        count: number of likely tokens to report in addition to the prompt's own.
    """

    def __init__(self, prompt_token_ids: Sequence[int], count: int) -> None:
        self.entries: list[dict[int, Logprob] | None] = [None]
        """One entry per position known so far; None for the first token, which has no predecessor."""
        self._prompt = prompt_token_ids
        self._count = count

    @property
    def is_complete(self) -> bool:
        """True if every position of the prompt has its entry."""
        return len(self.entries) == len(self._prompt)

    def add(self, logits: Tensor, start: int) -> None:
        """Add the rows ``[C, V]`` of prompt positions ``start`` to ``start + C - 1``.

        Raises:
            ValueError: rows before ``start`` are missing.
        """
        known = len(self.entries) - 1  # rows added so far
        if start > known:
            raise ValueError(f"start={start} skips rows from {known} on; pass the chunks of a prompt in order")
        if start + len(logits) > known and not self.is_complete:
            self.entries += prompt_logprobs(logits[known - start :], self._prompt, known, self._count)


@torch.inference_mode()
def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of each row, for beam search.

    Args:
        logits: ``[M, V]``, any float dtype.
        count: number of tokens; all of them if V is smaller.

    Returns:
        ``[M, count]`` int64 token ids and ``[M, count]`` fp32 log-probabilities, most likely first.
    """
    values, ids = ranked(logits.float().log_softmax(-1), min(count, logits.shape[-1]))
    return ids, values
