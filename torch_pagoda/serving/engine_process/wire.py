"""Messages between the API process and the engine process, in msgpack: one list each way per step.

A frame is a length of four bytes, big-endian, and one message. The API process sends ``ToEngine`` messages, a
``Start`` first. The engine process sends ``FromEngine`` messages: a ``Hello`` when its model is ready, then a
``Step`` whenever there is news.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from ...runtime.requests.request import FinishReason

WIRE_VERSION = 2
"""Version of the messages; both sides must have the same one."""


EXIT_DONE = 0
"""Exit status after the API process closed the socket."""
EXIT_BAD_MESSAGE = 65
"""Exit status after an invalid message (EX_DATAERR of sysexits.h)."""
EXIT_BROKEN = 70
"""Exit status after repeated failures of steps, or when nobody reads (EX_SOFTWARE)."""


class Start(Struct, array_like=True, frozen=True, tag="start"):
    """The model that an engine process loads.

    Attributes:
        model: folder or hub id of the model.
        tokenizer: folder or hub id of the tokenizer; None: the model's.
        options: keyword arguments of ``LLM``, as plain values.
        log_level: name of the ``logging`` level.
        version: ``WIRE_VERSION``.
        log_format: "text" or "json".
        processors: those that the process keeps to; empty: all.
        reports_cache: send the changes of the prefix cache with each ``Step``.
        kv_events: fields of ``KvEventsConfig``; None publishes nothing.
        data_parallel_rank: number of this engine among those of one server.
    """

    model: str
    tokenizer: str | None
    options: dict[str, Any]
    log_level: str = "WARNING"
    version: int = WIRE_VERSION
    log_format: str = "text"
    processors: list[int] = []
    reports_cache: bool = False
    kv_events: dict[str, Any] | None = None
    data_parallel_rank: int = 0


class Submit(Struct, array_like=True, frozen=True, tag="submit"):
    """One or more prompts, accepted or refused together.

    Attributes:
        request_id: the API process's id; no other unfinished request has it.
        prompts: token ids of each prompt.
        params: fields of ``SamplingParams`` by name; missing fields have their defaults.
        options: fields of ``RequestOptions``, likewise.
        streams: send deltas as they arise; else one delta for each completion, at its end.
    """

    request_id: str
    prompts: list[list[int]]
    params: dict[str, Any]
    options: dict[str, Any] = {}
    streams: bool = True


class Cancel(Struct, array_like=True, frozen=True, tag="cancel"):
    """Cancels requests; unknown ids are ignored."""

    request_ids: list[str]


class Ask(Struct, array_like=True, frozen=True, tag="ask"):
    """A query to the engine, answered between two steps.

    Attributes:
        call_id: repeated in the ``Answer``.
        what: ``"ping"``, ``"stats"``, ``"profile"``, ``"reset_prefix_cache"``, or ``"stored"``: answered when all
            blocks that were to be stored before are in the store, or dropped.
    """

    call_id: int
    what: str


class TokenLogprob(Struct, array_like=True, frozen=True):
    """A token's log-probability (natural logarithm), its rank (1: the most likely) and its text by itself.

    Attributes:
        added: the text that a generated token added to the completion; see ``Logprob.added_text``.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""
    added: str | None = None


class RequestTimes(Struct, array_like=True, frozen=True):
    """Times of one prompt's request, over all its completions, in seconds.

    Attributes:
        queue: from arrival to the first step.
        prefill: from the first step to the first token.
        decode: from the first token to the end.
        num_generated_tokens: tokens of all completions.
        num_preemptions: preemptions of its completions.
    """

    queue: float | None
    prefill: float | None
    decode: float | None
    num_generated_tokens: int
    num_preemptions: int


class Delta(Struct, array_like=True):
    """The new part of one completion.

    Attributes:
        request_id: id of the ``Submit``.
        prompt_index: index of the prompt in the ``Submit``.
        index: index of the completion among the prompt's ``n``.
        text: new text; later deltas never change it.
        token_ids: new tokens.
        logprobs: of the new tokens, the chosen one first, then the most likely; None unless requested.
        finish_reason: ``"stop"``, ``"length"``, ``"cancelled"``, ``"timeout"`` or ``"error"`` with the last delta.
        stop_reason: the stop string or stop token that ended it.
        error: one line with the reason, for ``"error"``.
        prompt_logprobs: of the prompt's tokens, None for the first; once, with a delta of index 0, if requested.
        num_cached_tokens: leading prompt tokens that came from the prefix cache; with the last delta.
        times: with the last delta of the prompt's last completion.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    num_cached_tokens: int = 0
    times: RequestTimes | None = None


class Refused(Struct, array_like=True, frozen=True):
    """A rejected ``Submit``.

    Attributes:
        code: ``"invalid"`` (the message names argument, value and remedy) or ``"queue_full"``.
    """

    request_id: str
    code: str
    message: str


class Answer(Struct, array_like=True, frozen=True):
    """The answer to an ``Ask``, or an ``error``."""

    call_id: int
    value: Any = None
    error: str | None = None


class CacheChange(Struct, array_like=True, frozen=True):
    """Blocks that the engine can find from now on (``is_stored``), or can find no more.

    Attributes:
        hashes: see ``runtime.blocks.hashing``; empty: all blocks were dropped.
    """

    is_stored: bool
    hashes: list[bytes] = []


class Hello(Struct, array_like=True, frozen=True, tag="hello"):
    """The engine's first message: the model is ready.

    Attributes:
        version: ``WIRE_VERSION``.
        max_model_len: maximum tokens of prompt and output together.
        vocab_size: token ids are below it.
        max_num_seqs: sequences that run at the same time.
        max_queue: completions that may wait; None: unlimited.
        default_params: fields of ``SamplingParams`` that the checkpoint recommends.
        model: folder or hub id of the model.
        device: ``"cpu"`` or ``"npu:0"``.
        stats: as in ``Step``.
        weights: digest of the checkpoint, where engines on several hosts are compared.
    """

    version: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_queue: int | None
    default_params: dict[str, Any]
    model: str
    device: str
    stats: dict[str, int | float]
    weights: str = ""


class Step(Struct, array_like=True, frozen=True, tag="step"):
    """All news after a step, or between two steps.

    Attributes:
        time: ``time.monotonic`` of the engine process when the message was made.
        deltas: in the order of the requests.
        refused: rejected submissions.
        answers: to the ``Ask`` messages.
        stats: ``Engine.stats()``; every quarter of a second while the engine runs, and when it becomes idle.
        cache: changes of the prefix cache in order, if ``Start`` asks for them.
    """

    time: float
    deltas: list[Delta] = []
    refused: list[Refused] = []
    answers: list[Answer] = []
    stats: dict[str, int | float] | None = None
    cache: list[CacheChange] = []


ToEngine: TypeAlias = Submit | Cancel | Ask
FromEngine: TypeAlias = Hello | Step
