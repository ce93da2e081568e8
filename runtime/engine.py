"""The engine: prompts in, completions out, over a compiled program; three ways to ask for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from .batcher import Batcher
from .block_manager import BlockManager
from .detokenizer import Detokenizer, Tokenizer
from .engine_core import EngineCore
from .kv_cache import allocate_kv_cache, default_num_blocks
from .outputs import EngineStats, Progress, RequestOutput, StreamPiece
from .program import Program
from .request import Request
from .runner import Runner
from .sampler import Logprob, Sampler
from .sampling_params import SamplingParams
from .submission import Completion, Submission
from .validation import CheckedPrompt, Prompt, PromptLimits, check_batch, check_params, check_prompt

logger = logging.getLogger(__name__)


class Engine:
    """Serves prompts from one compiled program: ``generate`` a batch, ``stream`` one, or ``submit`` and
    ``step``.

    The three can be mixed; every prompt in the engine shares its steps with the others. Not thread-safe: one
    thread calls it. An exception or Ctrl-C may leave any method at any point; what it interrupted is undone
    before the next use: a request keeps the tokens that it has and is recomputed, except those of an
    interrupted ``generate`` or ``stream``, which are dropped and their blocks freed.

    Args:
        program: the compiled model.
        tokenizer: a HuggingFace tokenizer; without one prompts are token ids and outputs have no text.
        block_size: tokens per block of the KV cache.
        num_blocks: blocks in it; None: ``default_num_blocks``.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens in one step; may be smaller than a prompt.
        max_model_len: most tokens of prompt and output together; None: what the model and the cache can hold.
        eos_token_ids: ids that end a completion.

    Raises:
        ValueError: an argument is out of range, or ``max_model_len`` exceeds the model or the cache.
    """

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("num_blocks", num_blocks),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} is not a whole number >= 1; use a positive one")
        longest = program.max_model_len
        if max_model_len is not None and longest is not None and max_model_len > longest:
            raise ValueError(f"max_model_len={max_model_len} is above the model's {longest}; lower it")
        if num_blocks is None:
            num_blocks = default_num_blocks(program.caches, block_size, max_num_seqs, max_model_len or longest)
        capacity = num_blocks * block_size
        if max_model_len is not None and max_model_len > capacity:
            raise ValueError(
                f"max_model_len={max_model_len} is above the {capacity} tokens that the KV cache holds "
                f"(num_blocks={num_blocks} of {block_size}); lower it or give the cache more memory"
            )
        reason = "raise max_model_len"
        if max_model_len is None:
            max_model_len = capacity if longest is None else min(longest, capacity)
            reason = "use a model with a longer context"
            if max_model_len == capacity:
                reason = "give the KV cache more memory (num_blocks or kv_cache_memory)"
            logger.info("max_model_len=%d (model: %s, KV cache: %d tokens)", max_model_len, longest, capacity)
        elif max_model_len == longest:
            reason = "use a model with a longer context"

        self.tokenizer = tokenizer
        self.limits = PromptLimits(program.vocab_size, max_model_len, reason)
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        self.block_manager = BlockManager(num_blocks, block_size)
        self.batcher = Batcher(self.block_manager, max_num_seqs, max_num_batched_tokens, max_model_len)
        spare = program.reserve(max_num_seqs, max_num_batched_tokens, max_model_len)
        cache = allocate_kv_cache(program.caches, num_blocks + spare, block_size, program.device)
        self.runner = Runner(program, cache, block_size, max_num_seqs, max_model_len)
        self.sampler = Sampler(sorted(self.eos_token_ids))
        self._core = EngineCore(self.batcher, self.runner, self.sampler)
        self._next_id = 0

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.limits.max_model_len

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt; ``step`` runs it.

        Returns:
            Its id: ``request_id``, or a new one.

        Raises:
            ValueError: the prompt, the parameters or the id is refused; nothing else is affected.
        """
        checked = check_prompt(prompt, self.tokenizer, self.limits)
        submission = self._prepare(
            checked, check_params(sampling_params, self.tokenizer), request_id, is_private=False
        )
        self._core.add([submission])
        return submission.request_id

    def step(self) -> list[RequestOutput]:
        """Run one model step and return the requests of ``submit`` that progressed or ended.

        Each output holds everything up to now; the last one of a request has ``finished`` set and comes once.
        """
        core = self._core
        core.run_step()
        with core.change:
            outputs = [self._output(submission) for submission in core.news.values()]
            for submission in core.news.values():
                if submission.is_finished:
                    core.submissions.pop(submission.request_id, None)
        core.news = {}  # last: whatever is interrupted before this is returned by the next call
        return outputs

    def cancel(self, request_id: str) -> bool:
        """End a waiting or running request and free its blocks; its last output comes with the next ``step``.

        Returns:
            Whether there was an unfinished request of that id.
        """
        with self._core.change:
            submission = self._core.submissions.get(request_id)
            if submission is None or submission.is_finished:
                return False
            for completion in submission.completions:
                self._core.end(completion, "cancelled")
            return True

    def has_unfinished(self) -> bool:
        """Whether another ``step`` has something to run or to return."""
        return bool(self._core.news or self._core.completions)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete a batch of prompts.

        Args:
            prompts: a prompt or a list of them; every one is checked before any runs.
            sampling_params: for all prompts, or one per prompt.
            on_step: called after each model step.

        Returns:
            One output per prompt, in their order. A prompt that failed while it ran has
            ``finish_reason="error"`` and the reason in ``error``.

        Raises:
            ValueError: a prompt or its parameters are refused; the message names the index.
        """
        core = self._core
        checked = check_batch(prompts, sampling_params, self.tokenizer, self.limits)
        batch = [self._prepare(prompt, entry, None, is_private=True) for prompt, entry in checked]
        try:
            core.add(batch)
            unfinished = set(batch)
            before = core.num_generated_tokens
            while unfinished:
                own = [submission for submission in core.run_step() if submission in unfinished]
                # Without progress of ours, somebody else's step or a cancel may have ended some.
                unfinished.difference_update([s for s in own or batch if s.is_finished])
                if on_step is not None:
                    generated = core.num_generated_tokens - before
                    on_step(Progress(len(batch) - len(unfinished), len(batch), generated))
            with core.change:
                return [self._output(submission) for submission in batch]
        finally:
            core.drop(batch)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """Complete one prompt and yield its tokens as they come; leaving the loop early cancels it.

        Other requests in the engine progress with it.

        Raises:
            ValueError: the prompt or the parameters are refused, at once and not with the first piece.
        """
        checked = check_prompt(prompt, self.tokenizer, self.limits)
        return self._stream(checked, check_params(sampling_params, self.tokenizer))

    def stats(self) -> EngineStats:
        """Figures since the engine was made."""
        blocks = self.block_manager.stats()
        return EngineStats(
            num_running=self.batcher.num_running,
            num_waiting=self.batcher.num_waiting,
            num_blocks=self.block_manager.num_blocks,
            num_free_blocks=self.block_manager.num_free_blocks,
            peak_used_blocks=int(blocks["blocks_used_peak"]),
            block_size=self.block_manager.block_size,
            num_steps=self._core.num_steps,
            num_computed_tokens=self._core.num_computed_tokens,
            num_generated_tokens=self._core.num_generated_tokens,
            num_preemptions=self.batcher.num_preemptions,
            num_failed=self._core.num_failed,
            model_seconds=self._core.model_seconds,
            total_seconds=self._core.total_seconds,
        )

    def _stream(self, prompt: CheckedPrompt, params: SamplingParams) -> Iterator[StreamPiece]:
        core = self._core
        submission = self._prepare(prompt, params, None, is_private=True)
        may_be_nested = False
        try:
            core.add([submission])
            while True:
                finished = submission.is_finished
                for completion in submission.completions:
                    with core.change:
                        piece = completion.next_piece()
                        self._end_undecodable(completion)
                    if piece is not None:
                        yield piece
                if finished:
                    return
                core.run_step()
        except GeneratorExit:
            may_be_nested = True
            raise
        finally:
            core.drop([submission], may_be_nested=may_be_nested)

    def _output(self, submission: Submission) -> RequestOutput:
        """Everything up to now; a completion whose text cannot be given ends with an error."""
        output = submission.output()
        if any([self._end_undecodable(completion) for completion in submission.completions]):
            output = submission.output()
        return output

    def _end_undecodable(self, completion: Completion) -> bool:
        if completion.text_error is None or completion.is_finished:
            return False
        self._core.end(completion, "error", completion.text_error)
        return True

    def _prepare(
        self, prompt: CheckedPrompt, params: SamplingParams, request_id: str | None, *, is_private: bool
    ) -> Submission:
        if request_id is None:
            request_id = str(self._next_id)
            while request_id in self._core.submissions:
                self._next_id += 1
                request_id = str(self._next_id)
            self._next_id += 1
        elif not isinstance(request_id, str) or "\0" in request_id:
            raise ValueError(f"request_id={request_id!r} is not plain text; choose another, or leave it out")
        elif request_id in self._core.submissions:
            raise ValueError(f"request_id={request_id!r} is in use; choose another, or leave it out")
        submission = Submission(request_id, prompt.text, prompt.token_ids, time.perf_counter(), is_private)
        for index in range(params.n):
            own = params.completion(index)
            # No caller's id holds a zero.
            child_id = request_id if params.n == 1 else f"{request_id}\0{index}"
            request = Request(child_id, prompt.token_ids, own, arrival_time=submission.arrival_time)
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = Detokenizer(self.tokenizer, prompt.token_ids, own.stop_strings)
            eos: Collection[int] = () if own.ignore_eos else self.eos_token_ids
            logprobs: list[dict[int, Logprob]] | None = None if own.logprobs is None else []
            submission.completions.append(
                Completion(submission, request, index, self.max_model_len, eos, detokenizer, logprobs)
            )
        return submission
