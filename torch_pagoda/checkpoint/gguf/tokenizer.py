"""The tokenizer of a GGUF file: the one in its folder, or the one that transformers builds from the metadata, with
corrections to match llama.cpp."""

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
    """Return True if the folder contains its own tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def tokenizer_of(file: GgufCheckpoint, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file.

    Args:
        file: a checkpoint with a checked header, so that transformers reads nothing broken.
        trust_remote_code: run code from the folder.

    Raises:
        ValueError: there is none, or transformers cannot build one that behaves as the file states.
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
    """Check that the vocabulary is there, and the data that determine its merges.

    Raises:
        BadGguf: a list is missing.
    """
    remedy = "get a complete file, put its tokenizer.json next to it, or pass tokenizer="
    tokens, scores, merges = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "merges"))
    if not isinstance(tokens, list) or not tokens:
        raise BadGguf(f"{name} holds no tokens; {remedy}")
    if isinstance(merges, list):
        return
    kind = metadata.get("tokenizer.ggml.model")
    if kind == _BYTES:
        raise BadGguf(f"{name} has no 'tokenizer.ggml.merges', which its vocabulary needs to tokenize; {remedy}")
    if kind == _PIECES and (not isinstance(scores, list) or len(scores) != len(tokens)):
        held = f"{len(scores)} of {len(tokens)}" if isinstance(scores, list) else "no"
        raise BadGguf(
            f"{name} holds {held} 'tokenizer.ggml.scores', which its vocabulary needs to tokenize; {remedy}"
        )


def _set_space(name: str, made: PreTrainedTokenizerBase, wanted: object) -> None:
    """Make a SentencePiece vocabulary add a space before a text and remove it when decoding, or not.

    Raises:
        BadGguf: the file requires the space, and the tokenizer cannot add it.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    backend: Tokenizer = made.backend_tokenizer
    if not isinstance(wanted, bool) or wanted == _puts_space(backend):
        return
    if wanted:
        raise BadGguf(
            f"{name}: its metadata's 'tokenizer.ggml.add_space_prefix' is True, which transformers' "
            f"{type(made).__name__} does not support; put its tokenizer.json next to it, or pass tokenizer="
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
