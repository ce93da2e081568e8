"""Messages between the API process and the engine process, in msgpack: one list each way in a step.

A frame is a length of four bytes, big-endian, and one message. The API process sends ``ToEngine`` messages, to an
engine process of its own a ``Start`` first. The engine process sends ``FromEngine`` messages: a ``Hello`` when its
model is ready, then a ``Step`` whenever there is anything to say.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from ...runtime.requests.request import FinishReason

WIRE_VERSION = 1
"""Of these messages; both sides must have the same."""


EXIT_DONE = 0
"""Exit status of an engine process whose socket was closed."""
EXIT_BAD_MESSAGE = 65
"""That of one to which something came that is not a message (EX_DATAERR of sysexits.h)."""
EXIT_BROKEN = 70
"""That of one whose steps fail again and again, or to which nobody listens (EX_SOFTWARE)."""


class Start(Struct, array_like=True, frozen=True, tag="start"):
    """The model that an engine process loads.

    Attributes:
        model: the folder or hub id.
        tokenizer: likewise; None: the model's.
        options: keywords of ``LLM``, as plain values.
        log_level: of ``logging``, by name.
        version: ``WIRE_VERSION``.
        log_format: "text" or "json".
    """

    model: str
    tokenizer: str | None
    options: dict[str, Any]
    log_level: str = "WARNING"
    version: int = WIRE_VERSION
    log_format: str = "text"


class Submit(Struct, array_like=True, frozen=True, tag="submit"):
    """One or more prompts that are taken together, or refused together.

    Attributes:
        request_id: the API process's name for them, which no unfinished request has.
        prompts: token ids of each.
        params: fields of ``SamplingParams`` by name; what is left out has its default.
        options: fields of ``RequestOptions``, likewise.
        streams: deltas are wanted as they come; else each completion has one, at its end.
    """

    request_id: str
    prompts: list[list[int]]
    params: dict[str, Any]
    options: dict[str, Any] = {}
    streams: bool = True


class Cancel(Struct, array_like=True, frozen=True, tag="cancel"):
    """The end of requests that nobody waits for; ids that are not known are passed over."""

    request_ids: list[str]


class Ask(Struct, array_like=True, frozen=True, tag="ask"):
    """A question to the engine, answered between two steps.

    Attributes:
        call_id: comes back with the ``Answer``.
        what: ``"ping"``, ``"stats"``, ``"profile"`` or ``"reset_prefix_cache"``.
    """

    call_id: int
    what: str


class TokenLogprob(Struct, array_like=True, frozen=True):
    """A token's log-probability (natural logarithm), its rank (1: the likeliest) and its text by itself.

    Attributes:
        added: what it added to the text of the completion, of generated tokens; see ``Logprob.added_text``.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""
    added: str | None = None


class RequestTimes(Struct, array_like=True, frozen=True):
    """Times of one prompt's request, all completions together, in seconds.

    Attributes:
        queue: from arrival to the first step.
        prefill: from the first step to the first token.
        decode: from the first token to the end.
        num_generated_tokens: of all completions.
        num_preemptions: times that one of them lost its blocks.
    """

    queue: float | None
    prefill: float | None
    decode: float | None
    num_generated_tokens: int
    num_preemptions: int


class Delta(Struct, array_like=True):
    """The part of one completion that is new.

    Attributes:
        request_id: as in ``Submit``.
        prompt_index: which of its prompts.
        index: which of the prompt's ``n`` completions.
        text: new text, final: no later delta takes any of it back.
        token_ids: new tokens.
        logprobs: of the new tokens, the chosen one first, then the likeliest; None unless asked for.
        finish_reason: ``"stop"``, ``"length"``, ``"cancelled"``, ``"timeout"`` or ``"error"`` with the last delta.
        stop_reason: the stop string or stop token that ended it.
        error: one line that says why, with ``"error"``.
        prompt_logprobs: of the prompt's tokens, None for the first; once, with a delta of index 0, where asked for.
        num_cached_tokens: leading tokens of the prompt that came from the prefix cache; with the last delta.
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
    """A ``Submit`` that the engine did not take.

    Attributes:
        code: ``"invalid"`` (the message names argument, value and remedy) or ``"queue_full"``.
    """

    request_id: str
    code: str
    message: str


class Answer(Struct, array_like=True, frozen=True):
    """The answer to an ``Ask``; ``error`` where there is none."""

    call_id: int
    value: Any = None
    error: str | None = None


class Hello(Struct, array_like=True, frozen=True, tag="hello"):
    """The engine's first message: its model is ready.

    Attributes:
        version: ``WIRE_VERSION``.
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids lie below it.
        max_num_seqs: sequences that run at the same time.
        max_queue: completions that may wait; None: any number.
        default_params: fields of ``SamplingParams`` that the checkpoint recommends.
        model: the folder or hub id.
        device: ``"cpu"`` or ``"npu:0"``.
        stats: as in ``Step``.
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


class Step(Struct, array_like=True, frozen=True, tag="step"):
    """Everything that the engine has to say after a step, or between two.

    Attributes:
        time: ``time.monotonic`` of the engine process when it was made.
        deltas: in the order of the requests.
        refused: submissions that were not taken.
        answers: to what was asked.
        stats: ``Engine.stats()``; every quarter of a second while it runs, and when it falls idle.
    """

    time: float
    deltas: list[Delta] = []
    refused: list[Refused] = []
    answers: list[Answer] = []
    stats: dict[str, int | float] | None = None


ToEngine: TypeAlias = Submit | Cancel | Ask
FromEngine: TypeAlias = Hello | Step
