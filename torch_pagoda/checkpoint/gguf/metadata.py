"""A file's metadata, read by keys of its architecture: each value is checked, and unread keys are detected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .container import BadGguf

_LARGEST = 1 << 31

_HARMLESS = frozenset(
    (
        *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "embedding_length_out"),
        *("attention.layer_norm_epsilon", "use_parallel_residual"),
    )
)
"""Keys of an architecture that repeat what the tensors show, or that do not affect the supported models."""


class Metadata:
    """Metadata of a file about its architecture.

    Args:
        path: path of the file, for messages.
        entries: all of its metadata.

    Attributes:
        architecture: name of the architecture in the file.

    Raises:
        BadGguf: the file names no architecture.
    """

    def __init__(self, path: str, entries: Mapping[str, Any]) -> None:
        self._file, self._entries = Path(path).name, entries
        self._read: set[str] = set()
        architecture = entries.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise self.bad(f"its metadata's 'general.architecture' is {architecture!r:.50}, not a name")
        self.architecture = architecture

    def bad(self, what: str, remedy: str = "the file is broken: download it again") -> BadGguf:
        """Return the error for this file."""
        return BadGguf(f"{self._file}: {what}; {remedy}")

    def get(self, key: str) -> Any:
        """Return the value of the architecture's key; None if there is none."""
        self._read.add(key)
        return self._entries.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """Return an integer from 1 on, given once or as a list with the same integer for each layer.

        Raises:
            BadGguf: it is missing without a default, or is not such an integer.
        """
        found = self.get(key)
        if isinstance(found, list) and found:
            if any(entry != found[0] for entry in found):
                raise self.bad(
                    f"its metadata's {self.architecture}.{key} differs between layers, which is not supported",
                    "pass the float checkpoint",
                )
            found = found[0]
        if found is None and default is not None:
            return default
        if type(found) is not int or not 0 < found < _LARGEST:
            raise self._wrong(key, found, f"an integer from 1 to {_LARGEST}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0.

        Raises:
            BadGguf: as for ``whole``.
        """
        found = self.get(key)
        if found is None and default is not None:
            return default
        if type(found) not in (int, float) or not math.isfinite(found) or found <= 0:
            raise self._wrong(key, found, "a finite number above 0")
        # Files store float32; the nearest short decimal is what was meant, 1e-5 and not 9.99999974e-06.
        return _shortest(float(found))

    def text(self, key: str, default: str) -> str:
        """Return a text.

        Raises:
            BadGguf: it is not a text.
        """
        found = self.get(key)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self._wrong(key, found, "a text")
        return found

    def token(self, key: str, num_tokens: int) -> int | None:
        """Return a token's id from the tokenizer's section; None if there is none.

        Raises:
            BadGguf: it is not an id of the vocabulary.
        """
        found = self._entries.get(f"tokenizer.ggml.{key}")
        if found is None or found == 0xFFFFFFFF:
            return None
        if type(found) is not int or not 0 <= found < num_tokens:
            raise self.bad(f"its metadata's 'tokenizer.ggml.{key}' is {found!r:.50}, not an id below {num_tokens}")
        return found

    def check_all_read(self) -> None:
        """Check that every entry of the architecture was read.

        Raises:
            BadGguf: one was not; the message names the first key.
        """
        prefix = f"{self.architecture}."
        for key, value in self._entries.items():
            inner = key.removeprefix(prefix)
            if key.startswith(prefix) and inner not in self._read and inner not in _HARMLESS:
                raise self.bad(
                    f"its metadata's {key!r} is {value!r:.50}, which is not supported and may change the model",
                    "pass the float checkpoint",
                )

    def _wrong(self, key: str, found: Any, needed: str) -> BadGguf:
        what = "is missing" if found is None else f"is {found!r:.50}"
        return self.bad(f"its metadata's {self.architecture + '.' + key!r} {what}; expected {needed}")


def _shortest(number: float) -> float:
    """Return the decimal of at most 8 digits that rounds to the same float32, if there is one."""
    import numpy as np

    single = np.float32(number)
    return float(str(single)) if float(single) == number else number
