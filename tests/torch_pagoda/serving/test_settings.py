"""Settings of the server: each value is checked, and the message names it."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.serving.settings import ApiKey, Settings

SECONDS = ("header_timeout", "body_timeout", "stream_stall_timeout", "sse_ping", "engine_silence", "request_timeout")
COUNTS = ("max_prompts", "max_n", "max_body_size", "max_connections", "keep_alive_timeout")
LIMITS = ("max_queue", "max_queued_tokens", "max_logprobs")
ENDINGS = ("shutdown_timeout", "listen_while_draining")
SWITCHES = (
    *("protect_metrics", "isolate_keys", "trust_request_chat_template", "strict_fields", "enable_admin"),
    "enable_ui",
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SECONDS for value in (0, -1.0, float("nan"), "1", True)),
        *((name, value) for name in COUNTS for value in (0, -1, 1.5, "1", True)),
        *((name, value) for name in LIMITS for value in (-1, 0.5, "1")),
        *((name, value) for name in ENDINGS for value in (-0.5, float("nan"), "1")),
        *((name, value) for name in SWITCHES for value in (0, "yes", None)),
        *(("port", value) for value in (-1, 65536, 1.0)),
        *(("served_model_names", value) for value in ((), ("",), ("a" * 257,), ("a\n",), (1,))),
        *(("root_path", value) for value in ("api", "/a\n", "/" + "a" * 256)),
    ],
)
def test_values_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        Settings(**{name: value})
    assert "\n" not in str(caught.value)


def test_values_at_the_edges_are_taken() -> None:
    Settings(**dict.fromkeys(SECONDS, 1e-3), **dict.fromkeys(COUNTS, 1), **dict.fromkeys((*LIMITS, *ENDINGS), 0))
    Settings(port=0, served_model_names=("a" * 256,), root_path="/" + "a" * 255)
    Settings(port=65535, request_timeout=None, max_queue=None)


def test_keys_have_names_of_their_own_and_can_be_sent() -> None:
    with pytest.raises(ValueError, match="a unique name"):
        Settings(api_keys=(ApiKey("one", "secret"), ApiKey("one", "other")))
    for key in ("", " ", "a b", "schl\u00fcssel", "a\tb"):
        with pytest.raises(ValueError, match="'one' is invalid"):
            Settings(api_keys=(ApiKey("one", key),))
    assert Settings(api_keys=(ApiKey("one", "secret"), ApiKey("two", "other"))).model_name == "model"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "[::1]"}, True),
        ({"host": "127.9.9.9"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "example.org"}, False),
        ({"host": "0.0.0.0", "uds": "/tmp/socket"}, True),
    ],
)
def test_what_only_this_machine_can_reach(given: dict[str, str], found: bool) -> None:
    assert Settings(**given).is_loopback is found
