"""A submitted prompt in the engine: its completions, their text, and their ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..requests.detokenizer import Detokenizer, Tokenizer
from ..requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamPiece
from ..requests.request import FinishReason, Request, RequestStatus
from ..requests.request_options import RequestOptions
from ..requests.sampling_params import SamplingParams
from ..sampling.logprobs import PromptLogprobs
from ..structured.grammar import Grammar
from ..structured.state import GrammarError

Mark = tuple[int, int]
"""How much of a completion its caller has been given: tokens and characters; a token more than there are when it has
been said that these are all."""


@dataclass(eq=False, slots=True)
class Completion:
    """One of the ``n`` completions of a prompt.

    Attributes:
        owner: the submission that it belongs to.
        request: what the batcher and the runner see of it.
        index: which of the ``n``.
        max_model_len: it ends with "length" when it has so many tokens, prompt included.
        eos_token_ids: end-of-sequence ids; empty with ``ignore_eos``.
        detokenizer: None when nobody can ask for text.
        logprobs: per output token, when requested.
        prompt_logprobs: of the prompt's tokens, when requested.
        num_settled: output tokens whose consequences (an end, if any) are drawn. What was appended beyond
            them when a step was interrupted is sampled again.
        text_error: why its text cannot be given; it counts as ended with an error.
        given: what the caller has of it, where it is given in pieces.
    """

    owner: Submission
    request: Request
    index: int
    max_model_len: int
    eos_token_ids: Collection[int]
    detokenizer: Detokenizer | None
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: PromptLogprobs | None = None
    num_settled: int = 0
    text_error: str | None = None
    given: Mark = (0, 0)
    _num_named: int = 0  # entries of logprobs whose tokens' text is filled in
    _num_named_prompt: int = 0

    @property
    def is_finished(self) -> bool:
        """It ended, for whatever reason."""
        return self.request.is_finished

    def append(self, token: int, logprob: dict[int, Logprob] | None) -> FinishReason | None:
        """Take a sampled token; returns the reason if it is the last one."""
        request, params = self.request, self.request.params
        request.output_token_ids.append(token)
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
        if token in self.eos_token_ids:
            return "stop"
        if token in params.stop_id_set:
            request.stop_reason = token
            return "stop"
        count = request.num_output_tokens
        text = self.detokenizer
        grammar = request.grammar
        is_complete = grammar is not None and grammar.consume(token)
        # Text is needed now only to look for stop strings; otherwise it waits until somebody reads it.
        if params.stop_strings and text is not None and text.append((token,), count > params.min_tokens):
            request.stop_reason = text.stop_string
            return "stop"
        if is_complete:
            return "stop"
        return "length" if count >= request.max_tokens or request.num_tokens >= self.max_model_len else None

    def restore(self) -> None:
        """Return to the last settled token, from whatever state an interrupted call left this in."""
        request = self.request
        request.row = None
        if request.finish_reason is None:
            request.status = RequestStatus.WAITING
            request.num_computed_tokens = request.num_output_placeholders = 0
            request.block_hashes = []
            request.stop_reason = request.finished_time = None
            del request.output_token_ids[self.num_settled :]
        else:
            request.status = RequestStatus.FINISHED
        if request.grammar is not None and request.finish_reason is None:
            # That of a completion that has ended is as its end left it, which may be in the middle of a token.
            try:
                request.grammar.restore(request.output_token_ids)
            except GrammarError as error:
                self.text_error = str(error)
        if self.logprobs is not None:
            del self.logprobs[request.num_output_tokens :]
            self._num_named = min(self._num_named, len(self.logprobs))
        if self.detokenizer is not None:
            try:
                self.detokenizer.reset()
                if request.params.stop_strings:
                    for count, token in enumerate(self._new_text_tokens(0), start=1):
                        self.detokenizer.append((token,), count > request.params.min_tokens)
            except Exception as error:
                self._give_up_text(error)

    def mark_cancelled(self) -> None:
        """It ended before it was queued; nothing happens if it has ended already."""
        request = self.request
        if not request.is_finished:
            request.finish_reason = "cancelled"
            request.status = RequestStatus.FINISHED

    def output(self) -> CompletionOutput:
        """Everything up to now."""
        request = self.request
        self._read_text()
        return CompletionOutput(
            index=self.index,
            text=self._text(),
            token_ids=list(request.output_token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self._finish_reason(),
            stop_reason=request.stop_reason,
            error=self.text_error or request.error,
        )

    def _text(self) -> str:
        """All of it, without what may yet be the beginning of a stop string."""
        text = self.detokenizer
        if text is None:
            return ""
        return text.text if self.is_finished else text.text_between(0, text.stable_length)

    def new_piece(self) -> tuple[StreamPiece, Mark] | None:
        """The part that is new, at a cost that does not depend on what has been given, and what ``given`` is with it.

        Returns:
            None if nothing is new, or if the last piece has been given.
        """
        tokens = self.request.output_token_ids
        first, start = self.given
        end = len(tokens)
        finished = self.is_finished
        if first > end or (first == end and not finished):
            return None
        self._read_text()
        text, stable = "", start
        if (detokenizer := self.detokenizer) is not None:
            stable = max(start, detokenizer.length if finished else detokenizer.stable_length)
            text = detokenizer.text_between(start, stable)
        piece = StreamPiece(
            text=text,
            token_ids=tokens[first:],
            finished=finished,
            finish_reason=self._finish_reason(),
            stop_reason=self.request.stop_reason,
            error=self.text_error or self.request.error,
            index=self.index,
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            request_id=self.owner.request_id,
            num_cached_tokens=self.owner.completions[0].request.num_cached_tokens,
        )
        return piece, (end + finished, stable)

    @property
    def is_given(self) -> bool:
        """The caller has its last piece."""
        return self.given[0] > len(self.request.output_token_ids)

    @property
    def end_mark(self) -> Mark:
        """``given`` when everything has been given."""
        return len(self.request.output_token_ids) + 1, 0 if self.detokenizer is None else self.detokenizer.length

    def _give_up_text(self, error: Exception) -> None:
        self.text_error = undecodable(error)
        self.detokenizer = None

    def _finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason if self.text_error is None else "error"

    def _new_text_tokens(self, first: int) -> list[int]:
        """Output tokens from ``first`` on that have text: one that ends the completion has none, unless that is asked
        for."""
        request = self.request
        tokens = request.output_token_ids[first:]
        is_complete = request.grammar is not None and request.grammar.ended_in_text
        if request.finish_reason == "stop" and not isinstance(request.stop_reason, str) and not is_complete:
            return tokens if request.params.include_stop_str_in_output else tokens[:-1]
        return tokens

    def _read_text(self) -> None:
        """Bring the text up to the newest token, and name the tokens of log-probabilities."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            return
        try:
            new = self._new_text_tokens(detokenizer.num_tokens)
            if new and detokenizer.stop_string is None:
                detokenizer.append(new, check_stop=False)
            if self.is_finished:
                detokenizer.finish(check_stop=False)
            if self.logprobs is not None:
                self._name_tokens(detokenizer, self.logprobs)
            if self.prompt_logprobs is not None:
                for known in self.prompt_logprobs.entries[self._num_named_prompt :]:
                    for token, logprob in (known or {}).items():
                        logprob.decoded_token = detokenizer.token_text(token)
                self._num_named_prompt = len(self.prompt_logprobs.entries)
        except Exception as error:
            self._give_up_text(error)

    def _name_tokens(self, detokenizer: Detokenizer, logprobs: list[dict[int, Logprob]]) -> None:
        """Fill in the texts of new log-probabilities."""
        first, tokens = self._num_named, self.request.output_token_ids
        texts = detokenizer.added_texts(first, len(logprobs), at_end=self.is_finished)
        for chosen, entry, text in zip(tokens[first:], logprobs[first:], texts, strict=False):
            for token, logprob in entry.items():
                logprob.decoded_token = detokenizer.token_text(token)
            entry[chosen].added_text = text
        self._num_named = len(logprobs)


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A piece, and how far the caller has its completions when it has been given.

    Attributes:
        piece: what is new.
        marks: for each completion that it is about.
    """

    piece: StreamPiece
    marks: Sequence[tuple[Completion, Mark]]

    def give(self) -> StreamPiece:
        """Note that the caller has it; returns the piece."""
        for completion, mark in self.marks:
            completion.given = mark
        return self.piece


@dataclass(eq=False, slots=True)
class Submission:
    """A prompt on its way through the engine.

    Attributes:
        request_id: the caller's name for it.
        prompt: its text; None when token ids were given.
        prompt_token_ids: its tokens.
        arrival_time: ``time.perf_counter`` when it was handed in.
        is_private: its outputs go to a ``generate`` or ``stream`` call, not to ``step``.
        completions: all that run.
        num_returned: how many of them the caller gets, the best ones; None: all, in their order.
        reports_logprobs: the caller requested log-probabilities; they are not only there to rank completions.
        final_only: the caller hears of it when a completion has ended, and not before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    arrival_time: float
    is_private: bool
    completions: list[Completion] = field(default_factory=list)
    num_returned: int | None = None
    reports_logprobs: bool = True
    final_only: bool = False

    def begin_completions(
        self,
        params: SamplingParams,
        options: RequestOptions,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Create the completions that ``params`` requests, each with its own request and grammar state."""
        asked = params.asked_output
        count = params.num_completions
        if count > params.n:
            self.num_returned, self.reports_logprobs = params.n, params.logprobs is not None
        for index in range(count):
            own = params.completion(index).within(max_model_len - len(self.prompt_token_ids))
            # No caller's id holds a zero.
            name = self.request_id if count == 1 else f"{self.request_id}\0{index}"
            detokenizer = None
            if tokenizer is not None:
                detokenizer = Detokenizer(
                    tokenizer,
                    self.prompt_token_ids,
                    own.stop_automaton,
                    skip_special_tokens=own.skip_special_tokens,
                    kept_special_token_ids=own.kept_special_token_ids,
                    include_stop=own.include_stop_str_in_output,
                    marks_ends=own.logprobs is not None,
                )
            request = options.request(name, self.prompt_token_ids, own, self.arrival_time)
            if grammar is not None and asked is not None:
                request.grammar = grammar.start(asked.after, own.stop_ids)
            scored = own.prompt_logprobs
            self.completions.append(
                Completion(
                    self,
                    request,
                    index,
                    max_model_len,
                    () if own.ignore_eos else eos_token_ids,
                    detokenizer,
                    None if own.logprobs is None else [],
                    None if scored is None else PromptLogprobs(self.prompt_token_ids, scored),
                )
            )

    @property
    def is_finished(self) -> bool:
        """All completions have ended."""
        return all([completion.request.is_finished for completion in self.completions])

    def end_with(self, completion: Completion, error: str | None) -> list[Completion]:
        """Say which others end because a completion ends before it is complete, by its deadline or an error."""
        return []

    def restore(self) -> None:
        """Return to what is settled, from whatever state an interrupted call left this in."""
        for completion in self.completions:
            completion.restore()

    def output(self) -> RequestOutput:
        """Everything up to now."""
        outputs = [completion.output() for completion in self.completions]
        if self.num_returned is not None:
            outputs = self._best(outputs, self.num_returned)
        finished = self.is_finished
        scores = self.completions[0].prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            metrics=self.metrics(finished),
            prompt_logprobs=None if scores is None else list(scores.entries),
            num_cached_tokens=self.completions[0].request.num_cached_tokens,
        )

    def _best(self, outputs: list[CompletionOutput], count: int) -> list[CompletionOutput]:
        """The most likely ones, best first, numbered anew; those that failed come last."""
        outputs.sort(key=lambda output: (output.error is not None, -(output.cumulative_logprob or 0.0)))
        return [
            replace(output, index=place, logprobs=output.logprobs if self.reports_logprobs else None)
            for place, output in enumerate(outputs[:count])
        ]

    def metrics(self, finished: bool) -> RequestMetrics:
        """Times and counts of all completions together."""
        if len(self.completions) == 1:  # the usual case, in every step for every request
            request = self.completions[0].request
            return RequestMetrics(
                self.arrival_time,
                request.first_scheduled_time,
                request.first_token_time,
                request.finished_time,
                len(request.output_token_ids),
                request.num_preemptions,
            )
        requests = [completion.request for completion in self.completions]
        return RequestMetrics(
            self.arrival_time,
            earliest(r.first_scheduled_time for r in requests),
            earliest(r.first_token_time for r in requests),
            max(r.finished_time or 0.0 for r in requests) if finished else None,
            sum(r.num_output_tokens for r in requests),
            sum(r.num_preemptions for r in requests),
        )


def undecodable(error: Exception) -> str:
    """The reason that a completion has no text."""
    return f"the tokenizer cannot decode the output: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Type and first line of an exception's message."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__


def earliest(times: Iterable[float | None]) -> float | None:
    return min((moment for moment in times if moment is not None), default=None)
