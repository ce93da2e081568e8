"""The engine: prompts in, completions out, over a compiled program, with three APIs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ..requests.beam_search_params import BeamSearchParams
from ..requests.outputs import BeamSearchOutput, Progress, RequestOutput, StreamPiece
from ..requests.prompt_forms import Prompt
from ..requests.request_options import RequestOptions, options_for
from ..requests.sampling_params import SamplingParams
from ..requests.validation import CheckedPrompt, as_batch, check_batch, check_beam_batch, check_params, check_prompt
from ..sampling.beam_search import BeamSearch
from ..shown import shown
from ..structured.grammar import Grammar, compile_grammar, is_compiled
from ..structured.vocabulary import Vocabulary, prepare_vocabulary, vocabulary_of
from .beam_submission import BeamSubmission, bounded
from .core import AnySubmission, Result
from .engine_base import EngineBase
from .submission import Submission

DEFAULT_OPTIONS = RequestOptions()


class Engine(EngineBase):
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

    Arguments as for ``EngineBase``.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "",
        deadline: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str] = "",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all in one continuous batch.

        Args:
            prompts: texts, token ids (lists of int, or 1-d tensors), or dicts of these, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``; or a single one.
            sampling_params: for all prompts, or one per prompt; by default :meth:`get_default_sampling_params`, which
                given ones replace as a whole.
            priority: lower comes first under ``policy="priority"``; this and the next three for all prompts, or a
                list with one for each.
            client: whose prompt it is, for ``policy="fair"``.
            deadline: seconds from now at which a prompt ends with ``finish_reason="timeout"``.
            cache_salt: prompts share cached blocks only with those of the same salt.
            on_progress: called after every step.

        Returns:
            One output per prompt, in their order. A request that failed while it ran has
            ``finish_reason="error"``.

        Raises:
            TypeError, ValueError: a bad prompt, named by its index, before any prompt runs.
            QueueFull: more prompts than ``max_queue`` lets wait; none runs.
            RuntimeError: a weight was replaced or moved since the model was compiled (see
                :meth:`check_weights`).
        """
        self._check_usable()
        batch = as_batch(prompts)
        options = options_for(len(batch), priority=priority, client=client, deadline=deadline, cache_salt=cache_salt)
        checked = check_batch(batch, sampling_params, self.tokenizer, self.limits, self._default_params)
        prepare = [
            partial(self._prepare, prompt, params, self._grammar(params, i), None, own, is_private=True)
            for i, ((prompt, params), own) in enumerate(zip(checked, options, strict=True))
        ]
        return self._complete(prepare, self._core.output, on_progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "",
        deadline: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str] = "",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt; all prompts share the steps.

        The beams of a prompt share the blocks of the KV cache as far as they are the same. The results are those of
        HuggingFace's ``generate(num_beams=beam_width, num_return_sequences=beam_width)``.

        Args:
            prompts: as for :meth:`generate`.
            params: how wide to search, how long, what to prefer; for all prompts, or one per prompt.
            priority, client, deadline, cache_salt, on_progress: as for :meth:`generate`.

        Returns:
            One output per prompt, in their order, its ``sequences`` best first; ``error`` says why a search ended
            before its time.

        Raises:
            TypeError, ValueError, QueueFull, RuntimeError: as :meth:`generate`.
        """
        self._check_usable()
        batch = as_batch(prompts)
        options = options_for(len(batch), priority=priority, client=client, deadline=deadline, cache_salt=cache_salt)
        checked = check_beam_batch(batch, params, self.tokenizer, self.limits)
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
            core.turns.take(core.queue, batch, prepare)
            self._run_to_the_end(batch, on_progress)
            return core.turns.take(core.results, batch, result)
        finally:
            core.drop(batch)

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
        *,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> Iterator[StreamPiece]:
        """Run one prompt, yielding text and tokens as they come; closing the iterator cancels the request.

        Other requests in the engine progress with it. Arguments as for :meth:`generate`.

        Raises:
            TypeError, ValueError: the prompt or a parameter is refused, at once and not with the first piece; and
                ``best_of`` above ``n``, where the best are known at the end only.
            QueueFull: ``max_queue`` prompts wait already.
            RuntimeError: a weight was replaced or moved since the model was compiled.
        """
        self._check_usable()
        options = RequestOptions(priority, client, deadline, cache_salt)
        checked, params = self._checked(prompt, sampling_params)
        if params.num_completions > params.n:
            raise ValueError(
                f"best_of={params.best_of} with n={params.n} cannot be streamed, as the best are known at the end "
                "only; use generate, or omit best_of"
            )
        grammar = self._grammar(params)
        return self._stream(partial(self._prepare, checked, params, grammar, None, options, is_private=True))

    def _stream(self, prepare: Callable[[], Submission]) -> Iterator[StreamPiece]:
        core = self._core
        batch: list[Submission] = []
        may_wait = True
        try:
            core.turns.take(core.queue, batch, [prepare])
            submission = batch[0]
            while True:
                finished = submission.is_finished
                yield from core.turns.take(core.next_pieces, submission)
                if finished:
                    return
                core.turns.take(core.run_step)
        except GeneratorExit:
            may_wait = False
            raise
        finally:
            core.drop(batch, may_wait=may_wait)

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> str:
        """Queue one prompt for :meth:`step`; returns its request id. Arguments as for :meth:`generate`.

        Raises:
            TypeError, ValueError: the prompt or a parameter is refused, or ``request_id`` is in use or no plain text;
                other requests are not affected.
            QueueFull: ``max_queue`` prompts wait already.
        """
        self._check_usable()
        options = RequestOptions(priority, client, deadline, cache_salt)
        checked, params = self._checked(prompt, sampling_params)
        grammar = self._grammar(params)
        prepare = partial(self._prepare, checked, params, grammar, request_id, options, is_private=False)
        batch: list[Submission] = []
        self._core.turns.take(self._core.queue, batch, [prepare])
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
            final_only: the steps return one when a completion has ended, not with every token.

        Returns:
            Their ids, in the order of the prompts.

        Raises:
            ValueError: a prompt, its parameters or an id is refused; the message names the index.
            QueueFull: not all of them have room in the queue.
        """
        self._core.turns.check_process()
        checked = check_batch(prompts, sampling_params, self.tokenizer, self.limits, self._default_params)
        names: Sequence[str | None] = [None] * len(checked) if request_ids is None else request_ids
        if len(names) != len(checked):
            raise ValueError(f"request_ids has {len(names)} entries for {len(checked)} prompts; give one per prompt")
        if request_ids is not None and None in names:
            raise ValueError("request_ids contains None; give an id for every prompt, or omit request_ids")
        if request_ids is not None and len(set(names)) != len(names):
            raise ValueError("request_ids has duplicates; use unique ids")
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
        self._core.turns.take(self._core.queue, batch, prepare)
        return [submission.request_id for submission in batch]

    def step(self) -> list[RequestOutput]:
        """Run one model step and return the requests of ``submit`` that progressed or ended.

        Each output holds everything up to now; the last one of a request has ``finished`` set and comes once. Those
        that are ``final_only`` have no other.
        """
        return self._core.turns.take(self._core.step)

    def step_pieces(self) -> list[StreamPiece]:
        """Run one model step and return what is new of the requests of ``submit``, as ``stream`` yields it.

        The cost of a step depends on its new tokens, not on all up to now as with ``step``. A request is read by one
        of the two, from its first step on. At most one piece of each completion comes with a step; the last piece of
        a request has ``metrics``. Requests that are ``final_only``, or look for the best of more completions than
        they return, have one piece for each completion, with everything.
        """
        return self._core.turns.take(self._core.step_pieces)

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

    def _check_usable(self) -> None:
        """Raise if requests cannot come in here; whatever takes prompts begins with it."""
        self._core.turns.check_process()

    def _checked(self, prompt: Prompt, params: SamplingParams | None) -> tuple[CheckedPrompt, SamplingParams]:
        """One prompt and its parameters, or the default ones."""
        params = self._default_params if params is None else params
        checked = check_prompt(prompt, self.tokenizer, self.limits, params=params)
        return checked, check_params(params, self.tokenizer, self.limits)

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
            request_id = self._core.state.new_id()
        elif not isinstance(request_id, str) or "\0" in request_id:
            raise ValueError(f"request_id={request_id!r} is not plain text; choose another, or omit it")
        elif request_id in self._core.state.submissions:
            raise ValueError(f"request_id={request_id!r} is in use; choose another, or omit it")
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
            raise ValueError(
                f"structured_outputs={shown(params.structured_outputs)} needs a tokenizer; pass tokenizer="
            )
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
            self._core.state.new_id(),
            prompt.text,
            prompt.token_ids,
            time.perf_counter(),
            is_private=True,
            search=BeamSearch(bounded(params, len(prompt.token_ids), self.max_model_len), sorted(self.eos_token_ids)),
            tokenizer=self.tokenizer,
        )
        submission.begin(options, self.max_model_len)
        return submission
