"""Chooses tokens from logits for a whole batch: greedy, or drawn under each request's own parameters.

A draw inverts the cumulative distribution at one uniform number per row. With a seed, that number is a hash of the
seed and of the number of tokens the request has produced (SplitMix64, Steele et al., OOPSLA 2014). So batch mates,
chunking and preemption cannot change a draw, and there is no generator state to lose. One number per row is also
cheaper than the usual one per vocabulary entry, which a CPU draws serially.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.structured import apply_bitmask_
from ..requests.outputs import Logprob
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from ..structured.masks import MaskPool
from .logits_processor import LogitsProcessor
from .logprobs import ranked, report_logprobs
from .masked_rows import NO_MASKS, choose_masked

_WORK_ELEMENTS = 2**23  # logits processed at once; bounds temporary memory
_FIRST_CANDIDATES = 256  # of top-p; most nuclei are smaller; for the others, all tokens are searched
_INVERT_BLOCK = 64  # probabilities summed first to invert a distribution
_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Sampled tokens, one entry per row.

    Attributes:
        token_ids: the chosen tokens, -1 in failed rows.
        logprobs: if requested, token id → Logprob: the chosen token first, then the most likely ones.
        failed: True for rows without a valid choice: a NaN, +inf, or every token at -inf. With a grammar, only the
            tokens that it allows count.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    failed: list[int]


class Sampler:
    """Batched sampler; see ``SamplingParams`` for the meaning of each parameter.

    Order, as in vLLM: the mask of structured_outputs on the raw logits; allowed_token_ids, bad_words, min_tokens,
    logit_bias, repetition_penalty, frequency_penalty and presence_penalty (``LogitsProcessor``); then temperature,
    min_p, top_k, top_p. Reported log-probabilities are those of the raw logits.

    Args:
        eos_token_ids: the model's end-of-sequence ids, which ``min_tokens`` suppresses.
        seed: seed of the generator for requests without a seed; None takes one from torch's global generator.
    """

    def __init__(self, eos_token_ids: Sequence[int] = (), seed: int | None = None) -> None:
        self._generator = torch.Generator()
        self._generator.manual_seed(int(torch.randint(2**63 - 1, ())) if seed is None else seed)
        self._processor = LogitsProcessor(eos_token_ids)
        self._masks = MaskPool()

    @torch.inference_mode()
    def sample(self, logits: Tensor, requests: Sequence[Request], taken: Sequence[int] | None = None) -> SampleOutput:
        """Choose the next token of each request.

        Args:
            logits: ``[R, V]``, any float dtype; not modified.
            requests: requests whose next tokens are chosen.
            taken: row index of each request's last token; by default row i for ``requests[i]``.
        """
        if taken is None and logits.dim() == 2:
            taken = range(logits.shape[0])
        if taken is None or len(taken) != len(requests):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not match {len(requests)} requests; pass one row each"
            )
        masked = NO_MASKS
        if any([r.grammar is not None for r in requests]):
            masked = choose_masked(self._masks, logits, requests, taken)
            if len(masked.chosen) == len(requests):
                tokens = [masked.chosen[i] for i in range(len(requests))]
                return SampleOutput(tokens, [None] * len(tokens), [i for i, token in enumerate(tokens) if token < 0])
        batch = max(1, _WORK_ELEMENTS // logits.shape[1])
        best = torch.cat([_argmax(part) for part in logits.split(batch)]) if len(logits) else logits.argmax(-1)
        # argmax returns a NaN if there is one, so the peak alone shows whether the row is usable.
        usable = logits.gather(-1, best[:, None]).isfinite()[:, 0].tolist()
        likeliest = best.tolist()
        finite: list[bool] = [usable[row] for row in taken]
        tokens = [likeliest[row] for row in taken]
        logprobs: list[dict[int, Logprob] | None] = [None] * len(requests)
        for i, token in masked.chosen.items():
            tokens[i], finite[i] = token, token >= 0
        for i in masked.places:
            finite[i] = True  # until the allowed tokens are checked
        rows = [i for i, r in enumerate(requests) if finite[i] and not r.params.is_plain and i not in masked.chosen]
        for first in range(0, len(rows), batch):
            part = rows[first : first + batch]
            index = torch.tensor([taken[i] for i in part], device=logits.device)
            x = logits[index].float()
            chosen, reports = self._sample_rows(x, best[index], [requests[i] for i in part], masked.of(part))
            for i, token, report in zip(part, chosen, reports, strict=True):
                tokens[i], logprobs[i] = token, report
                finite[i] = token >= 0
        failed = [i for i, usable in enumerate(finite) if not usable]
        for i in failed:
            tokens[i] = -1
        return SampleOutput(tokens, logprobs, failed)

    @torch.inference_mode()
    def launch(self, logits: Tensor, requests: Sequence[Request], send: Callable[[Tensor], Tensor]) -> Tensor:
        """Sample without waiting for the device: the chosen tokens stay there.

        Args:
            logits: ``[R, V]``, any float dtype; not modified.
            requests: requests whose tokens are chosen, one per row. None of them changes logits, requests
                log-probabilities or has a grammar. ``num_output_placeholders`` counts as further tokens.
            send: moves a tensor from the host to the logits' device.

        Returns:
            ``[3, R]`` int64 on the logits' device: the tokens; 0 in failed rows, see ``SampleOutput``; 0 where the
            token may be wrong, because ``top_k`` and ``top_p`` reach beyond the first candidates.
        """
        batch = max(1, _WORK_ELEMENTS // logits.shape[1])
        best = torch.cat([_argmax(part) for part in logits.split(batch)])
        usable = logits.gather(-1, best[:, None]).isfinite()[:, 0]
        chosen, certain = best, torch.ones_like(usable)
        drawn = [i for i, r in enumerate(requests) if not r.params.is_greedy]
        for first in range(0, len(drawn), batch):
            part = drawn[first : first + batch]
            whole = len(part) == len(requests)
            index = send(torch.tensor(part))
            x = logits.float() if whole else logits[index].float()
            if x is logits:
                x = x.clone()
            x = x.masked_fill_(~(usable if whole else usable[index])[:, None], 0.0)
            tokens, settled = self._draw_once(x, [requests[i] for i in part], send)
            chosen = tokens if whole else chosen.index_copy(0, index, tokens)
            certain = settled if whole else certain.index_copy(0, index, settled)
        return torch.stack([chosen, usable.long(), certain.long()])

    def _sample_rows(
        self, x: Tensor, chosen: Tensor, requests: list[Request], masks: tuple[Tensor, Tensor] | None = None
    ) -> tuple[list[int], list[dict[int, Logprob] | None]]:
        """Sample from ``x``, ``[M, V]`` fp32 logits, overwritten; ``chosen``: their argmax; -1 without a choice."""
        params = [r.params for r in requests]
        report = [i for i, p in enumerate(params) if p.logprobs is not None]
        raw = x[torch.tensor(report, device=x.device)].log_softmax(-1) if report else x[:0]
        if masks is not None:
            apply_bitmask_(x, *masks)
        if masks is not None or any([p.changes_logits for p in params]):
            self._processor.apply(x, requests)
            chosen = _argmax(x)
        usable = x.gather(-1, chosen[:, None]).isfinite()
        x.masked_fill_(~usable, 0.0)  # keeps the arithmetic below defined; the result is discarded
        drawn = [i for i, p in enumerate(params) if not p.is_greedy]
        if drawn:
            index = torch.tensor(drawn, device=x.device)
            chosen[index] = self._draw_rows(
                x if len(drawn) == len(params) else x[index], [requests[i] for i in drawn]
            )
        tokens = [token if ok else -1 for token, ok in zip(chosen.tolist(), usable[:, 0].tolist(), strict=True)]
        reports: list[dict[int, Logprob] | None] = [None] * len(requests)
        if report:
            counts = [params[i].logprobs or 0 for i in report]
            entries = report_logprobs(raw, [max(tokens[i], 0) for i in report], counts)
            for i, entry in zip(report, entries, strict=True):
                reports[i] = entry if tokens[i] >= 0 else None
        return tokens, reports

    def _draw_once(
        self, x: Tensor, requests: list[Request], send: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Draw as ``_draw_rows`` from the first candidates only; also returns, ``[M]`` bool, where that is exact."""
        params, vocab = [r.params for r in requests], x.shape[1]
        probs = _probabilities(x, params, send)
        uniforms = send(self._uniforms(requests))
        cut = [p.cuts(vocab) for p in params]
        if not all(cut):
            chosen = _invert(probs, uniforms)
            if not any(cut):
                return chosen, torch.ones_like(chosen, dtype=torch.bool)
        tokens, settled = _choose_from_top(
            x,
            probs,
            send(_limits(params, vocab)),
            send(_nuclei(params)),
            uniforms,
            min(_first_count(params, vocab), vocab),
        )
        if all(cut):
            return tokens, settled
        those = send(torch.tensor(cut))
        return torch.where(those, tokens, chosen), settled | ~those

    def _draw_rows(self, x: Tensor, requests: list[Request]) -> Tensor:
        """Draw from ``x``: ``[M, V]`` penalized logits, overwritten → ``[M]`` int64."""
        params = [r.params for r in requests]
        vocab = x.shape[1]
        probs = _probabilities(x, params, lambda values: values.to(x.device))
        uniforms = self._uniforms(requests).to(x.device)
        cut = [p.cuts(vocab) for p in params]
        if not any(cut):
            return _invert(probs, uniforms)
        chosen = torch.empty(len(params), dtype=torch.int64, device=x.device)
        whole = torch.tensor([i for i, c in enumerate(cut) if not c], dtype=torch.int64, device=x.device)
        if len(whole):
            chosen[whole] = _invert(probs[whole], uniforms[whole])
        rows = torch.tensor([i for i, c in enumerate(cut) if c], device=x.device)
        top_k, top_p = _limits(params, vocab).to(x.device), _nuclei(params).to(x.device)
        count = _first_count(params, vocab)
        while len(rows):
            count = min(count, vocab)
            tokens, settled = _choose_from_top(x[rows], probs[rows], top_k[rows], top_p[rows], uniforms[rows], count)
            chosen[rows[settled]] = tokens[settled]
            rows = rows[~settled]
            count *= 16
        return chosen

    def _uniforms(self, requests: list[Request]) -> Tensor:
        """Return one number in [0, 1) per request, ``[M]`` fp64 on the CPU."""
        uniforms = torch.rand(
            sum(r.params.seed is None for r in requests), generator=self._generator, dtype=torch.float64
        )
        if len(uniforms) == len(requests):
            return uniforms
        unseeded = iter(uniforms.tolist())
        return torch.tensor(
            [
                next(unseeded)
                if r.params.seed is None
                else seeded_uniform(r.params.seed, r.num_output_tokens + r.num_output_placeholders)
                for r in requests
            ],
            dtype=torch.float64,
        )


def seeded_uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) that decides draw ``index`` of a request with ``seed``; 53 random bits."""

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return z ^ (z >> 31)

    return (mix(mix(seed & _MASK64) + index) >> 11) * 2.0**-53


def _probabilities(x: Tensor, params: Sequence[SamplingParams], send: Callable[[Tensor], Tensor]) -> Tensor:
    """Convert ``[M, V]`` logits, changed by temperature and min_p in place, to ``[M, V]`` probabilities."""

    def column(values: list[float]) -> Tensor:
        return send(torch.tensor(values))[:, None]

    # Subtracting first keeps tiny temperatures from overflowing.
    x -= x.amax(-1, keepdim=True)
    x /= column([p.temperature for p in params])
    if any(p.min_p for p in params):
        # The most likely token is at 0: exp(x) is the probability ratio that min_p refers to.
        x.masked_fill_(x < column([p.min_p for p in params]).log(), -torch.inf)
    return x.softmax(-1)


def _limits(params: Sequence[SamplingParams], vocab: int) -> Tensor:
    """Return, ``[M]`` int64, the number of likeliest tokens that top_k keeps."""
    return torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params])


def _nuclei(params: Sequence[SamplingParams]) -> Tensor:
    """Return top_p, ``[M]`` float64."""
    return torch.tensor([p.top_p for p in params], dtype=torch.float64)


def _first_count(params: Sequence[SamplingParams], vocab: int) -> int:
    """Return the number of candidates to search first; it may be above ``vocab``."""
    return max([_FIRST_CANDIDATES, *(p.top_k + 1 for p in params if p.top_k < vocab)])


def _argmax(x: Tensor) -> Tensor:
    """Return the argmax, ``[M, V]`` → ``[M]`` int64; the first of equal values, a NaN before everything else."""
    if x.device.type != "cpu" or type(x) is not Tensor:
        return x.float().argmax(-1)
    # numpy's is vectorized: 10 to 15 times faster than torch's on a row of 150,000.
    return torch.from_numpy(x.float().numpy().argmax(-1))


def _pass_fraction(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the cumulative weight passes ``fraction`` of its total: ``[M, K]``, ``[M, 1]`` → ``[M, 1]``.

    The result never points to a weight of 0. Also returns, ``[M, 1]`` fp64, how far into that entry the point is.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)
    own = weights.gather(-1, index).double()
    return index, ((target - (cumulative.gather(-1, index) - own)) / own).clamp(0.0, 1.0)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the entry that each uniform number in [0, 1) selects: ``[M, K]``, ``[M]`` → ``[M]`` int64."""
    if weights.shape[-1] <= 4 * _INVERT_BLOCK:
        return _pass_fraction(weights, uniforms[:, None])[0][:, 0]
    # First the block, then the entry in it: summing blocks is vectorized, cumsum is not.
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % _INVERT_BLOCK))
    blocks = blocks.view(len(weights), -1, _INVERT_BLOCK)
    block, rest = _pass_fraction(blocks.sum(-1), uniforms[:, None])
    entry, _ = _pass_fraction(blocks[torch.arange(len(weights), device=weights.device), block[:, 0]], rest)
    return (block * _INVERT_BLOCK + entry)[:, 0]


def _choose_from_top(
    x: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Draw under top_k and top_p from only the ``count`` most likely tokens of each row.

    Returns:
        ``[M]`` token ids, and ``[M]`` bool: True if searching further could not have changed the row's token.
    """
    values, ids = ranked(x, count)
    # A token whose probability underflowed cannot be drawn, and must not force a search of the whole row.
    weights = probs.gather(-1, ids).double()
    keep = (values >= values.gather(-1, top_k.clamp(max=count)[:, None] - 1)) & (weights > 0)
    limited = top_k < probs.shape[-1]
    needed = keep.sum(-1)
    cumulative = weights.where(keep, 0.0).cumsum(-1)
    total = cumulative[:, -1].where(limited, 1.0)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    keep &= (before < (top_p * total)[:, None]) | (before == 0)  # the likeliest one also with top_p=0
    # All relevant tokens must be above the last candidate, whose equals may be missing: with top_k the tokens that
    # it keeps, since top_p is relative to their sum, else those that top_p keeps.
    needed = needed.where(limited, keep.sum(-1))
    if count < x.shape[-1]:
        settled = values.gather(-1, needed[:, None].clamp(min=1) - 1)[:, 0] > values[:, -1]
    else:
        settled = torch.ones_like(limited)
    tokens = ids.gather(-1, _invert(weights.where(keep, 0.0), uniforms)[:, None])[:, 0]
    return tokens, settled
