"""Resolves a user's model or tokenizer: a folder, a GGUF file or a hub id; and formats errors as one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .gguf.container import is_gguf
from .gguf.source import gguf_in, gguf_of_folder
from .gguf.tokenizer import has_tokenizer

Loaded = TypeVar("Loaded")

ADAPTER_CONFIG = "adapter_config.json"
"""Config file of a peft adapter."""


def check_source(source: str | os.PathLike[str], argument: str = "model") -> str:
    """Return the folder, GGUF file or hub id as a string, after the checks that need no download. A folder without a
    config.json means the GGUF file in it; ``FOLDER:FILE.gguf`` names one of several, as in transformers.

    Raises:
        ValueError: the path does not exist, is neither a folder nor a GGUF file, or contains no config.json.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if name and path.is_dir():
        if (path / "config.json").is_file():
            return name
        is_wanted = argument == "model" or not has_tokenizer(path)
        if is_wanted and (file := gguf_of_folder(path)) is not None:
            return file
        if argument == "model":
            raise ValueError(f"model={name!r} {_without_config(path)}")
        return name
    if name and path.exists():
        if is_gguf(path):
            return name
        raise ValueError(f"{argument}={name!r} is a file; pass the folder that holds it, a GGUF file or a hub id")
    holder, colon, file_name = name.rpartition(":")
    if colon and file_name.endswith(".gguf"):
        return gguf_in(holder, file_name)
    looks_like_path = not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path:
        raise ValueError(f"{argument}={name!r} does not exist; pass an existing checkpoint folder or a hub id")
    return name


def lacks_weights(source: str | os.PathLike[str]) -> bool:
    """Return True for a folder with a config.json and no weights."""
    folder = Path(source).expanduser()
    return (folder / "config.json").is_file() and not any(
        file for pattern in ("*.safetensors", "*.bin", "*.index.json") for file in folder.glob(pattern)
    )


def _without_config(folder: Path) -> str:
    """Return the description of a folder without a config.json, with the remedy."""
    if (folder / ADAPTER_CONFIG).is_file():
        try:
            base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
            base = repr(str(base)[:200])
        except (OSError, ValueError, TypeError, KeyError):
            base = "its base model"
        return (
            f"contains only an adapter ({ADAPTER_CONFIG}, no config.json); load {base} with transformers, apply the "
            "adapter with peft's PeftModel.from_pretrained, and pass what merge_and_unload() returns"
        )
    return "has no config.json; pass a folder written by save_pretrained"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, with the next one if it ends in a colon; or its class name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"KeyError: {text}" if isinstance(error, KeyError) else text


def one_line(what: str, load: Callable[[], Loaded]) -> Loaded:
    """Run a loader of transformers and convert its exceptions to one line."""
    try:
        return load()
    except Exception as error:
        reason = first_line(error)
        if "trust_remote_code=True" in str(error):
            reason = f"{reason.rstrip(' .')}; read that code, then pass trust_remote_code=True (--trust-remote-code)"
        raise ValueError(f"{what}: {reason}") from error
