"""Log lines of a server: one per finished request, and one of the throughput while it is busy."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

from ..engine_process.client import EngineClient
from .request_record import RequestRecord

logger = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]
LogRequests = Literal["none", "ids", "content"]
"""Whether to log finished requests: not at all, their statistics, or also prompts and outputs."""

MAX_VALUE_CHARS = 256
"""Maximum characters of a text value in a line, contents excepted."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]+")
# What moves a terminal's cursor, ends a line or reorders text: C0, DEL, C1, line and paragraph separators, marks of
# direction, lone surrogates.
_HOSTILE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """``text`` on one line: control characters, separators and bidi marks as ``\\uXXXX``."""
    return _HOSTILE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def set_up_logs(log_format: LogFormat, is_verbose: bool = False) -> None:
    """Have this process log to stderr.

    Args:
        log_format: of the lines.
        is_verbose: log what libraries say, too.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if is_verbose else logging.WARNING)
    logging.getLogger("torch_pagoda.serving").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


class RequestLog:
    """The log of finished requests.

    Args:
        requests: see ``LogRequests``.
        target: the logger; lines are INFO messages with their values in ``fields``.
    """

    def __init__(self, requests: LogRequests = "ids", target: logging.Logger = logger) -> None:
        self._requests = requests
        self._target = target

    @property
    def wants_content(self) -> bool:
        """Whether ``write`` uses prompts and outputs."""
        return self._requests == "content"

    def write(self, record: RequestRecord, *, prompt: object = None, output: object = None) -> None:
        """Log a finished request; pass ``prompt`` and ``output`` (JSON values) only if contents are logged."""
        if self._requests == "none" or not self._target.isEnabledFor(logging.INFO):
            return
        fields = request_fields(record)
        if self.wants_content:
            fields |= {"prompt": prompt, "output": output}
        line = " ".join(f"{name}={_text_value(value)}" for name, value in fields.items() if value is not None)
        self._target.info("request %s", line, extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """The values of a request's line; times in seconds, the longest of several prompts (``tpot``: the mean)."""
    per_token = [s for prompt in record.prompts if (s := prompt.seconds_per_output_token) is not None]
    reasons = [reason or "abort" for reason in record.finish_reasons]
    return {
        "id": _cut(record.request_id),
        "key": _cut(record.key_name),
        "endpoint": record.endpoint,
        "model": _cut(record.model),
        "status": record.status,
        "error": _cut(record.error_code),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "finish": ",".join(reasons) or None,
        "queue": _rounded(record.longest("queue")),
        "ttft": _rounded(record.first_token_seconds),
        "tpot": _rounded(sum(per_token) / len(per_token) if per_token else None),
        "seconds": _rounded(record.seconds),
        "streamed": record.streamed,
        "disconnected": record.disconnected,
    }


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _text_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if _PLAIN.fullmatch(text) else escaped(json.dumps(text, ensure_ascii=False))


def throughput_line(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> str | None:
    """The throughput line between two states of ``EngineClient.stats``; None if the engine was and is idle."""

    def grown(key: str) -> float:
        return max(0.0, after.get(key, 0) - before.get(key, 0))

    running, waiting = int(after.get("running", 0)), int(after.get("queue_length", 0))
    steps, prompt, generated = grown("steps"), grown("prompt_tokens"), grown("generated_tokens")
    if not (running or waiting or steps):
        return None
    queries = grown("prefix_query_tokens")
    hits = 100 * grown("prefix_hit_tokens") / queries if queries else 0.0
    total = after.get("blocks_total", 0)
    usage = 100 * after.get("blocks_used", 0) / total if total else 0.0
    return (
        f"prompts {prompt / seconds:.1f} tokens/s, generated {generated / seconds:.1f} tokens/s, "
        f"running {running}, waiting {waiting}, KV cache {usage:.1f} %, prefix cache hits {hits:.1f} %"
    )


async def log_throughput(client: EngineClient, interval: float = 10.0) -> None:
    """Log a throughput line every ``interval`` seconds while the engine is busy; until cancelled."""
    before, begin = dict(client.stats), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        after, now = dict(client.stats), time.monotonic()
        line = throughput_line(before, after, now - begin)
        if line is not None:
            logger.info(line)
        before, begin = after, now


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, message; a message never spans lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback, indented, so that none of its lines looks like a log line."""
        return "\n".join("    " + escaped(line) for line in super().formatException(ei).splitlines())


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``logger``, and ``message`` or a request's values."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, in ASCII."""
        fields = getattr(record, "fields", None)
        message = {"message": record.getMessage()} if fields is None else {"event": "request", **fields}
        entry = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            **message,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str).replace("\x7f", "\\u007f")


def formatter(log_format: LogFormat) -> logging.Formatter:
    """The formatter for ``--log-format``; set on a handler of the root logger, so that every line has one form."""
    return JsonFormatter() if log_format == "json" else TextFormatter()
