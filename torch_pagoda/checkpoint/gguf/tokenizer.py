"""The tokenizer of a GGUF file: that of the folder it lies in, or what transformers makes of its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint import GgufCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer of its own."""
    return any((folder / name).is_file() for name in _FILES)


def tokenizer_of(file: GgufCheckpoint, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer.

    Args:
        file: a checkpoint whose head was checked, so that transformers reads nothing broken.
        trust_remote_code: run code that lies in the folder.

    Raises:
        ValueError: there is none, or transformers makes none of it.
    """
    from transformers import AutoTokenizer

    folder = Path(file.path).parent
    config = file.config()
    if has_tokenizer(folder):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), config=config, trust_remote_code=trust_remote_code
        )
        return found
    metadata = file.files[0].metadata
    if not isinstance(metadata.get("tokenizer.ggml.tokens"), list) or not metadata["tokenizer.ggml.tokens"]:
        raise ValueError(f"{Path(file.path).name} holds no tokens")
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(folder), gguf_file=Path(file.path).name, config=config
    )
    return made
