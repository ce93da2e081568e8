"""Settings of one server, validated at construction."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..runtime.option import option
from ..runtime.requests.checks import check_bool, real_number, shown, whole_number

if TYPE_CHECKING:
    from .monitoring.engine_families import MetricsPrefix

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


@dataclass(frozen=True)
class ApiKey:
    """An API key.

    Attributes:
        name: for logs and fair scheduling; the key itself is never logged.
        key: the secret that clients send.
    """

    name: str
    key: str = field(repr=False)


@dataclass(frozen=True)
class Settings:
    """Settings of one server; the fields that are options of ``pagoda serve`` have their help texts.

    Attributes:
        served_model_names: names that clients may use; responses contain the first.
        api_keys: keys that clients may use; empty: no key is needed.
        allowed_hosts: accepted names in the ``Host`` header in addition to the loopback's own, if the server listens
            on the loopback only.
        chat_template: Jinja text that replaces the tokenizer's own.
        chat_template_kwargs: template variables that requests may override.
        max_prompts: maximum prompts of one request.
        max_n: maximum completions of one prompt.
        header_timeout: seconds from the first byte of a request (or from connecting) to the end of its headers.
        body_timeout: seconds from there to the end of its body.
        keep_alive_timeout: seconds that an idle connection stays open.
        sse_ping: seconds without events after which a stream sends a comment.
        engine_silence: seconds without a message of a busy engine after which ``/health`` fails.
        listen_while_draining: seconds for which new connections are still accepted (and refused with 503).
        enable_ui: serve the chat page at ``/``.
        system_fingerprint: identifies model and program for clients.
        version: of this software.

    Raises:
        ValueError: a value has the wrong type or is out of range; one line with argument, value and remedy.
    """

    served_model_names: tuple[str, ...] = ("model",)
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0: any free one.")
    uds: str | None = option(None, "Path of a Unix socket to listen on instead.", metavar="PATH")
    root_path: str = option("", "Prefix that a proxy strips from paths, for the links of /docs.")
    api_keys: tuple[ApiKey, ...] = ()
    protect_metrics: bool = option(False, "/metrics needs a key, too.")
    isolate_keys: bool = option(False, "Keys share no cached prompts.")
    allowed_origins: tuple[str, ...] = option((), "Origins whose pages may call (CORS), * for all; repeatable.")
    allowed_hosts: tuple[str, ...] = option((), "Host names that a proxy in front sends; repeatable.")
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = option(
        False, "Accept a chat template in requests. Use it with clients that you trust."
    )
    tool_call_parser: str | None = option(None, "Format of tool calls; by default the model's.", metavar="NAME")
    reasoning_parser: str | None = option(None, "Format of reasoning; by default the model's.", metavar="NAME")
    max_queue: int | None = option(None, "Completions that may wait; by default 4 * --max-num-seqs.")
    max_queued_tokens: int | None = option(None, "Prompt tokens that may wait.")
    max_logprobs: int = option(20, "Most likely tokens that a request may ask for.")
    max_prompts: int = 256
    max_n: int = 64
    max_body_size: int = option(8 * 2**20, "Bytes of a request's body.")
    max_connections: int = option(2048, "Maximum open connections.")
    header_timeout: float = option(10.0, "Seconds to receive the headers of a request.")
    body_timeout: float = option(30.0, "Seconds to receive the body of a request.")
    keep_alive_timeout: int = 75
    request_timeout: float | None = option(
        None, "Seconds after which a request ends as it is; requests may ask for less."
    )
    stream_stall_timeout: float = option(60.0, "Drop clients that stop reading for this long (s).")
    sse_ping: float = option(15.0, "Seconds between SSE keep-alive comments.")
    engine_silence: float = 10.0
    shutdown_timeout: float = option(30.0, "Seconds that SIGTERM leaves to unfinished requests.")
    listen_while_draining: float = 1.0
    strict_fields: bool = option(False, "Refuse requests with unknown fields.")
    enable_admin: bool = option(False, "Serve /server_info and /reset_prefix_cache.")
    enable_ui: bool = True
    metrics_prefix: MetricsPrefix = option("both", "Names in /metrics: both, vllm or pagoda.")
    system_fingerprint: str = "fp_pagoda"
    version: str = "0"

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(_is_name(name) for name in self.served_model_names):
            raise ValueError(
                f"served_model_names={shown(self.served_model_names)} are not valid names; give one or more of 1 to "
                "256 printable characters"
            )
        whole_number("port", self.port, 0, "use 0 for any free one", highest=65535)
        for name in ("max_logprobs", "max_queue", "max_queued_tokens"):
            if (count := getattr(self, name)) is not None:
                whole_number(name, count, 0, "use 0 for none")
        for name in ("max_prompts", "max_n", "max_body_size", "max_connections", "keep_alive_timeout"):
            whole_number(name, getattr(self, name), 1, "use at least 1")
        for name in ("header_timeout", "body_timeout", "stream_stall_timeout", "sse_ping", "engine_silence"):
            remedy = "use a positive number of seconds"
            real_number(name, getattr(self, name), 0, float("inf"), remedy, open_low=True)
        for name in ("shutdown_timeout", "listen_while_draining"):
            real_number(name, getattr(self, name), 0, float("inf"), "use a number of seconds, 0 for at once")
        if self.request_timeout is not None:
            remedy = "use a positive number of seconds, or leave it out"
            real_number("request_timeout", self.request_timeout, 0, float("inf"), remedy, open_low=True)
        for name in (
            *("protect_metrics", "isolate_keys", "trust_request_chat_template"),
            *("strict_fields", "enable_admin", "enable_ui"),
        ):
            check_bool(name, getattr(self, name))
        if self.root_path and not (self.root_path.startswith("/") and _is_name(self.root_path)):
            raise ValueError(f"root_path={shown(self.root_path)} does not begin with /; add it")
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise ValueError(f"api_keys have duplicate names {shown(names)}; give each key a unique name")
        for key in self.api_keys:
            if not key.key.isascii() or not key.key.isprintable() or not key.key.strip() or " " in key.key:
                raise ValueError(
                    f"api_keys: the key named {shown(key.name)} is invalid; use printable ASCII without spaces"
                )

    @property
    def model_name(self) -> str:
        """The model name in responses."""
        return self.served_model_names[0]

    @property
    def is_loopback(self) -> bool:
        """True if nothing outside this machine can connect."""
        return self.uds is not None or is_loopback(self.host)


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """True for the names and addresses of this machine's loopback."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_name(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= 256 and text.isprintable()
