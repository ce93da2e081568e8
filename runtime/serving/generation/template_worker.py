"""Process that renders chat templates of requests, within bounds of time and memory; see ``template_process.py``."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...requests.conversation import ConversationError, TemplateRefusal, render_conversation
from ..child_process import LENGTH


class OutOfTime(BaseException):
    """A template that goes on; no ``except Exception`` on its way may hold it up."""


class Templates:
    """What of a tokenizer its templates are rendered with.

    Args:
        special_tokens: their names and texts.
    """

    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    def __init__(self, special_tokens: dict[str, Any]) -> None:
        self.special_tokens_map = special_tokens

    def get_chat_template(self, chat_template: str, tools: Any = None) -> str:
        """The one that is given."""
        return chat_template


def _answer(frame: bytes, size: int) -> dict[str, str]:
    """To the request in a frame; ``size``: of the process without it."""
    try:
        request = json.loads(frame)
        _limit_memory(size + request["bytes"])
        return answer_to(request)
    except OutOfTime:  # between two of its instructions
        return {"error": "time"}
    except MemoryError:
        return {"error": "memory"}


def answer_to(request: dict[str, Any]) -> dict[str, str]:
    """``{"text": …}``, or ``{"error": …}``: ``"length"``, what the template says, or what is wrong with ``"field"``.

    Raises:
        OutOfTime, MemoryError: as they say.
    """
    templates: Any = Templates(request["special_tokens"])
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        text = render_conversation(templates, request["messages"], **request["options"])
        return {"text": text} if len(text) <= request["most"] else {"error": "length"}
    except TemplateRefusal as refusal:
        return {"error": refusal.reason}
    except ConversationError as error:
        return {"error": str(error), "field": error.field}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _address_space() -> int:
    """Bytes of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(most: int) -> None:
    """Let the process have so many bytes, where the system can hold it to that."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer frames until ``source`` ends, or memory did."""
    size = _address_space()  # what templates of former requests hold counts to what they may take together
    _send(sink, b"")  # ready
    while head := source.read(LENGTH.size):
        answer = _answer(source.read(LENGTH.unpack(head)[0]), size)
        _send(sink, json.dumps(answer).encode())
        if answer.get("error") == "memory":
            return


def _send(sink: BinaryIO, frame: bytes) -> None:
    sink.write(LENGTH.pack(len(frame)) + frame)
    sink.flush()


if __name__ == "__main__":
    # Ctrl+C in a terminal reaches this process, too: the one that it serves decides when to end it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _out_of_time)
    # Tokens go before templates.
    os.nice(5)
    serve(sys.stdin.buffer, sys.stdout.buffer)
