"""Removes private facts from a report: folders, addresses, the user, the host, the model's name.

Reports may become public. They contain no prompts and no texts, since all tokens are random; quoted errors may
contain the rest.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["redacted"]

_Redact = Callable[[str], str]

# Folders of a path and its last part. The start of a path follows no letter: "tokens/s" and "a/b" are none.
_PATH = re.compile(
    r"(?<![\w./\]])(?!(?<=:)//)(?:\[(?:home|folder)\]|~[\w.-]*|file:/*)?(?:/[^\s/\\'\"<>:;,()\[\]]+)+/?"
)
_URL = re.compile(r"\b(?!file:)[a-zA-Z][\w+.-]*://[^\s'\"<>]+")
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?![\w.])")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_SHORTEST = 3
_COMMON = frozenset({"root", "user", "users", "home", "localhost", "host", "npu", "admin", "ubuntu"})
"""Common user and host names, which identify nobody and are words."""


def redacted(data: Any, secrets: Mapping[str, str]) -> Any:
    """JSON data with every text redacted; names of fields are ours and stay.

    Args:
        data: the data.
        secrets: text → its replacement, such as the model's name; user, host and folders are known here.
    """
    folders = {os.path.expanduser("~"): "[home]", os.getcwd(): "[folder]"}
    first, last = _replacer({**folders, **secrets}), _replacer(_names())

    def redact(text: str) -> str:
        text = _MAIL.sub("[mail]", first(_URL.sub("[address]", text)))
        text = _PATH.sub(_last_part, _ADDRESS.sub("[address]", text))
        return last(text)

    return _applied(data, redact)


def _applied(data: Any, redact: _Redact) -> Any:
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, Mapping):
        return {name: _applied(each, redact) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [_applied(each, redact) for each in data]
    return data


def _replacer(secrets: Mapping[str, str]) -> _Redact:
    """Replaces whole words and paths."""
    known = sorted((text for text in secrets if len(text) >= _SHORTEST), key=len, reverse=True)
    if not known:
        return lambda text: text
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in known))
    return lambda text: pattern.sub(lambda found: secrets[found[0]], text)


def _last_part(path: re.Match[str]) -> str:
    return "…/" + path[0].rstrip("/").rpartition("/")[2]


def _names() -> dict[str, str]:
    """Names of the user and the host."""
    found = {}
    with suppress(KeyError, OSError):  # a user without a name
        found[getpass.getuser()] = "[user]"
    host = socket.gethostname()
    found |= {host: "[host]", host.partition(".")[0]: "[host]"}
    return {text: shown for text, shown in found.items() if text.lower() not in _COMMON}
