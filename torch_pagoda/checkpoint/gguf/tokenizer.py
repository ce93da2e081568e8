"""The tokenizer of a GGUF file: that of the folder it lies in, or what transformers makes of its metadata, corrected
to what llama.cpp reads there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import GgufCheckpoint
from .container import BadGguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_PIECES = "llama"
"""``tokenizer.ggml.model`` of SentencePiece vocabularies."""
_BYTES = "gpt2"
_WHOLE_WORDS = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano laguna tekken".split()
)
"""``tokenizer.ggml.pre`` of vocabularies that begin a text, and take a word that is a token without merging."""
_BEGUN = _WHOLE_WORDS | {"chameleon"}


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer of its own."""
    return any((folder / name).is_file() for name in _FILES)


def tokenizer_of(file: GgufCheckpoint, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer.

    Args:
        file: a checkpoint whose head was checked, so that transformers reads nothing broken.
        trust_remote_code: run code that lies in the folder.

    Raises:
        ValueError: there is none, or transformers makes none of it that does as the file says.
    """
    from transformers import AutoTokenizer

    folder, name = Path(file.path).parent, Path(file.path).name
    config = file.config()
    if has_tokenizer(folder):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), config=config, trust_remote_code=trust_remote_code
        )
        return found
    metadata = file.files[0].metadata
    _check(name, metadata)
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), gguf_file=name, config=config)
    kind, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == _PIECES:
        _set_space(name, made, metadata.get("tokenizer.ggml.add_space_prefix"))
    if kind == _BYTES and pre in _BEGUN and "tokenizer.ggml.add_bos_token" not in metadata:
        made.add_bos_token = made.bos_token is not None
    if kind == _BYTES and pre in _WHOLE_WORDS:
        made.backend_tokenizer.model.ignore_merges = True
    return made


def _check(name: str, metadata: Mapping[str, Any]) -> None:
    """Check that a vocabulary is there, and what its merges follow from.

    Raises:
        BadGguf: something is missing, or no list.
    """
    remedy = "get a complete file, put its tokenizer.json beside it, or pass tokenizer="
    tokens, scores, merges = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "merges"))
    if not isinstance(tokens, list) or not tokens:
        raise BadGguf(f"{name} holds no tokens; {remedy}")
    if isinstance(merges, list):
        return
    kind = metadata.get("tokenizer.ggml.model")
    if kind == _BYTES:
        raise BadGguf(
            f"{name} holds no 'tokenizer.ggml.merges', without which its vocabulary splits no text; {remedy}"
        )
    if kind == _PIECES and (not isinstance(scores, list) or len(scores) != len(tokens)):
        held = f"{len(scores)} of {len(tokens)}" if isinstance(scores, list) else "no"
        raise BadGguf(
            f"{name} holds {held} 'tokenizer.ggml.scores', from which it follows how its vocabulary splits a text; "
            f"{remedy}"
        )


def _set_space(name: str, made: PreTrainedTokenizerBase, wanted: object) -> None:
    """Have a SentencePiece vocabulary put a space before a text, and take it away again, or not.

    Raises:
        BadGguf: it is of a kind that puts none, and the file wants one.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    backend: Tokenizer = made.backend_tokenizer
    if not isinstance(wanted, bool) or wanted == _puts_space(backend):
        return
    if wanted:
        raise BadGguf(
            f"{name}: its metadata's 'tokenizer.ggml.add_space_prefix' is True, which transformers' "
            f"{type(made).__name__} has no place for; put its tokenizer.json beside it, or pass tokenizer="
        )
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_prefix_space = False


def _puts_space(backend: Tokenizer) -> bool:
    text = "a" if backend.normalizer is None else backend.normalizer.normalize_str("a")
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return text != "a"
