"""The engine: prompts in, completions out, over a compiled program; three ways to ask for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import proxy

from ..autocast import without_autocast
from ..batching import Batcher, Batches, PreemptionCost, make_policy
from ..blocks import BlockManager
from ..cache.block_copier import BlockCopier
from ..cache.cache_specs import bytes_per_block, bytes_per_slot
from ..cache.kv_cache import allocate_kv_cache
from ..cache.pool_plan import blocks_by_group
from ..cache.state_pool import snapshot_interval
from ..memory import keep_freed_memory
from ..profiling.profile import Profile
from ..program import Program
from ..requests.beam_search_params import BeamSearchParams
from ..requests.detokenizer import Tokenizer
from ..requests.outputs import BeamSearchOutput, Progress, RequestOutput, StreamPiece
from ..requests.prompt_forms import Prompt
from ..requests.request_options import RequestOptions
from ..requests.sampling_params import SamplingParams
from ..requests.validation import (
    CheckedPrompt,
    PromptLimits,
    check_batch,
    check_beam_batch,
    check_params,
    check_prompt,
)
from ..sampling.beam_search import BeamSearch
from ..sampling.sampler import Sampler
from ..shown import shown
from ..structured.grammar import Grammar, compile_grammar, is_compiled
from ..structured.vocabulary import Vocabulary, prepare_vocabulary, vocabulary_of
from .beam_submission import BeamSubmission, bounded
from .cache_setup import block_groups, key_variant, longest_sequence
from .core import EngineCore
from .engine_options import DEFAULT_BLOCK_SIZE, EngineOptions
from .look_ahead import LookAhead
from .model_runner import ModelRunner
from .pieces import end_undecodable, new_pieces
from .state import EngineState
from .step_runner import StepRunner
from .submission import Submission

logger = logging.getLogger(__name__)

DEFAULT_OPTIONS = RequestOptions()

Result = TypeVar("Result")
AnySubmission = TypeVar("AnySubmission", bound=Submission)


class Engine:
    """Serves prompts from one compiled program: ``generate`` a batch, ``stream`` one, or ``submit`` and
    ``step``.

    The three can be mixed; every prompt in the engine shares its steps with the others. An exception or Ctrl-C
    may leave any method at any point; what it interrupted is undone before the next use: a request keeps the
    tokens that it has and is recomputed, except those of an interrupted ``generate`` or ``stream``, which are
    dropped and their blocks freed.

    Any number of threads may call it. They take turns, in the order in which they ask; a turn is at most one step.
    So calls of ``generate`` in two threads run in one batch, and a ``submit`` or ``cancel`` waits for the step that
    is under way, not for the calls of others. Callbacks run between the turns and may call the engine; what runs
    within a step (a hook of the model, a signal handler) may not, and gets a RuntimeError. So does a process that was
    forked after the engine was made.

    Args:
        program: the compiled model.
        tokenizer: a HuggingFace tokenizer; without one prompts are token ids and outputs have no text.
        eos_token_ids: ids that end a completion.
        free_memory: bytes that the KV cache may take where the options do not size it; None: see
            ``default_num_blocks``.
        batches: to form batches that run to their end, for comparison; None: continuous batching.
        before_step: called where a step is about to be planned.
        sizes: of the KV cache and of steps, and how to schedule: the fields of ``EngineOptions``.

    Raises:
        ValueError: one of them is out of range, or does not fit the others, the model or the device.
    """

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        free_memory: int | None = None,
        batches: Batches | None = None,
        before_step: Callable[[], None] = lambda: None,
        **sizes: Any,
    ) -> None:
        options = EngineOptions(**sizes)
        longest = program.max_model_len
        if options.max_model_len is not None and longest is not None and options.max_model_len > longest:
            raise ValueError(f"max_model_len={options.max_model_len} is above the model's {longest}; lower it")
        block_size = options.block_size or program.block_size or DEFAULT_BLOCK_SIZE
        counts = blocks_by_group(
            program.caches,
            block_size,
            num_blocks=options.num_blocks,
            memory=options.cache_bytes,
            free_memory=free_memory,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len or longest,
        )
        groups = block_groups(program, counts, block_size, options)
        self.block_manager = BlockManager(groups, block_size, enable_prefix_caching=options.enable_prefix_caching)
        max_model_len, reason = longest_sequence(self.block_manager, options.max_model_len, longest)

        self.tokenizer = tokenizer
        self.limits = PromptLimits(program.vocab_size, max_model_len, reason)
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        cost = PreemptionCost(bytes_per_block(program.caches, 1), state_bytes=bytes_per_slot(program.caches))
        self.batcher = Batcher(
            self.block_manager,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            max_model_len,
            policy=make_policy(options.policy),
            preemption=options.preemption,
            cost=cost,
            max_queue=options.max_queue,
            batches=batches,
            snapshot_interval=snapshot_interval(program.caches, block_size),
            key_variant=partial(key_variant, proxy(program)),  # the runner keeps it, until the engine is shut down
        )
        spare = program.reserve(options.max_num_seqs, options.max_num_batched_tokens, max_model_len)
        cache = allocate_kv_cache(program.caches, [count + spare for count in counts], block_size, program.device)
        stored = [group.num_host_blocks for group in groups]
        host = allocate_kv_cache(program.caches, stored, block_size) if min(stored) else []
        self.runner = ModelRunner(program, cache, block_size, options.max_num_seqs, max_model_len)
        if options.npu_warmup == "full" and (warm_up := getattr(program, "warm_up", None)) is not None:
            with without_autocast(program.device.type):
                warm_up()
        self.sampler = Sampler(sorted(self.eos_token_ids))
        copier = BlockCopier(cache, host, [spec.group for spec in program.caches])
        state = EngineState(self.batcher, self.runner, cost)
        runs_ahead = program.device.type == "npu" if options.async_scheduling is None else options.async_scheduling
        steps = (LookAhead if runs_ahead else StepRunner)(state, self.sampler, copier)
        self._core = EngineCore(state, steps, before_step)
        self._next_id = 0
        if program.device.type == "cpu":
            keep_freed_memory()

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.limits.max_model_len

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        final_only: bool = False,
    ) -> str:
        """Queue a prompt; ``step`` or ``step_pieces`` runs it.

        Args:
            prompt: text or token ids.
            sampling_params: None for the default ones.
            request_id: a name that no other unfinished request has; None for a new one.
            options: how urgent it is, and whose.
            final_only: the steps return it when a completion has ended, not with every token.

        Returns:
            Its id: ``request_id``, or a new one.

        Raises:
            ValueError: the prompt, the parameters or the id is refused; nothing else is affected.
            QueueFull: ``max_queue`` prompts wait already.
        """
        core = self._core
        core.turns.check_process()
        checked = check_prompt(prompt, self.tokenizer, self.limits, params=sampling_params)
        params = check_params(sampling_params, self.tokenizer, self.limits)
        grammar = self._grammar(params)
        batch: list[Submission] = []
        prepare = partial(
            self._prepare, checked, params, grammar, request_id, options, is_private=False, final_only=final_only
        )
        core.turns.take(self._queue, batch, [prepare])
        return batch[0].request_id

    def submit_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        final_only: bool = False,
    ) -> list[str]:
        """Queue several prompts, all or none of them.

        Args:
            prompts: a list of them.
            sampling_params: for all prompts, or one per prompt.
            request_ids: a list with one per prompt; None: new ones.
            options: of all.
            final_only: as for ``submit``.

        Returns:
            Their ids, in the order of the prompts.

        Raises:
            ValueError: a prompt, its parameters or an id is refused; the message names the index.
            QueueFull: not all of them have room in the queue.
        """
        core = self._core
        core.turns.check_process()
        checked = check_batch(prompts, sampling_params, self.tokenizer, self.limits)
        names: Sequence[str | None] = [None] * len(checked) if request_ids is None else request_ids
        if len(names) != len(checked):
            raise ValueError(f"request_ids has {len(names)} entries for {len(checked)} prompts; give one per prompt")
        if request_ids is not None and None in names:
            raise ValueError("request_ids holds None; name every prompt, or leave request_ids out")
        if request_ids is not None and len(set(names)) != len(names):
            raise ValueError("request_ids names a prompt twice; use different ones")
        batch: list[Submission] = []
        prepare = [
            partial(
                self._prepare,
                prompt,
                params,
                self._grammar(params, i),
                name,
                options,
                is_private=False,
                final_only=final_only,
            )
            for i, ((prompt, params), name) in enumerate(zip(checked, names, strict=True))
        ]
        core.turns.take(self._queue, batch, prepare)
        return [submission.request_id for submission in batch]

    def prepare_structured_outputs(self) -> None:
        """Make now what the first request with ``structured_outputs`` would make: a second of all threads' time and
        100 MB for 150,000 tokens. Nothing happens where there can be no such request."""
        if self.tokenizer is not None:
            prepare_vocabulary(self.tokenizer, self.limits.vocab_size, self.eos_token_ids)

    def has_grammar(self, params: SamplingParams) -> bool:
        """True if a submission with these parameters has nothing to compile."""
        asked = params.asked_output
        return asked is None or self.tokenizer is None or is_compiled(asked, self._vocabulary())

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar that ``params`` asks for, so that ``submit`` finds it. Any thread may call it while
        others run steps, which go on meanwhile.

        Raises:
            ValueError: as ``submit`` does.
        """
        self._grammar(params)

    def step(self) -> list[RequestOutput]:
        """Run one model step and return the requests of ``submit`` that progressed or ended.

        Each output holds everything up to now; the last one of a request has ``finished`` set and comes once. Those
        that are ``final_only`` have no other.
        """
        return self._core.turns.take(self._step)

    def _step(self) -> list[RequestOutput]:
        core, state = self._core, self._core.state
        core.run_step()
        with core.transaction:
            outputs = [self._output(s) for s in state.updated.values() if s.is_finished or not s.final_only]
            for submission in state.updated.values():
                if submission.is_finished:
                    state.submissions.pop(submission.request_id, None)
        state.updated = {}  # last: whatever is interrupted before this is returned by the next call
        return outputs

    def step_pieces(self) -> list[StreamPiece]:
        """Run one model step and return what is new of the requests of ``submit``, as ``stream`` yields it.

        The cost of a step depends on its new tokens, not on all up to now as with ``step``. A request is read by one
        of the two, from its first step on. At most one piece of each completion comes with a step; the last piece of
        a request has ``metrics``. Requests that are ``final_only``, or look for the best of more completions than
        they return, have one piece for each completion, with everything.
        """
        return self._core.turns.take(self._step_pieces)

    def _step_pieces(self) -> list[StreamPiece]:
        core, state = self._core, self._core.state
        core.run_step()
        with core.transaction:
            for known in state.pieces:  # of a call that was interrupted
                known.give()
            new = [piece for submission in state.updated.values() for piece in new_pieces(state, submission)]
            state.pieces = [*state.pieces, *new]
            pieces = [piece.give() for piece in state.pieces]
            for submission in state.updated.values():
                if submission.is_finished:
                    state.submissions.pop(submission.request_id, None)
        state.updated = {}
        state.pieces = []  # last: whatever is interrupted before this is returned by the next call
        return pieces

    def cancel(self, request_id: str) -> bool:
        """End a waiting or running request and free its blocks; its last output comes with the next ``step``.

        Returns:
            Whether there was an unfinished request of that id.
        """
        return self.cancel_many([request_id]) == 1

    def cancel_many(self, request_ids: Iterable[str]) -> int:
        """As ``cancel``, of several requests in one turn.

        Returns:
            The number of unfinished requests that were there.
        """
        return self._core.turns.take(self._cancel, list(request_ids))

    def _cancel(self, request_ids: Sequence[str]) -> int:
        count = 0
        with self._core.transaction:
            for request_id in request_ids:
                submission = self._core.state.submissions.get(request_id)
                if submission is None or submission.is_finished:
                    continue
                for completion in submission.completions:
                    self._core.state.end(completion, "cancelled")
                count += 1
        return count

    def has_unfinished(self) -> bool:
        """True if another ``step`` has something to run or to return."""
        state = self._core.state
        return bool(state.updated or state.completions or state.pieces or self._core.steps.is_under_way)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        options: Sequence[RequestOptions] | None = None,
    ) -> list[RequestOutput]:
        """Complete a batch of prompts.

        Args:
            prompts: a prompt or a list of them; every one is checked before any runs.
            sampling_params: for all prompts, or one per prompt.
            on_progress: called after each model step.
            options: one per prompt; None for the default ones.

        Returns:
            One output per prompt, in their order. A prompt that failed while it ran has
            ``finish_reason="error"`` and the reason in ``error``.

        Raises:
            ValueError: a prompt or its parameters are refused; the message names the index.
            QueueFull: not all of them have room in the queue; none runs.
        """
        self._core.turns.check_process()
        checked = check_batch(prompts, sampling_params, self.tokenizer, self.limits)
        options = [DEFAULT_OPTIONS] * len(checked) if options is None else options
        prepare = [
            partial(self._prepare, prompt, params, self._grammar(params, i), None, own, is_private=True)
            for i, ((prompt, params), own) in enumerate(zip(checked, options, strict=True))
        ]
        return self._complete(prepare, self._output, on_progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        on_progress: Callable[[Progress], None] | None = None,
        options: Sequence[RequestOptions] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt.

        Args:
            prompts: a prompt or a list of them; every one is checked before any runs.
            params: for all prompts, or one per prompt.
            on_progress: called after each model step.
            options: one per prompt; None for the default ones.

        Returns:
            One output per prompt, in their order; ``error`` says why a search ended before its time.

        Raises:
            ValueError: a prompt or its parameters are refused; the message names the index.
            QueueFull: not all of them have room in the queue; none runs.
        """
        self._core.turns.check_process()
        checked = check_beam_batch(prompts, params, self.tokenizer, self.limits)
        options = [DEFAULT_OPTIONS] * len(checked) if options is None else options
        prepare = [
            partial(self._prepare_search, prompt, entry, own)
            for (prompt, entry), own in zip(checked, options, strict=True)
        ]
        return self._complete(prepare, BeamSubmission.result, on_progress)

    def _complete(
        self,
        prepare: Iterable[Callable[[], AnySubmission]],
        result: Callable[[AnySubmission], Result],
        on_progress: Callable[[Progress], None] | None,
    ) -> list[Result]:
        """Run submissions to their end in one batch, and forget them; returns what ``result`` makes of each."""
        core = self._core
        batch: list[AnySubmission] = []
        try:
            core.turns.take(self._queue, batch, prepare)
            self._run_to_the_end(batch, on_progress)
            return core.turns.take(self._results, batch, result)
        finally:
            core.drop(batch)

    def _queue(self, batch: list[AnySubmission], prepare: Iterable[Callable[[], AnySubmission]]) -> None:
        """Make the submissions, ids included, and take them in, all or none; ``batch`` gets them."""
        batch.extend(make() for make in prepare)
        self._core.check_queue(sum(len(submission.completions) for submission in batch))
        self._core.add(batch)

    def _run_to_the_end(self, batch: Sequence[Submission], on_progress: Callable[[Progress], None] | None) -> None:
        core = self._core
        unfinished = set(batch)
        before = core.state.num_generated_tokens
        while unfinished:
            own = [submission for submission in core.turns.take(core.run_step) if submission in unfinished]
            # Without progress of ours, somebody else's step or a cancel may have ended some.
            unfinished.difference_update([s for s in own or batch if s.is_finished])
            if on_progress is not None:
                generated = core.state.num_generated_tokens - before
                on_progress(Progress(len(batch) - len(unfinished), len(batch), generated))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Iterator[StreamPiece]:
        """Complete one prompt and yield its tokens as they come; leaving the loop early cancels it.

        Other requests in the engine progress with it.

        Raises:
            ValueError: the prompt or the parameters are refused, at once and not with the first piece.
        """
        self._core.turns.check_process()
        checked = check_prompt(prompt, self.tokenizer, self.limits, params=sampling_params)
        params = check_params(sampling_params, self.tokenizer, self.limits)
        if params.num_completions > params.n:
            raise ValueError(
                f"best_of={params.best_of} with n={params.n} cannot be streamed: which are best is known at the end; "
                "use generate, or leave best_of out"
            )
        return self._stream(checked, params, self._grammar(params), options)

    def stats(self) -> dict[str, int | float]:
        """Figures since the engine was made.

        Returns:
            ``queue_length`` and ``running`` sequences, ``queue_tokens`` of those that wait, ``preemptions``, of which
            ``swaps``; ``steps``, those of at most 1, 8, 16, … tokens (``steps_up_to_8``), ``computed_tokens``
            (those computed again included), ``generated_tokens``,
            ``prompt_tokens`` of prompts that began to run, of which ``cached_tokens`` came from the prefix cache;
            requests that ended, by reason: ``finished_stop``, ``finished_length``, ``finished_cancelled``,
            ``finished_timeout``, ``finished_error``; ``failed`` sequences; ``model_seconds`` (packing and model) and
            ``total_seconds`` of steps; ``block_size``; with ``async_scheduling`` the figures of ``LookAhead.stats``;
            where steps run as whole graphs, on an NPU, ``graph_sizes`` that are ready, ``graph_sizes_dropped`` and
            ``operator_steps``; and the block manager's figures, see ``blocks.inspection.stats``.
        """
        return self._core.turns.take(self._stats)

    def _stats(self) -> dict[str, int | float]:
        core, state = self._core, self._core.state
        with core.transaction:
            return {
                **self.batcher.stats(),
                "block_size": self.block_manager.block_size,
                "steps": state.num_steps,
                **state.step_sizes.stats(),
                **core.steps.stats(),
                **getattr(self.runner.program, "graph_stats", dict)(),
                "computed_tokens": state.num_computed_tokens,
                "generated_tokens": state.num_generated_tokens,
                "prompt_tokens": state.num_prompt_tokens,
                "cached_tokens": state.num_cached_tokens,
                **{f"finished_{reason}": count for reason, count in state.num_finished.items()},
                "failed": state.num_failed,
                "model_seconds": state.model_seconds,
                "total_seconds": state.total_seconds,
            }

    def profile(self, *, reset: bool = False) -> Profile:
        """Times of the steps, since the engine was made or the last reset."""
        return self._core.turns.take(self._profile, reset)

    def _profile(self, reset: bool) -> Profile:
        result = self._core.state.profiler.result()
        if reset:
            self._core.state.profiler.reset()
        return result

    def defragment(self) -> int:
        """Move used and cached blocks to the front of the KV cache, with the next step; returns how many move.

        Nothing moves while copies of the last step may be under way.
        """
        return self._core.turns.take(self._defragment)

    def _defragment(self) -> int:
        self._core.settle()
        with self._core.transaction:
            self.block_manager.finish_copies()
            return self.block_manager.defragment()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as is needed when weights change."""
        self._core.turns.take(self._reset_prefix_cache)

    def _reset_prefix_cache(self) -> None:
        with self._core.transaction:
            self.block_manager.forget_prefixes()

    def shutdown(self) -> list[RequestOutput]:
        """End what has not ended as cancelled, free the KV cache and the program, and refuse prompts from now on.

        Returns:
            The last outputs of ``submit``'s requests; those of ``stream`` get their last piece.
        """
        self._core.turns.take(self._core.shut_down)
        self.__dict__.pop("runner", None)
        return self.step()

    @property
    def device_lost(self) -> str | None:
        """What the device reported when it was lost, with which every request ended; None while it computes."""
        return self._core.device_lost

    def in_turn(self, action: Callable[[], Result]) -> Result:
        """Call ``action`` while no step runs and no other thread uses the engine; returns what it returns."""
        return self._core.turns.take(self._in_turn, action)

    def _in_turn(self, action: Callable[[], Result]) -> Result:
        self._core.settle()
        return action()

    def compute_again(self) -> None:
        """Forget all keys and values: requests under way are computed again from their tokens, prompt and output,
        with the weights as they are now. For ``before_step`` and ``in_turn``."""
        self._core.compute_again()

    def _stream(
        self, prompt: CheckedPrompt, params: SamplingParams, grammar: Grammar | None, options: RequestOptions
    ) -> Iterator[StreamPiece]:
        core = self._core
        batch: list[Submission] = []
        prepare = partial(self._prepare, prompt, params, grammar, None, options, is_private=True)
        may_wait = True
        try:
            core.turns.take(self._queue, batch, [prepare])
            submission = batch[0]
            while True:
                finished = submission.is_finished
                yield from core.turns.take(self._next_pieces, submission)
                if finished:
                    return
                core.turns.take(core.run_step)
        except GeneratorExit:
            may_wait = False
            raise
        finally:
            core.drop(batch, may_wait=may_wait)

    def _next_pieces(self, submission: Submission) -> list[StreamPiece]:
        with self._core.transaction:
            return [piece.give() for piece in new_pieces(self._core.state, submission)]

    def _results(self, batch: Iterable[AnySubmission], result: Callable[[AnySubmission], Result]) -> list[Result]:
        with self._core.transaction:
            return [result(submission) for submission in batch]

    def _output(self, submission: Submission) -> RequestOutput:
        """Everything up to now; a completion whose text cannot be given ends with an error."""
        output = submission.output()
        if any([end_undecodable(self._core.state, completion) for completion in submission.completions]):
            output = submission.output()
        return output

    def _prepare(
        self,
        prompt: CheckedPrompt,
        params: SamplingParams,
        grammar: Grammar | None,
        request_id: str | None,
        options: RequestOptions,
        *,
        is_private: bool,
        final_only: bool = False,
    ) -> Submission:
        if request_id is None:
            request_id = self._new_id()
        elif not isinstance(request_id, str) or "\0" in request_id:
            raise ValueError(f"request_id={request_id!r} is not plain text; choose another, or leave it out")
        elif request_id in self._core.state.submissions:
            raise ValueError(f"request_id={request_id!r} is in use; choose another, or leave it out")
        submission = Submission(request_id, prompt.text, prompt.token_ids, time.perf_counter(), is_private)
        submission.final_only = final_only
        submission.begin_completions(params, options, self.max_model_len, self.tokenizer, self.eos_token_ids, grammar)
        return submission

    def _grammar(self, params: SamplingParams, index: int | None = None) -> Grammar | None:
        """The grammar that the output is held to, compiled before a turn is taken: that can take a second.

        Raises:
            ValueError: there is no tokenizer, or the grammar cannot be enforced; the message names ``index``.
        """
        asked = params.asked_output
        if asked is None:
            return None
        if self.tokenizer is None:
            raise ValueError(f"structured_outputs={shown(params.structured_outputs)} needs a tokenizer; give one")
        try:
            return compile_grammar(asked, self._vocabulary())
        except ValueError as error:
            raise error if index is None else ValueError(f"sampling_params[{index}].{error}") from None

    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self.limits.vocab_size, self.eos_token_ids)

    def _prepare_search(
        self, prompt: CheckedPrompt, params: BeamSearchParams, options: RequestOptions
    ) -> BeamSubmission:
        submission = BeamSubmission(
            self._new_id(),
            prompt.text,
            prompt.token_ids,
            time.perf_counter(),
            is_private=True,
            search=BeamSearch(bounded(params, len(prompt.token_ids), self.max_model_len), sorted(self.eos_token_ids)),
            tokenizer=self.tokenizer,
        )
        submission.begin(options, self.max_model_len)
        return submission

    def _new_id(self) -> str:
        """An id that no unfinished request has."""
        while str(self._next_id) in self._core.state.submissions:
            self._next_id += 1
        self._next_id += 1
        return str(self._next_id - 1)
