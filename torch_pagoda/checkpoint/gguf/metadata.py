"""A file's metadata, read by keys of its architecture: each value is checked, and keys that nobody read are known."""

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
"""Keys of an architecture that say nothing that its tensors do not, or nothing to models that are read."""


class Metadata:
    """What a file says of its architecture.

    Args:
        path: of the file, for messages.
        entries: all of its metadata.

    Attributes:
        architecture: as the file names it.

    Raises:
        BadGguf: no architecture is named.
    """

    def __init__(self, path: str, entries: Mapping[str, Any]) -> None:
        self._file, self._entries = Path(path).name, entries
        self._read: set[str] = set()
        architecture = entries.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise self.bad(f"its metadata's 'general.architecture' is {architecture!r:.50}, no name")
        self.architecture = architecture

    def bad(self, what: str, remedy: str = "the file is broken: get it again") -> BadGguf:
        """The error for this file."""
        return BadGguf(f"{self._file}: {what}; {remedy}")

    def get(self, key: str) -> Any:
        """The value of the architecture's key; None where there is none."""
        self._read.add(key)
        return self._entries.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on, or a list of the same one for each layer.

        Raises:
            BadGguf: it is missing and there is no default, or is none.
        """
        found = self.get(key)
        if isinstance(found, list) and found:
            if any(entry != found[0] for entry in found):
                raise self.bad(
                    f"its metadata's {self.architecture}.{key} differs from layer to layer, which is not read",
                    "pass the float checkpoint",
                )
            found = found[0]
        if found is None and default is not None:
            return default
        if type(found) is not int or not 0 < found < _LARGEST:
            raise self._wrong(key, found, f"a whole number from 1 to {_LARGEST}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0.

        Raises:
            BadGguf: as for ``whole``.
        """
        found = self.get(key)
        if found is None and default is not None:
            return default
        if type(found) not in (int, float) or not math.isfinite(found) or found <= 0:
            raise self._wrong(key, found, "a finite number above 0")
        # Files hold float32; the nearest short decimal is what was meant, 1e-5 and not 9.99999974e-06.
        return _shortest(float(found))

    def text(self, key: str, default: str) -> str:
        """A text.

        Raises:
            BadGguf: it is none.
        """
        found = self.get(key)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self._wrong(key, found, "a text")
        return found

    def token(self, key: str, num_tokens: int) -> int | None:
        """A token's id in the tokenizer's part; None where there is none.

        Raises:
            BadGguf: it is no token.
        """
        found = self._entries.get(f"tokenizer.ggml.{key}")
        if found is None or found == 0xFFFFFFFF:
            return None
        if type(found) is not int or not 0 <= found < num_tokens:
            raise self.bad(f"its metadata's 'tokenizer.ggml.{key}' is {found!r:.50}, no token of {num_tokens}")
        return found

    def check_all_read(self) -> None:
        """Refuse a file that says of its architecture what nobody asked for.

        Raises:
            BadGguf: it names the first key.
        """
        prefix = f"{self.architecture}."
        for key, value in self._entries.items():
            inner = key.removeprefix(prefix)
            if key.startswith(prefix) and inner not in self._read and inner not in _HARMLESS:
                raise self.bad(
                    f"its metadata's {key!r} is {value!r:.50}, which is not read, and the model might be another",
                    "pass the float checkpoint",
                )

    def _wrong(self, key: str, found: Any, needed: str) -> BadGguf:
        what = "is missing" if found is None else f"is {found!r:.50}"
        return self.bad(f"its metadata's {self.architecture + '.' + key!r} {what}; {needed} is needed")


def _shortest(number: float) -> float:
    """The decimal of at most 8 digits that rounds to the same float32, where there is one."""
    import numpy as np

    single = np.float32(number)
    return float(str(single)) if float(single) == number else number
