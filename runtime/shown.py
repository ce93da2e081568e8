"""Values as an error message shows them."""

from __future__ import annotations

_MOST_SHOWN = 60
"""Characters of a value that an error shows."""


def shown(value: object) -> str:
    """``repr`` of a value on one line, cut where it is long."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:_MOST_SHOWN]
    try:
        text = repr(value).replace("\n", " ")
    except Exception:  # an integer of thousands of digits, or a repr that fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
