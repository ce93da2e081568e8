"""Options of ``pagoda serve`` as the server's settings: keys, files, names."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .engine_options import json_object

if TYPE_CHECKING:
    from ..runtime.serving.settings import ApiKey, Settings

KEY_VARIABLE = "PAGODA_API_KEY"

_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64})=([^=].*)")
_MAX_FILE = 2**20
"""Bytes of a file of keys, a template or a configuration."""

_SAME_NAME = (
    *("host", "port", "uds", "root_path", "protect_metrics", "isolate_keys", "trust_request_chat_template"),
    *("tool_call_parser", "reasoning_parser", "max_queue", "max_queued_tokens", "max_logprobs", "max_body_size"),
    *("max_connections", "request_timeout", "stream_stall_timeout", "sse_ping", "shutdown_timeout"),
    *("header_timeout", "body_timeout", "strict_fields", "enable_admin", "metrics_prefix"),
)
"""Options that ``Settings`` has under the same name."""


def make_settings(model: str, given: Mapping[str, Any], engine: Mapping[str, Any], version: str) -> Settings:
    """The server's settings.

    Args:
        model: as it was named.
        given: all options of the command by their names.
        engine: keywords of ``LLM``; they are part of the fingerprint.
        version: of this software.

    Raises:
        ValueError: an option or a file cannot be used.
    """
    from ..runtime.serving.settings import Settings

    values = {name: given[name] for name in _SAME_NAME if given[name] is not None}
    kwargs = given["default_chat_template_kwargs"]
    return Settings(
        **values,
        served_model_names=served_names(model, given["served_model_name"]),
        api_keys=api_keys(given["api_key"] or (), given["api_key_file"], os.environ.get(KEY_VARIABLE)),
        allowed_origins=tuple(given["allowed_origins"] or ()),
        allowed_hosts=tuple(given["allowed_hosts"] or ()),
        chat_template=None
        if given["chat_template"] is None
        else read_text("--chat-template", given["chat_template"]),
        chat_template_kwargs={} if kwargs is None else json_object("--default-chat-template-kwargs", kwargs),
        enable_ui=not given["no_ui"],
        system_fingerprint=_fingerprint(version, model, engine),
        version=version,
    )


def served_names(model: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """Names that clients may ask for: those that were given, else the folder's and the model as it was named."""
    if given:
        return tuple(dict.fromkeys(given))
    name = Path(model).resolve().name if Path(model).is_dir() else model
    return tuple(dict.fromkeys((name, model))) if len(model) <= 256 else (name,)


def api_keys(given: Sequence[str], file: Path | None, variable: str | None) -> tuple[ApiKey, ...]:
    """Keys from the options ``--api-key``, a file with one in each line, and the environment.

    Each is ``KEY`` or ``NAME=KEY``.

    Raises:
        ValueError: the file cannot be read.
    """
    from ..runtime.serving.settings import ApiKey

    entries = [entry for entry in (*given, variable or "") if entry]
    if file is not None:
        lines = (line.strip() for line in read_text("--api-key-file", file).splitlines())
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {file} holds no key; write one per line")
        entries += found
    keys = []
    for number, entry in enumerate(entries, 1):
        named = _NAMED_KEY.fullmatch(entry)
        keys.append(ApiKey(named[1], named[2]) if named else ApiKey(f"key{number}", entry))
    return tuple(keys)


def read_text(option: str, file: Path) -> str:
    """A file's text.

    Raises:
        ValueError: it is no UTF-8 text, too large, or not there.
    """
    try:
        raw = file.read_bytes()
        if len(raw) > _MAX_FILE:
            raise ValueError(f"{option} {file} is above {_MAX_FILE} bytes; give a smaller file")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"{option} {file} cannot be read: {error.strerror}; give another") from error


def read_config(context: Any, file: Path | None) -> Path | None:
    """Callback of ``--config``: what a file says is the default of the other options.

    Raises:
        ValueError: the file is no JSON or YAML object, or names options that there are not.
    """
    if file is None:
        return None
    try:
        text = read_text("--config", file)
        values = json_object("--config", text) if file.suffix == ".json" else _yaml_object(text)
        names = {parameter.name for parameter in context.command.params} - {"config", "model", "help"}
        renamed = {str(name).replace("-", "_"): value for name, value in values.items()}
        if unknown := sorted(set(renamed) - names):
            raise ValueError(f"--config {file} has {', '.join(unknown)}, which are no options; see --help")
    except ValueError as error:
        raise typer.BadParameter(" ".join(str(error).split())) from error
    context.default_map = {**(context.default_map or {}), **renamed}
    return file


def _yaml_object(text: str) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--config is no YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("--config is no YAML mapping; write 'option: value' lines")
    return value


def _fingerprint(version: str, model: str, engine: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(repr((version, model, sorted(engine.items()))).encode()).hexdigest()
    return f"fp_{digest[:12]}"
